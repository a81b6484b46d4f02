"""Write the arguments of `ClickModel.fit` (features, labels of two classes, weights) to files for
`prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.columns.converter import BadRows, Converter, naming_column
from stratarec.data.columns.frames import check_lengths, has_column_names, read_column, read_columns
from stratarec.data.data_quality import repeated_shares
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.schema import Schema
from stratarec.data.sources import SourceConfig
from stratarec.data.sources.base import View
from stratarec.errors import ConfigError, DataError
from stratarec.io.scratch import temporary_directory
from stratarec.training.raw_logs import open_view

# Share of rows that become validation samples if none are given, and the minimum rows of a class
# for such a split.
_VALID, _FEW = 0.1, 20


@dataclass(frozen=True, kw_only=True)
class FrameLog:
    """Files with training or validation rows, and properties of their columns."""

    paths: tuple[str, ...]
    label: str = ""
    """Column of the label; empty if it must be guessed."""
    classes: NDArray[Any] | None = None
    """The two classes, which the file contains as 0 and 1."""
    weight: str = ""
    columns: tuple[str, ...] = ()
    """Columns that may be used as features."""
    is_frame: bool = True
    """Whether the file was written from a frame; if so, all its rows are for training."""


@dataclass(frozen=True)
class FitArguments:
    """Rows, labels and weights as they were passed to `fit`."""

    frame: Any
    y: Any
    label: str
    weight: Any

    def write(self, path: Path, like: FrameLog | None = None) -> FrameLog:
        """Write the frame as Parquet to `path`. If `like` is given, the labels must have its
        classes.
        """
        if paths := _paths(self.frame):
            return self._of_files(paths, like)
        columns = read_columns(self.frame)
        if not columns:
            rows = len(self.frame) if hasattr(self.frame, "__len__") else 0
            raise DataError(
                f"the frame has 0 feature(s) (shape=({rows}, 0)) while a minimum of 1 is required."
            )
        if self.y is None and not self.label and is_array(self.frame):
            raise DataError("ClickModel requires y to be passed, but the target y is None")
        label, names, classes = self.label, tuple(columns), None
        if self.y is not None:
            label = (like.label if like else "") or _unused("label", columns)
            columns[label] = read_labels(self.y)
        elif label and label not in columns:
            raise DataError(
                f"label is {label!r}, which is not a column; the frame has {', '.join(names[:20])}"
            )
        if label:
            names = tuple(name for name in names if name != label)
            classes = like.classes if like else _classes(columns[label], named=self.y is None)
            if classes is not None:
                columns[label] = encode_labels(columns[label], classes)
        weight = ""
        if self.weight is not None:
            weight = _unused("weight", columns)
            columns[weight] = pl.Series(weight, read_weights(self.weight))
        if not check_lengths(columns):
            raise DataError("the frame has 0 rows (0 sample(s)), expected at least one")
        if weight and label:
            heavy = columns[label].filter(columns[weight] > 0)
            if not len(heavy):
                raise DataError("every sample_weight is zero (0); at least one must be above 0")
            if heavy.n_unique() < 2:
                raise DataError(
                    "the rows whose sample_weight is above 0 are of one class, expected two classes"
                )
        pl.DataFrame([column.alias(name) for name, column in columns.items()]).write_parquet(path)
        return FrameLog(paths=(str(path),), label=label, classes=classes, weight=weight, columns=names)

    def _of_files(self, paths: tuple[str, ...], like: FrameLog | None) -> FrameLog:
        if self.y is not None or self.weight is not None:
            raise ConfigError(
                "labels and weights of a log in files are columns: pass label, not y or sample_weight"
            )
        if like is not None and like.is_frame:
            raise ConfigError(
                "valid is a path, but the frame is not: give both as files, or both as frames"
            )
        return FrameLog(paths=paths, label=self.label, is_frame=False)


def read_rows(frame: Any, source_config: Callable[[], SourceConfig]) -> dict[str, pl.Series]:
    """Return the columns of a frame, or of a path or paths as `fit` takes them, which are read by
    the recipe's source.

    Files have the values of the log; all rows are checked, so that a wrong one is named with its
    file and line. `source_config` is called only for files, because reading a recipe takes longer
    than scoring a row.
    """
    paths = _paths(frame)
    if not paths:
        return read_columns(frame)
    config = source_config()
    schema: Schema = getattr(config, "schema", Schema())
    names = open_view(config, None, paths, View(schema=schema)).column_names()
    keys = (*schema.label_columns, *filter(None, (schema.user, schema.time)))
    passed = tuple(name for name in dict.fromkeys((*schema.scored_columns, *keys)) if name in names)
    sparse = [
        f.as_column() if f.kind == "history" else f
        for f in schema.sparse
        if f.kind != "history" or f.name in passed
    ]
    # Labels are returned as they are: those of a frame's model may be other words than 0 and 1.
    label = _unused("label", dict.fromkeys(names))
    features = replace(
        schema,
        label=label,
        labels=(),
        sparse=tuple(sparse),
        time=schema.scored_time,
        session="",
        user="",
        weight="",
    )
    source = open_view(config, None, paths, View(schema=features, label=False, pass_through=passed))
    frames = []
    lists = [feature.name for feature in sparse if feature.traits.lists and not feature.weights]
    with temporary_directory() as workspace:
        for chunk in source.chunks(workspace):
            assert chunk.passed_through is not None
            frames.append(chunk.passed_through.with_columns(chunk.frame[name] for name in lists))
    # The first block of a column with text may have numbers only.
    return {column.name: column for column in pl.concat(frames, how="vertical_relaxed").iter_columns()}


def check_rows(log: FrameLog, name: str, config: PrepareConfig) -> None:
    """Raise `DataError` for the first row that `prepare` would refuse.

    The message names the frame as `name`, and the row's number in the frame.
    """
    schema = getattr(config.source, "schema", None)
    if log.is_frame and schema is not None:
        frame, bad = pl.read_parquet(log.paths[0]), BadRows(config.on_bad_row)
        Converter(name, 1 + np.arange(len(frame), dtype=np.int64), bad).convert(frame, schema)


def split_log(data: dict[str, Any], log: FrameLog, valid: FrameLog | None) -> None:
    """Set the splits in `data`, a recipe's data section. Validation rows are `valid`, or else a
    part of the frame.
    """
    by_time = data.get("split", {}).get("by") == "time"
    if valid is not None:
        files = (list(log.paths), list(valid.paths))
    elif not log.is_frame:
        return
    else:
        parts = _split_frame(log, data["source"]["schema"], by_time=by_time)
        if parts is None:
            data["split"]["test"] = 0
            return
        files = parts
    data["source"]["paths"] = files[0] + files[1]
    data["split"] = {"by": "file", "valid": files[1], "test": []} if files[1] else {"valid": 0, "test": 0}


def _split_frame(
    log: FrameLog, schema: Mapping[str, Any], *, by_time: bool
) -> tuple[list[str], list[str]] | None:
    """Split the file of a frame, and return the files for training and for validation.

    A random tenth of each class is for validation; nothing if a class is small. If the frame has
    copies of rows, such as oversampled positives, it is a random tenth of the distinct rows, so
    that no row is on both sides. None if the split is by time, and the last tenth has no copies of
    earlier rows.
    """
    path = Path(log.paths[0])
    frame = pl.read_parquet(path)
    draws = np.random.default_rng(0)
    chosen = np.zeros(len(frame), dtype=bool)
    if by_time:
        chosen = frame[schema["time"]].rank("ordinal").to_numpy() > (1 - _VALID) * len(frame)
    for value in (0, 1) if log.classes is not None and not by_time else ():
        rows = np.flatnonzero((frame[log.label] == value).to_numpy())
        if len(rows) < _FEW:
            return [str(path)], []
        chosen[draws.permutation(rows)[: round(len(rows) * _VALID)]] = True
    if log.classes is None and not by_time:
        chosen = draws.random(len(frame)) < _VALID
    row_of, has_copies = _distinct_rows(frame, schema, chosen)
    if has_copies:
        chosen = (draws.random(len(row_of)) < _VALID)[row_of]
    elif by_time:
        return None
    parts = path.with_name("some.parquet"), path.with_name("others.parquet")
    for part, rows_of in zip(parts, (~chosen, chosen), strict=True):
        frame.filter(rows_of).write_parquet(part)
    return [str(parts[0])], [str(parts[1])]


def _distinct_rows(
    frame: pl.DataFrame, schema: Mapping[str, Any], chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], bool]:
    """Return ``[N]`` numbers of the distinct combinations of features, and whether `chosen` rows
    are copies of others.

    Combinations that are equal by chance are no copies; see `repeated_shares`.
    """
    features = [feature["name"] for kind in ("dense", "sparse") for feature in schema.get(kind, ())]
    names = [name for name in dict.fromkeys((*features, schema.get("user", ""))) if name in frame.columns]
    label = frame[label_column(schema)]
    hashes = pl.DataFrame([frame[name] for name in names if name != schema.get("time")]).hash_rows()
    is_most = (label == label.max()).fill_null(False).cast(pl.Int8)
    rows = pl.DataFrame({"hash": hashes, "split": chosen.astype(np.int8), "label": is_most})
    return hashes.rank("dense").cast(pl.Int64).to_numpy() - 1, bool(repeated_shares([rows]))


def label_column(schema: Mapping[str, Any]) -> str:
    """Return the column of the (first) label of a schema as a recipe has it."""
    rule = schema["labels"][0] if schema.get("labels") else schema.get("label", Schema.label)
    return str(rule["column"] if isinstance(rule, Mapping) else rule)


def _paths(frame: Any) -> tuple[str, ...]:
    """Return the paths if `frame` is a path or a list of paths, else nothing."""
    paths = [frame] if isinstance(frame, str | Path) else frame if isinstance(frame, list | tuple) else ()
    return tuple(map(str, paths)) if all(isinstance(path, str | Path) for path in paths) else ()


def is_array(frame: Any) -> bool:
    """Whether a frame is an array, whose columns have no names."""
    return not (has_column_names(frame) or _paths(frame))


def _unused(name: str, columns: Mapping[str, Any]) -> str:
    while name in columns:
        name += "_"
    return name


def read_labels(y: Any) -> pl.Series:
    """Return ``[N]`` labels of an array, list or series."""
    if not isinstance(y, pl.Series):
        y = np.asarray(y)
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1:
            raise DataError(f"y has the shape {list(y.shape)}, expected one label per row")
    with naming_column("y", "y"):
        return read_column("y", y)


def read_weights(weights: Any) -> NDArray[np.float64]:
    """Return ``[N]`` weights of samples; `DataError` names the first row whose weight is negative
    or not finite.
    """
    name, bad = "sample_weight", BadRows(None)
    with naming_column(name, name):
        column = read_column(name, weights)
    values = Converter(name, 1 + np.arange(len(column), dtype=np.int64), bad).weight(column)
    bad.raise_first()
    return values.to_numpy()


def _classes(labels: pl.Series, *, named: bool) -> NDArray[Any] | None:
    """Return the two values of a label, sorted. None for a column with more values, for which
    ``init`` finds a rule.
    """
    missing = labels.is_null()
    if missing.any():
        raise DataError(
            f"the label of row {int(missing.arg_max() or 0) + 1} is missing, expected one of two classes"
        )
    classes = labels.unique().sort().to_list()
    if len(classes) == 2:
        return np.array(classes)
    if len(classes) < 2:
        raise DataError(f"the labels have {len(classes)} class, expected two classes")
    if named and labels.dtype.is_numeric():
        return None
    raise DataError(
        f"Only binary classification is supported. The labels have {len(classes)} classes: "
        f"{', '.join(map(repr, classes[:6]))}"
        + ("; Unknown label type: continuous" if labels.dtype.is_float() else "")
    )


def encode_labels(labels: pl.Series, classes: NDArray[Any]) -> pl.Series:
    """Replace the two classes by 0 and 1."""
    values = classes.tolist()
    other = ~labels.is_in(values) | labels.is_null()
    if other.any():
        row = int(other.arg_max() or 0)
        raise DataError(
            f"the label of row {row + 1} is {labels[row]!r}, expected {values[0]!r} or {values[1]!r}"
        )
    codes: pl.Series = (labels == values[1]).cast(pl.Int8)
    return codes
