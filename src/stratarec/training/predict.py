"""Write the scores of a split or of raw logs to a file, each with the row of the log to which the
score belongs.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import split_rows
from stratarec.errors import ConfigError, StorageError
from stratarec.io.atomic import check_output, remove_leftovers_of, write_atomic
from stratarec.models.base import probabilities
from stratarec.progress import Progress
from stratarec.training.evaluate import ScoredSamples, check_group_column, logits
from stratarec.training.raw_logs import RawLogs, ScoredRows
from stratarec.training.run.open_run import TrainedModel


@contextmanager
def _gzip_csv_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[pa_csv.CSVWriter]:
    # Without a name and a time, so that equal scores are equal files.
    with (
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as stream,
        pa_csv.CSVWriter(stream, schema) as writer,
    ):
        yield writer


WRITERS: Mapping[str, Callable[..., Any]] = {
    ".csv": pa_csv.CSVWriter,
    ".csv.gz": _gzip_csv_writer,
    ".parquet": partial(pq.ParquetWriter, compression="zstd"),
}
"""Ending of an output file -> writer that appends tables to such a file."""
STANDARD_OUTPUT = Path("-")
"""Output path for CSV on standard output."""


def check_scores_file(output: Path) -> None:
    """Raise `StorageError` unless scores can be written to `output`: a file of a known format, or
    standard output.
    """
    if output != STANDARD_OUTPUT:
        check_output(output, *WRITERS)


class Top(NamedTuple):
    """Request to write only the `most` rows with the best scores (of the first label) in each
    group.
    """

    most: int
    by: str
    """Key by which rows are grouped: ``user`` or ``session``; for raw logs, the name of a
    column.
    """


def predict(
    trained: TrainedModel, split: str, output: Path, progress: Progress, top: Top | None = None
) -> int:
    """Write a file with the label and score (a probability) of each sample of a split, and its
    place in the log.

    The suffix of `output` determines the format. The columns are:

    - ``file``, if samples are rows of files
    - ``row``, counted from 1: the line of a text file (a header is line 1), the row of a Parquet
      file, or the place in the order of any other source
    - ``label`` and ``score``; with several labels, ``label_<name>`` (null if the label is not
      known) and ``score_<name>``

    Without the rows of the log (``data.keep_rows: false``), there are only labels and scores. Rows
    are in the order in which the data set stores them (by shard and user), not in the order of the
    log. With `top`, rows are sorted within groups and have a ``rank``. Only the first rank of a
    mesh writes.

    Returns
    -------
    int
        Number of rows written.
    """
    check_scores_file(output)
    keys = _Keys(trained.dataset, split)
    outputs = PredictionColumns(trained.dataset.schema.label_columns)
    schema = pa.schema(
        [*keys.fields, *((name, pa.float32()) for name in (*outputs.labels, *outputs.scores))]
    )
    best, sessions = None, np.zeros(0, dtype=np.int64)
    if top is not None:
        check_group_column(trained.dataset.schema, top.by, "--by")
        if not keys.fields:
            raise ConfigError(
                "--top needs rows of the log, and the data set was prepared with data.keep_rows: false; "
                "prepare it with the rows, or name raw logs"
            )
        best = TopRows(top.most)
        if top.by == "session" and trained.dataset.schema.user:
            sessions = np.concatenate([sessions, *trained.dataset.session_keys(split)])

    def tables() -> Iterator[pa.Table]:
        nonlocal sessions
        parts = logits(
            trained.model,
            trained.dataset,
            split,
            precision=trained.recipe.train.precision,
            progress=progress,
            mesh=trained.mesh,
        )
        for label, score, user, _ in map(ScoredSamples.joined, parts):
            columns = [*outputs.label(label).values(), *outputs.score(score).values()]
            table = pa.table([*keys.take(len(label)), *columns], schema=schema)
            if best is None:
                yield table
            else:
                group, sessions = sessions[: len(label)], sessions[len(label) :]
                best.add(table, pl.Series(group if len(group) else user), score)
        if best is not None:
            yield best.result()

    if not trained.mesh.is_first:  # the first rank writes; this rank only scores its share
        return sum(map(len, tables()))
    return _write(output, tables(), schema if top is None else schema.append(pa.field(RANK, pa.int64())))


def predict_logs(
    logs: RawLogs, output: Path, progress: Progress, top: Top | None = None, *, safe: bool = False
) -> int:
    """Write a file with the score of each row of raw logs, in the order of the rows.

    The suffix of `output` determines the format. The columns are ``file`` and ``row``, the columns
    that `logs` passes through, ``label`` if the logs have labels, and ``score``, as in `predict`.
    `logs` must pass through the column by which `top` groups.

    Parameters
    ----------
    safe : bool
        Whether to prefix text with ``'`` if a spreadsheet would run it as a formula.

    Returns
    -------
    int
        Number of rows written.

    Raises
    ------
    ConfigError
        If a column that is passed through has the name of an output column.
    """
    outputs = PredictionColumns(logs.labels)
    for name in logs.keep:
        if name in ("file", "row", *outputs.labels, *outputs.scores, *([RANK] if top else [])):
            raise ConfigError(
                f"--keep {name}: the output already has a column of this name; rename the column in the log"
            )
    check_scores_file(output)
    best = None if top is None else TopRows(top.most)

    def tables() -> Iterator[pa.Table]:
        for part in logs.scored(progress):
            if best is None or top is None:
                yield _table(part, outputs)
            else:
                best.add(_table(part, outputs), part.columns[top.by], part.logits)
        if best is not None and best.seen:
            yield best.result()
        if top is not None and best is not None and best.ungrouped:
            progress.say(f"left out {best.ungrouped:,} rows without a {top.by}")

    try:
        return _write(output, map(_quoted, tables()) if safe else tables())
    except pa.ArrowException as error:
        raise StorageError(
            f"cannot write {output}: {' '.join(str(error).split())}; keep other columns"
        ) from error


def _write(output: Path, tables: Iterator[pa.Table], schema: pa.Schema | None = None) -> int:
    """Write tables with `schema` (by default, the schema of the first table), and return the number
    of rows.
    """
    rows = 0
    name = output.name.lower()
    writer_of = next(
        (writer for ending, writer in WRITERS.items() if name.endswith(ending)), WRITERS[".csv"]
    )

    def write(file: BinaryIO) -> None:
        nonlocal rows
        first = next(tables, None)
        written = first.schema if schema is None and first is not None else schema
        if written is None:
            return
        with writer_of(file, written) as writer:
            for table in chain([] if first is None else [first], tables):
                writer.write_table(table.cast(written))
                rows += len(table)

    if output == STANDARD_OUTPUT:
        write(sys.stdout.buffer)
        return rows
    remove_leftovers_of(output)
    write_atomic(output, write)
    return rows


class PredictionColumns:
    """Names and values of the label and score columns in a file of predictions.

    Parameters
    ----------
    names : sequence of str
        Names of the labels.
    """

    def __init__(self, names: Sequence[str]) -> None:
        several = len(names) > 1
        self.labels, self.scores = (
            [f"{what}_{name}" if several else what for name in names] for what in ("label", "score")
        )

    def label(self, label: NDArray[np.float32]) -> dict[str, pa.Array]:
        """Return the label columns, by name, from labels ``[N]`` or ``[N, T]``."""
        columns = label.reshape(-1, len(self.labels)).T
        return {
            name: pa.array(column, from_pandas=True)
            for name, column in zip(self.labels, columns, strict=True)
        }

    def score(self, logits: NDArray[np.float32]) -> dict[str, pa.Array]:
        """Return the score columns (probabilities), by name, from logits ``[N]`` or ``[N, T]``."""
        columns = probabilities(logits).reshape(-1, len(self.scores)).T
        return {
            name: pa.array(np.ascontiguousarray(column))
            for name, column in zip(self.scores, columns, strict=True)
        }


def _table(part: ScoredRows, outputs: PredictionColumns) -> pa.Table:
    columns: dict[str, Any] = {"file": pa.repeat(part.file, len(part.rows)), "row": part.rows}
    columns |= {name: part.columns[name].to_arrow() for name in part.columns.columns}
    columns |= {} if part.label is None else outputs.label(part.label)
    return pa.table({**columns, **outputs.score(part.logits)})


_RUN_BY_SPREADSHEETS = r"^[=+@\t\r\n-]"
_NEGATIVE = r"^-(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"


def _quoted(table: pa.Table) -> pa.Table:
    """Prefix texts and column names with ``'`` if a spreadsheet would run them as formulas."""
    frame = pl.DataFrame(table)
    for name, kind in frame.schema.items():
        if kind in (pl.String, pl.Categorical, pl.Enum):
            text = pl.col(name).cast(pl.String)
            runs = text.str.contains(_RUN_BY_SPREADSHEETS) & ~text.str.contains(_NEGATIVE)
            frame = frame.with_columns(pl.when(runs).then(pl.lit("'") + text).otherwise(text).alias(name))
    return frame.rename(
        {name: f"'{name}" for name in frame.columns if name[:1] in tuple("=+@\t\r\n-")}
    ).to_arrow()


