"""Scores of a split as Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.files import write_atomic
from stratarec.progress import Progress
from stratarec.training.evaluation import logits
from stratarec.training.run import TrainedModel


def predict(trained: TrainedModel, split: str, output: Path, progress: Progress) -> int:
    """Write columns ``label`` and ``score`` (probability) in the order of storage; returns the number of rows."""
    schema = pa.schema([("label", pa.float32()), ("score", pa.float32())])
    rows = 0

    def write(path: Path) -> None:
        nonlocal rows
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            parts = logits(
                trained.model, trained.dataset, split, precision=trained.recipe.train.precision, progress=progress
            )
            for label, score, _ in parts:
                probability = (1 / (1 + np.exp(-score.astype(np.float64)))).astype(np.float32)
                writer.write_table(pa.table([label, probability], schema=schema))
                rows += len(label)

    write_atomic(output, write)
    return rows
