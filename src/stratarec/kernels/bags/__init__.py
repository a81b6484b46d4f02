"""What is looked up: a batch's share of a group of tables of one width, and the group's fixed layout.

Shapes: F features, B samples, N ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.bags import cpu
from stratarec.kernels.simd.vector import LANES

Ids = NDArray[np.int32] | NDArray[np.int64]
_NO_OFFSETS = np.zeros(1, dtype=np.int64)
NO_LIMITS = np.empty(0, dtype=np.int64)
"""`BagBatch.filled` as kernels take it, where all bags are."""
_NO_WEIGHTS = np.zeros(1, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class BagBatch:
    """One width group's share of a batch.

    Parameters
    ----------
    values : ndarray
        ``[N]`` int32 or int64 ids of all keys of the batch.
    offsets : ndarray or None
        ``[keys * B + 1]`` int64; None when every bag holds one id.
    weights : ndarray or None
        ``[N]`` float32 per-sample weights.
    batch : int
        B.
    key : ndarray
        ``[F]`` int64, the place of each of the group's features among the batch's keys.
    filled : ndarray or None
        ``[F]`` int64: how many bags of each feature are pooled; None for all of them.
    """

    values: Ids
    offsets: NDArray[np.int64] | None
    weights: NDArray[np.float32] | None
    batch: int
    key: NDArray[np.int64]
    filled: NDArray[np.int64] | None = None

    def span(self, feature: int) -> tuple[int, int]:
        """First and last position of the feature's ids in `values`."""
        first, last = int(self.key[feature]) * self.batch, (int(self.key[feature]) + 1) * self.batch
        return (first, last) if self.offsets is None else (int(self.offsets[first]), int(self.offsets[last]))

    @property
    def compiled(self) -> tuple[Any, ...]:
        """`cpu.Bags` as kernels take it: a plain tuple, which costs half of a named one at every call."""
        # Not kept: what Python 3.11 locks around a cached property takes longer than the tuple.
        return (
            self.values, _NO_OFFSETS if self.offsets is None else self.offsets, self.offsets is None,
            _NO_WEIGHTS if self.weights is None else self.weights, self.weights is not None, self.batch,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The fixed layout of one width group; every array has one entry a feature unless it says otherwise."""

    width: int
    base: NDArray[np.int64]
    """First row of the feature's table in the group."""
    rows: NDArray[np.int64]
    """Rows of the feature's table."""
    column: NDArray[np.int64]
    """First column of the feature in the pooled output; unused for sequences."""
    mean: NDArray[np.int64]
    sequence: NDArray[np.int64]
    """1 for features that are looked up without pooling."""
    table_start: NDArray[np.int64]
    """``[tables + 1]``: table t owns ``table_features[table_start[t]:table_start[t + 1]]``."""
    table_features: NDArray[np.int64]

    @cached_property
    def pooled(self) -> slice | NDArray[np.int64]:
        """Places of the pooled features: all of them as a rule, which then need no copies."""
        return np.flatnonzero(self.sequence == 0) if self.sequence.any() else slice(None)

    @cached_property
    def nowhere(self) -> NDArray[np.int64]:
        """Where the gradients of sequence features start in a batch that has none."""
        return np.zeros(len(self.sequence), dtype=np.int64)

    @cached_property
    def lines(self) -> bool:
        """Whether every pooled row is whole cache lines, in an output whose samples start at multiples of 64 bytes."""
        return not (self.width | int(np.bitwise_or.reduce(self.column[self.pooled]))) % LANES

    def features(self, bags: BagBatch) -> tuple[NDArray[np.int64], ...]:
        """All features, `cpu.Features` as kernels take it."""
        return bags.key, self.base, self.rows, self.column, self.mean, self.sequence

    def pooled_features(self, bags: BagBatch) -> tuple[NDArray[np.int64], ...]:
        """The pooled features, likewise."""
        if isinstance(self.pooled, slice):
            return self.features(bags)
        return tuple(part[self.pooled] for part in self.features(bags))


def lookups_by_table(group: GroupLayout, bags: BagBatch) -> NDArray[np.int64]:
    """``[tables]`` number of lookups of each table in the batch."""
    if bags.offsets is None:
        return np.diff(group.table_start) * bags.batch
    first = bags.key[group.table_features] * bags.batch
    return np.add.reduceat(bags.offsets[first + bags.batch] - bags.offsets[first], group.table_start[:-1])


def first_falling(offsets: NDArray[np.int64], total: int) -> int:
    """The first place i at which ``offsets[i]``, ``offsets[i + 1]`` fall or do not lie in [0, total]; or -1."""
    return int(cpu.first_falling(offsets, total))


def first_outside(group: GroupLayout, bags: BagBatch) -> int:
    """Place in `values` of an id that is looked up outside its feature's table; or -1."""
    filled = NO_LIMITS if bags.filled is None else bags.filled
    return int(cpu.first_outside(bags.compiled, filled, bags.key, group.rows, group.sequence))


def mark_rows(group: GroupLayout, bags: BagBatch, bits: NDArray[np.uint8]) -> None:
    """Set the bit of every row of the group that the batch looks up: bit ``r & 7`` of byte ``r >> 3``."""
    cpu.mark_rows(bags.compiled, bags.key, group.base, bits)