class _Keys:
    """Columns with the file and row of the samples of a split, taken in the order of the
    samples.
    """

    def __init__(self, dataset: Dataset, split: str) -> None:
        rows = dataset.about.rows
        self._files = pa.array(rows.files, pa.string())
        self._kept: bool = rows.kept
        self._parts: Iterator[NDArray[np.int64]] = dataset.row_numbers(split)
        self._ahead = np.zeros(0, dtype=np.int64)

    @property
    def fields(self) -> list[tuple[str, pa.DataType]]:
        if not self._kept:
            return []
        return [*([("file", pa.string())] if len(self._files) else []), ("row", pa.int64())]

    def take(self, size: int) -> list[pa.Array]:
        """Return the columns for the next `size` samples."""
        if not self._kept:
            return []
        while len(self._ahead) < size:
            self._ahead = np.concatenate([self._ahead, next(self._parts)])
        numbers, self._ahead = self._ahead[:size], self._ahead[size:]
        file, row = split_rows(numbers)
        return [*([self._files.take(pa.array(file))] if len(self._files) else []), pa.array(row)]


RANK = "rank"
# Number of rows that are buffered before those that are not among the best of their group are
# removed.
_BUFFERED = 1 << 18


class TopRows:
    """Collects the `most` rows with the best scores in each group, in memory for about twice as
    many rows.

    Among rows with equal scores, the first ones are kept.

    Parameters
    ----------
    most : int
        Number of rows to keep in each group.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffered = 0
        self._kept = 0
        # The columns of a row are packed into one struct, so that their names cannot equal names
        # that are used here.
        self._parts: list[pl.DataFrame] = []
        self.seen = 0
        """Number of rows added."""
        self.ungrouped = 0
        """Number of added rows that have no group. They are left out of the result."""

    def add(self, rows: pa.Table, group: pl.Series, score: NDArray[np.float32]) -> None:
        """Add rows, with the group of each row (null if it has none) and its score ``[N]`` or ``[N,
        T]``.

        Rows are ordered by the first score.
        """
        part = pl.DataFrame(
            {
                "row": pl.DataFrame(rows).to_struct(),
                "group": group,
                "score": np.ascontiguousarray(score if score.ndim == 1 else score[:, 0]),
                "place": np.arange(self.seen, self.seen + len(score)),
                "first": np.arange(self.seen, self.seen + len(score)),
            }
        )
        self.seen += len(part)
        grouped = part.filter(pl.col("group").is_not_null())
        self.ungrouped += len(part) - len(grouped)
        self._parts.append(grouped)
        self._buffered += len(grouped)
        if self._buffered > max(2 * self._kept, _BUFFERED):
            self._drop_others()

    def _drop_others(self) -> None:
        rows = pl.concat(self._parts, how="vertical_relaxed").with_columns(
            pl.col("first").min().over("group")
        )
        ordered = rows.sort("score", "place", descending=[True, False])
        # `group_by().head()` would move the column of the group to the front.
        self._parts = [ordered.filter(pl.int_range(pl.len()).over("group") < self._most)]
        self._buffered = self._kept = len(self._parts[0])

    def result(self) -> pa.Table:
        """Return the best rows, with a column `RANK` that counts from 1 in each group.

        Groups are in the order in which their first rows were added. In a group, the best row is
        first.
        """
        self._drop_others()
        ranked = self._parts[0].with_columns(pl.int_range(1, pl.len() + 1).over("group").alias("rank"))
        ranked = ranked.sort("first", "rank")
        return ranked["row"].struct.unnest().with_columns(ranked["rank"].alias(RANK)).to_arrow()
