"""Where a table can be cut into hot and cold rows.

Ids are ranked by frequency, so the hot rows of a table are a prefix of its values. Behind the values lie tail buckets,
which share their lookups by a hash: those are hot together or not at all. A table by hash has nothing else. So every
table has up to two *parts*, and a hot set is how many first rows of each part are hot.
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
    """Rows ``first`` to ``first + rows`` of a table."""

    table: str
    first: int
    rows: int
    row_bytes: int
    """Weights and optimizer state of a row."""
    whole: bool
    """Whether its rows are hot together or not at all."""
    counts: Counts
    """``[rows]`` training lookups."""
    inherited: bool = False
    """Whether some ids keep the order of an earlier data set, so that counts rise and fall."""

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
    """The parts of all tables, those of a table side by side; parts without rows are left out."""
    found = []
    for name, info in dataset.vocabularies.items():
        counts = dataset.access_counts(name)
        for first, rows, whole in ((0, info.values, False), (info.values, info.tail_buckets, True)):
            if rows:
                found.append(
                    RowRange(
                        table=name,
                        first=first,
                        rows=rows,
                        row_bytes=row_bytes[name],
                        whole=whole,
                        counts=counts[first : first + rows],
                        inherited=bool(info.inherited) and not whole,
                    )
                )
    return found


def used_bytes(parts: Sequence[RowRange], hot: Counts) -> int:
    """Bytes of the first ``hot[i]`` rows of each part."""
    return sum(part.row_bytes * int(rows) for part, rows in zip(parts, hot, strict=True))


def share_of_accesses(parts: Sequence[RowRange], hot: Counts) -> float:
    """Share of all training lookups that go to hot rows."""
    total = sum(int(part.counts.sum()) for part in parts)
    taken = sum(int(part.counts[: int(rows)].sum()) for part, rows in zip(parts, hot, strict=True))
    return taken / total if total else 0.0
