"""Layout of a group of tables of one width, lookups of a batch in it, and kernels that read only
ids.

Shapes: F features, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.vector import LANES

Ids = NDArray[np.int32] | NDArray[np.int64]
_NO_OFFSETS = np.zeros(1, dtype=np.int64)
# `BagBatch.filled` for kernels that use all bags.
NO_LIMITS = np.empty(0, dtype=np.int64)
_NO_WEIGHTS = np.zeros(1, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class BagBatch:
    """Lookups of a batch in one group of tables.

    A *key* is a feature of the batch, whether or not its table is in the group.

    Parameters
    ----------
    values : ndarray
        ``[N]`` int32 or int64 ids of all keys of the batch.
    offsets : ndarray or None
        ``[keys * B + 1]`` int64; None when every bag holds one id.
    weights : ndarray or None
        ``[N]`` float32 weight of each id; None if ids have no weights.
    batch : int
        B.
    key : ndarray
        ``[F]`` int64 position of each of the group's features among the keys.
    filled : ndarray or None
        ``[F]`` int64 number of bags to pool of each feature, which are its first bags; None to pool
        all bags.
    """

    values: Ids
    offsets: NDArray[np.int64] | None
    weights: NDArray[np.float32] | None
    batch: int
    key: NDArray[np.int64]
    filled: NDArray[np.int64] | None = None

    def span(self, feature: int) -> tuple[int, int]:
        """Return the first and the last (exclusive) position of the feature's ids in `values`."""
        first, last = int(self.key[feature]) * self.batch, (int(self.key[feature]) + 1) * self.batch
        return (
            (first, last) if self.offsets is None else (int(self.offsets[first]), int(self.offsets[last]))
        )

    @property
    def compiled(self) -> tuple[Any, ...]:
        """Fields of `Bags` as a plain tuple, twice as fast to pass to a kernel as a named one."""
        # Not cached: the lock of a cached property in Python 3.11 takes longer than building the
        # tuple.
        return (
            self.values,
            _NO_OFFSETS if self.offsets is None else self.offsets,
            self.offsets is None,
            _NO_WEIGHTS if self.weights is None else self.weights,
            self.weights is not None,
            self.batch,
        )


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """Fixed layout of a group of tables of one width; int64 arrays with one entry per feature,
    unless noted.

    Parameters
    ----------
    width : int
        D.
    base, rows : ndarray
        First row of the feature's table in the group, and number of rows of the table.
    column : ndarray
        First column of the feature in the pooled output; unused for sequences.
    mean, sequence : ndarray
        1 for features that are pooled by the mean, and 1 for features that are looked up without
        pooling; otherwise 0.
    table_start, table_features : ndarray
        ``[tables + 1]`` and ``[F]``: table t has the features
        ``table_features[table_start[t]:table_start[t + 1]]``.
    """

    width: int
    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    column: NDArray[np.int64]
    mean: NDArray[np.int64]
    sequence: NDArray[np.int64]
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]

    @cached_property
    def pooled(self) -> slice | NDArray[np.int64]:
        """Indices of the pooled features; a slice, which copies nothing, if all are pooled."""
        return np.flatnonzero(self.sequence == 0) if self.sequence.any() else slice(None)

    @cached_property
    def nowhere(self) -> NDArray[np.int64]:
        """Zeros ``[F]``: starts of gradients of sequence features in a batch without sequences."""
        return np.zeros(len(self.sequence), dtype=np.int64)

    @cached_property
    def lines(self) -> bool:
        """Whether pooled rows fill whole cache lines if samples of the output start at one."""
        return not (self.width | int(np.bitwise_or.reduce(self.column[self.pooled]))) % LANES

    def features(self, bags: BagBatch) -> tuple[NDArray[np.int64], ...]:
        """Return the fields of `Features` for all features in the batch `bags`."""
        return bags.key, self.base, self.rows, self.column, self.mean, self.sequence

    def pooled_features(self, bags: BagBatch) -> tuple[NDArray[np.int64], ...]:
        """Return the fields of `Features` for the pooled features in the batch `bags`."""
        if isinstance(self.pooled, slice):
            return self.features(bags)
        return tuple(part[self.pooled] for part in self.features(bags))


def lookups_by_table(group: GroupLayout, bags: BagBatch) -> NDArray[np.int64]:
    """Return the number of lookups in `bags` of each table of `group`, ``[tables]`` int64."""
    if bags.offsets is None:
        return np.diff(group.table_start) * bags.batch
    first = bags.key[group.table_features] * bags.batch
    return np.add.reduceat(bags.offsets[first + bags.batch] - bags.offsets[first], group.table_start[:-1])


def first_falling(offsets: NDArray[np.int64], total: int) -> int:
    """Return the first i for which ``offsets[i + 1] < offsets[i]`` or one of the two is outside [0,
    total]; else -1.
    """
    return int(_first_falling(offsets, total))


def first_outside(group: GroupLayout, bags: BagBatch) -> int:
    """Return the first position in ``bags.values`` of an id outside its table, or -1."""
    filled = NO_LIMITS if bags.filled is None else bags.filled
    return int(_first_outside(bags.compiled, filled, bags.key, group.rows, group.sequence))


