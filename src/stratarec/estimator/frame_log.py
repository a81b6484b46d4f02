"""What `ClickModel.fit` is given, as files that the commands read: features, two classes of a label, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.frames import has_column_names, read_columns
from stratarec.data.prepare.config import PrepareConfig
from stratarec.errors import ConfigError, DataError

# Validation samples where none are given, as a share; none of a class of fewer than so many.
_VALID, _FEW = 0.1, 20


@dataclass(frozen=True, kw_only=True)
class FrameLog:
    """What `fit` is given, as files."""

    paths: tuple[str, ...]
    label: str = ""
    """Column of it, empty where it is to be guessed."""
    classes: NDArray[Any] | None = None
    """Values that stand as 0 and 1 in it."""
    weight: str = ""
    columns: tuple[str, ...] = ()
    """Features and whatever else may be one."""
    own: bool = True
    """Whether it is a frame that was written down: all of it is for training."""


@dataclass(frozen=True)
class Given:
    """What `fit` is called with."""

    frame: Any
    y: Any
    label: str
    weight: Any

    def written(self, path: Path, like: FrameLog | None = None) -> FrameLog:
        """The same as files: a frame as Parquet at `path`; labels of `like` have its classes."""
        if isinstance(self.frame, str | Path) or _are_paths(self.frame):
            return self._of_files(like)
        columns = read_columns(self.frame)
        if not columns:
            rows = len(self.frame) if hasattr(self.frame, "__len__") else 0
            raise DataError(f"the frame has 0 feature(s) (shape=({rows}, 0)) while a minimum of 1 is required.")
        if self.y is None and not self.label and is_array(self.frame):
            raise DataError("ClickModel requires y to be passed, but the target y is None")
        label, names, classes = self.label, tuple(columns), None
        if self.y is not None:
            label = (like.label if like else "") or _unused("label", columns)
            columns[label] = read_labels(self.y)
        elif label and label not in columns:
            raise DataError(f"label is {label!r}, which is no column; the frame has {', '.join(names[:20])}")
        if label:
            names = tuple(name for name in names if name != label)
            classes = like.classes if like else _classes(columns[label], named=self.y is None)
            if classes is not None:
                columns[label] = encoded(columns[label], classes)
        weight = ""
        if self.weight is not None:
            weight = _unused("weight", columns)
            columns[weight] = pl.Series(weight, read_weights(self.weight))
        _check_lengths(columns)
        if weight and label:
            heavy = columns[label].filter(columns[weight] > 0)
            if not len(heavy):
                raise DataError("every sample_weight is zero (0); at least one must be above 0")
            if heavy.n_unique() < 2:
                raise DataError("the rows whose sample_weight is above 0 are of one class, expected two classes")
        pl.DataFrame([column.alias(name) for name, column in columns.items()]).write_parquet(path)
        return FrameLog(paths=(str(path),), label=label, classes=classes, weight=weight, columns=names)

    def _of_files(self, like: FrameLog | None) -> FrameLog:
        if self.y is not None or self.weight is not None:
            raise ConfigError("a log in files has its labels and weights in columns: give label, no y or sample_weight")
        if like is not None and like.own:
            raise ConfigError("valid is a path, and the frame is none: give both as files, or both as frames")
        paths = (self.frame,) if isinstance(self.frame, str | Path) else tuple(self.frame)
        return FrameLog(paths=tuple(map(str, paths)), label=self.label, own=False)


def check_rows(log: FrameLog, name: str, config: PrepareConfig) -> None:
    """Refuse a row of a frame that `prepare` would refuse, by its number in the frame, which messages call `name`."""
    schema = getattr(config.source, "schema", None)
    if log.own and schema is not None:
        frame, bad = pl.read_parquet(log.paths[0]), BadRows(config.on_bad_row)
        Converter(name, 1 + np.arange(len(frame), dtype=np.int64), bad).convert(frame, schema)


def split_log(data: dict[str, Any], log: FrameLog, valid: FrameLog | None) -> None:
    """Set the split of a log in a recipe's data section: a frame is for training, except for validation samples."""
    if valid is not None:
        files = (list(log.paths), list(valid.paths))
    elif not log.own or data.get("split", {}).get("by") == "time":
        if log.own:
            data["split"]["test"] = 0
        return
    else:
        files = _cut(log)
    data["source"]["paths"] = files[0] + files[1]
    data["split"] = {"by": "file", "valid": files[1], "test": []} if files[1] else {"valid": 0, "test": 0}


