"""Where a table can be cut into hot and cold rows.

Ids are ranked by frequency, so the hot rows of a table are its first ones. Before the values lie tail buckets, which
share their lookups by a hash: those are hot together or not at all. A table by hash has nothing else. A hot set is how
many first rows of each table are hot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import ConfigError

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowRange:
    """The rows of a table."""

    table: str
    rows: int
    row_bytes: int
    """Weights and optimizer state of a row."""
    tail: int
    """So many first rows are hot together or not at all."""
    counts: Counts
    """``[rows]`` training lookups. They rise where ids keep the order of an earlier data set."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return self.rows * self.row_bytes


def row_bytes_of(dataset: Dataset, width: int, optimizer: RowOptimizerConfig) -> dict[str, int]:
    """Vocabulary -> float32 weights and optimizer state of a row, where every table is `width` wide."""
    if width < 1:
        raise ConfigError(f"the width of rows is {width}, expected at least 1")
    record = RecordCodec.of(CodecConfig(), width, optimizer)
    return dict.fromkeys(dataset.vocabularies, record.record_bytes)


def parts_of(dataset: Dataset, row_bytes: Mapping[str, int]) -> list[RowRange]:
    """The rows of all tables."""
    return [
        RowRange(
            table=name,
            rows=info.rows,
            row_bytes=row_bytes[name],
            tail=info.tail_buckets,
            counts=dataset.access_counts(name),
        )
        for name, info in dataset.vocabularies.items()
    ]


def used_bytes(parts: Sequence[RowRange], hot: Counts) -> int:
    """Bytes of the first ``hot[i]`` rows of each part."""
    return sum(part.row_bytes * int(rows) for part, rows in zip(parts, hot, strict=True))


def share_of_accesses(parts: Sequence[RowRange], hot: Counts) -> float:
    """Share of all training lookups that go to hot rows."""
    total = sum(int(part.counts.sum()) for part in parts)
    taken = sum(int(part.counts[: int(rows)].sum()) for part, rows in zip(parts, hot, strict=True))
    return taken / total if total else 0.0