def mark_rows(group: GroupLayout, bags: BagBatch, bits: NDArray[np.uint8]) -> None:
    """Set the bit of every row of `group` that the batch `bags` looks up.

    `bits` is uint8; row r of the group has bit ``r & 7`` of byte ``r >> 3``.
    """
    _mark_rows(bags.compiled, bags.key, group.base, bits)


def list_slots(
    group: GroupLayout,
    bags: BagBatch,
    order: NDArray[np.int64],
    begin: NDArray[np.int64],
    pooled: int,
    out: Sequence[NDArray[np.int32]],
) -> int:
    """List a batch's lookups, feature after feature; return the position of an id outside its
    table, or -1.

    Parameters
    ----------
    group : GroupLayout
        Features of the tables.
    bags : BagBatch
        Lookups of the batch.
    order : ndarray
        Positions of the features in the group, in the order of the list; the first `pooled`
        features are pooled.
    begin : ndarray
        First place in the list of each feature of `order`.
    pooled : int
        Number of pooled features in `order`.
    out : sequence of ndarray
        Three int32 arrays to fill, of at least these sizes, or empty if not needed: the row of each
        lookup in the group ``[N]``, the first lookup of each pooled bag ``[pooled * B + 1]``, and
        the bits of float32 weights ``[N]``.
    """
    return int(_list_slots(bags.compiled, group.features(bags), order, begin, pooled, *out))


U = np.uint64


class Bags(NamedTuple):
    """Arrays of a `BagBatch`.

    If `singles` (every bag holds one id), `offsets` is a placeholder; if not `weighted`, `weights`
    is one.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    singles: bool
    weights: NDArray[np.float32]
    weighted: bool
    batch: int


class Features(NamedTuple):
    """Arrays of a `GroupLayout` with one entry per feature, and the position of each feature among
    the batch's keys.
    """

    key: NDArray[np.int64]
    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    column: NDArray[np.int64]
    mean: NDArray[np.int64]
    sequence: NDArray[np.int64]


@njit(**BODY)
def share(length, mean):
    """Return the factor of lookups in a bag of `length` ids: ``1 / length`` for a mean, else 1."""
    return np.float32(1.0) / np.float32(length) if mean and length > 1 else np.float32(1.0)


@njit(**BODY)
def span(bags, key):
    """Return the first and the last (exclusive) lookup of the batch's key number `key`."""
    begin, end = key * bags.batch, (key + 1) * bags.batch
    if not bags.singles:
        begin, end = bags.offsets[begin], bags.offsets[end]
    return begin, end


@njit(nogil=True, cache=True)
def _first_outside(bags, filled, key, rows, sequence):
    """Return the first position of an id outside [0, `rows` of its feature), or -1."""
    bags = Bags(*bags)
    for f in range(len(key)):
        begin, end = span(bags, key[f])
        if bags.singles and len(filled) and not sequence[f]:
            end = begin + filled[f]
        limit, wrong = U(rows[f]), 0
        # Without a branch the loop is vectorized.
        for i in range(U(begin), U(end)):
            wrong += U(bags.values[i]) >= limit
        if wrong:
            for i in range(begin, end):
                if U(bags.values[i]) >= limit:
                    return i
    return -1


@njit(nogil=True, cache=True)
def _list_slots(bags, features, order, first_place, pooled, rows, offsets, weights):
    bags, features = Bags(*bags), Features(*features)
    for place in range(len(order)):
        f, count = order[place], first_place[place]
        begin, end = span(bags, features.key[f])
        base, limit, wrong = np.int32(features.base[f]), U(features.rows[f]), 0
        # Without a branch the loop is vectorized.
        for i in range(U(end - begin)):
            row = bags.values[U(begin) + i]
            wrong += U(row) >= limit
            rows[U(count) + i] = base + np.int32(row)
        if wrong:
            for i in range(begin, end):
                if U(bags.values[i]) >= limit:
                    return i
        if len(weights):
            weights[count : count + end - begin] = bags.weights[begin:end].view(np.int32)
        if place < pooled and len(offsets):
            first, shift = place * bags.batch, features.key[f] * bags.batch
            for bag in range(bags.batch + 1):
                start = bag if bags.singles else bags.offsets[shift + bag] - begin
                offsets[first + bag] = np.int32(count + start)
    return -1


@njit(nogil=True, cache=True)
def _mark_rows(bags, key, base, bits):
    """Set the bit of every row that the batch looks up."""
    bags = Bags(*bags)
    for f in range(len(key)):
        begin, end = span(bags, key[f])
        for i in range(U(begin), U(end)):
            row = U(base[f] + bags.values[i])
            bits[row >> U(3)] |= np.uint8(1) << np.uint8(row & U(7))


@njit(nogil=True, cache=True)
def _first_falling(offsets, total):
    """Return the first i for which offsets[i + 1] < offsets[i] or one of the two is outside [0,
    total]; else -1.
    """
    last = len(offsets) - 1
    falls = np.int64(offsets[0] < 0) + np.int64(offsets[last] > total)
    # Without a branch the loop is vectorized; nearly all batches are valid.
    for i in range(U(last)):
        falls += offsets[i] > offsets[i + U(1)]
    if falls == 0:
        return -1
    for i in range(last):
        if offsets[i] < 0 or offsets[i] > offsets[i + 1] or offsets[i + 1] > total:
            return i
    return last
