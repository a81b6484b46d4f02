"""Scores of a split as Parquet, each with the row of the log that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.spill import split_rows
from stratarec.files import write_atomic
from stratarec.models.outputs import probabilities
from stratarec.progress import Progress
from stratarec.training.evaluation import logits
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
            for label, score, _ in parts:
                writer.write_table(pa.table([*keys.take(len(label)), label, probabilities(score)], schema=schema))
                rows += len(label)

    if trained.mesh.is_first:
        write_atomic(output, write)
    else:  # this rank scores its share all the same
        with open(os.devnull, "wb") as nowhere:
            write(nowhere)
    return rows


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
