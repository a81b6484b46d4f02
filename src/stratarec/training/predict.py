"""Scores of a split, or of raw logs, each with the row of the log that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.spill import split_rows
from stratarec.errors import ConfigError, StorageError
from stratarec.files import write_atomic
from stratarec.models.outputs import probabilities
from stratarec.progress import Progress
from stratarec.training.evaluation import Scored, logits
from stratarec.training.fresh import FreshLogs, FreshRows
from stratarec.training.run import TrainedModel


def predict(trained: TrainedModel, split: str, output: Path, progress: Progress) -> int:
    """Write label and score (a probability) of each sample with the place in the log that it came from.

    Columns are ``file`` (where samples are rows of files), ``row`` (in that file, counted from 1, a line for text;
    else in the order of the source), ``label`` and ``score``, in the order of storage: by shard and user, not that of
    the log. A data set that was prepared with ``data.keep_rows: false`` gives the last two alone.

    Of several ranks the first one writes.

    Returns
    -------
    int
        How many rows there are.
    """
    keys = _Keys(trained.dataset, split)
    schema = pa.schema([*keys.fields, ("label", pa.float32()), ("score", pa.float32())])
    rows = 0

    def write(file: BinaryIO) -> None:
        nonlocal rows
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            parts = logits(
                trained.model,
                trained.dataset,
                split,
                precision=trained.recipe.train.precision,
                progress=progress,
                mesh=trained.mesh,
            )
            for label, score, *_ in map(Scored.joined, parts):
                writer.write_table(pa.table([*keys.take(len(label)), label, probabilities(score)], schema=schema))
                rows += len(label)

    if trained.mesh.is_first:
        write_atomic(output, write)
    else:  # this rank scores its share all the same
        with open(os.devnull, "wb") as nowhere:
            write(nowhere)
    return rows


def predict_logs(logs: FreshLogs, output: Path, progress: Progress) -> int:
    """Write the score of each row of raw logs, in their order; as CSV where `output` is called so, else as Parquet.

    Columns are ``file`` and ``row`` (counted from 1, a line for text), those that `logs` passes through, ``label``
    where there is one, and ``score``.

    Returns
    -------
    int
        How many rows there are.

    Raises
    ------
    ConfigError
        When a column that is passed through is called like one of these.
    """
    for name in logs.keep:
        if name in ("file", "row", "label", "score"):
            raise ConfigError(f"--keep {name}: the output has a column of that name of its own; rename it in the log")
    rows = 0

    def write(file: BinaryIO) -> None:
        nonlocal rows
        writer, schema = None, None
        for part in logs.scored(progress):
            table = _table(part)
            if writer is None:
                make = pa_csv.CSVWriter if output.suffix == ".csv" else partial(pq.ParquetWriter, compression="zstd")
                writer, schema = make(file, table.schema), table.schema
            writer.write_table(table.cast(schema))
            rows += len(part.logits)
        if writer is not None:
            writer.close()

    try:
        write_atomic(output, write)
    except pa.ArrowException as error:
        raise StorageError(f"cannot write {output}: {' '.join(str(error).split())}; keep other columns") from error
    return rows


def _table(part: FreshRows) -> pa.Table:
    columns: dict[str, Any] = {"file": pa.repeat(part.file, len(part.rows)), "row": part.rows}
    columns |= {name: part.kept[name].to_arrow() for name in part.kept.columns}
    columns |= {} if part.label is None else {"label": part.label}
    return pa.table({**columns, "score": probabilities(part.logits)})


class _Keys:
    """Columns that say where samples came from, some samples at a time."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        known = dataset.about.rows
        self._files = pa.array(known.files, pa.string())
        self._kept: bool = known.kept
        self._parts: Iterator[NDArray[np.int64]] = dataset.row_numbers(split)
        self._ahead = np.zeros(0, dtype=np.int64)

    @property
    def fields(self) -> list[tuple[str, pa.DataType]]:
        if not self._kept:
            return []
        return [*([("file", pa.string())] if len(self._files) else []), ("row", pa.int64())]

    def take(self, size: int) -> list[pa.Array]:
        """The columns of the next `size` samples."""
        if not self._kept:
            return []
        while len(self._ahead) < size:
            self._ahead = np.concatenate([self._ahead, next(self._parts)])
        numbers, self._ahead = self._ahead[:size], self._ahead[size:]
        file, row = split_rows(numbers)
        return [*([self._files.take(pa.array(file))] if len(self._files) else []), pa.array(row)]