def _cut(log: FrameLog) -> tuple[list[str], list[str]]:
    """A frame's file cut in two, a tenth of either class at random for validation; none of it where there are few."""
    path = Path(log.paths[0])
    frame = pl.read_parquet(path)
    draws = np.random.default_rng(0)
    chosen = np.zeros(len(frame), dtype=bool)
    for value in (0, 1) if log.classes is not None else ():
        rows = np.flatnonzero((frame[log.label] == value).to_numpy())
        if len(rows) < _FEW:
            return [str(path)], []
        chosen[draws.permutation(rows)[: round(len(rows) * _VALID)]] = True
    if log.classes is None:
        chosen = draws.random(len(frame)) < _VALID
    parts = path.with_name("some.parquet"), path.with_name("others.parquet")
    for part, rows_of in zip(parts, (~chosen, chosen), strict=True):
        frame.filter(rows_of).write_parquet(part)
    return [str(parts[0])], [str(parts[1])]


def _are_paths(frame: Any) -> bool:
    return isinstance(frame, list | tuple) and bool(frame) and all(isinstance(each, str | Path) for each in frame)


def is_array(frame: Any) -> bool:
    """Whether a frame's columns have no names of their own."""
    return not has_column_names(frame)


def _unused(name: str, columns: Mapping[str, Any]) -> str:
    while name in columns:
        name += "_"
    return name


def read_labels(y: Any) -> pl.Series:
    """``[N]`` labels, whatever they come in."""
    values = y if isinstance(y, pl.Series) else np.asarray(y)
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise DataError(f"y has the shape {list(values.shape)}, expected one label a row")
        values = values.tolist()
    try:
        return pl.Series("y", values, nan_to_null=True, strict=False)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise DataError(f"y cannot be read: {' '.join(str(error).split())[:200]}") from error


def read_weights(weights: Any) -> NDArray[np.float64]:
    """``[N]`` weights of samples; `DataError` names the row of one that is no finite number of 0 or more."""
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"sample_weight must be numbers; {' '.join(str(error).split())[:200]}") from error
    if values.ndim != 1:
        raise DataError(f"sample_weight has the shape {list(values.shape)}, expected one number a row")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"sample_weight of row {row + 1} is {values[row]}; it must be a finite number of 0 or more")
    return values


def _classes(labels: pl.Series, *, named: bool) -> NDArray[Any] | None:
    """The two values of a label, in their order; None for a column of more, for which ``init`` has rules."""
    missing = labels.is_null()
    if missing.any():
        raise DataError(f"the label of row {int(missing.arg_max() or 0) + 1} is missing, expected one of two classes")
    found = labels.unique().sort().to_list()
    if len(found) == 2:
        return np.array(found)
    if len(found) < 2:
        raise DataError(f"the labels have {len(found)} class, expected two classes")
    if named and labels.dtype.is_numeric():
        return None
    raise DataError(
        f"Only binary classification is supported. The labels have {len(found)} classes: "
        f"{', '.join(map(repr, found[:6]))}" + ("; Unknown label type: continuous" if labels.dtype.is_float() else "")
    )


def encoded(labels: pl.Series, classes: NDArray[Any]) -> pl.Series:
    """0 and 1 in place of the two classes."""
    values = classes.tolist()
    other = ~labels.is_in(values) | labels.is_null()
    if other.any():
        row = int(other.arg_max() or 0)
        raise DataError(f"the label of row {row + 1} is {labels[row]!r}, expected {values[0]!r} or {values[1]!r}")
    found: pl.Series = (labels == values[1]).cast(pl.Int8)
    return found


def _check_lengths(columns: Mapping[str, pl.Series]) -> None:
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        sizes = ", ".join(f"{name!r} {len(column):,}" for name, column in list(columns.items())[-6:])
        raise DataError(f"columns of different lengths, expected as many values in each: {sizes}")
    if not lengths.pop():
        raise DataError("the frame has 0 rows (0 sample(s)), expected at least one")
