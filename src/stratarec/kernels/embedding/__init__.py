"""Pool, look up and update embedding rows of one width group.

Shapes: F features, B samples, N ids, D width, R rows of all the group's tables together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.embedding import backward, lookup, rows
from stratarec.kernels.memory import allocate
from stratarec.kernels.team import team_of
from stratarec.kernels.threads import team_threads, tile_size
from stratarec.kernels.vector import blocks

Ids = NDArray[np.int32] | NDArray[np.int64]
Floats = NDArray[np.float32]

KINDS = {
    "sgd": rows.SGD,
    "rowwise_adagrad": rows.ROWWISE_ADAGRAD,
    "adagrad": rows.ADAGRAD,
    "rowwise_adam": rows.ROWWISE_ADAM,
}
# Samples that a thread looks up at once: fewer than 64 rows a table start too often.
_LEAST_TILE, _MOST_TILE = 64, 512
# Larger outputs are written past the caches: reading lines only to overwrite them took a tenth to a third of the time.
_STREAM_BYTES = 4 << 20
# The scratch of `update`, in the order in which its kernel takes it.
_WORKSPACES = (
    "index_of", "slot_of", "listed", "source_of", "scale_of", "order", "row_of", "count_of", "row_sum", "dense",
    "touched",
)  # fmt: skip
_PAGE_FLOATS = 1024
_NO_OFFSETS = np.zeros(1, dtype=np.int64)
_NO_FLOATS = np.zeros(1, dtype=np.float32)


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
    weights: Floats | None
    batch: int
    key: NDArray[np.int64]
    filled: NDArray[np.int64] | None = None

    def span(self, feature: int) -> tuple[int, int]:
        """First and last position of the feature's ids in `values`."""
        first, last = int(self.key[feature]) * self.batch, (int(self.key[feature]) + 1) * self.batch
        return (first, last) if self.offsets is None else (int(self.offsets[first]), int(self.offsets[last]))


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
        """Whether every row of the output starts at a multiple of 64 bytes, its first one provided."""
        return not (self.width | int(np.bitwise_or.reduce(self.column[self.pooled]))) % 16

    @cached_property
    def lookup_kernels(self) -> SimpleNamespace:
        """Compiled for this width."""
        return lookup.kernels(*blocks(self.width))

    @cached_property
    def backward_kernels(self) -> SimpleNamespace:
        """Compiled for this width."""
        return backward.kernels(*blocks(self.width))


@dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """Which row optimizer, and its numbers at this step."""

    kind: str
    rate: float
    eps: float
    decay: float
    beta1: float
    beta2: float
    step: int


@dataclass
class Workspace:
    """Scratch of `update`, one row a thread; grows to the largest batch met and is then reused."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    _plans: dict[tuple[int, bytes], tuple[NDArray[np.int64], ...]] = field(default_factory=dict)

    def plan(self, group: GroupLayout, counts: NDArray[np.int64], threads: int) -> tuple[NDArray[np.int64], ...]:
        """`schedule` for these numbers of lookups; kept, since batches without jagged features repeat them."""
        key = (threads, counts.tobytes())
        if key not in self._plans:
            rows = group.rows[group.table_features[group.table_start[:-1]]]
            # A lookup adds one gradient row; a distinct row also reads and writes a row of the table.
            costs = (counts + 2 * np.minimum(counts, rows)).astype(float).tolist()
            self._plans = {key: schedule(costs, threads)}
        return self._plans[key]

    def prepare(self, threads: int, lookups: int, width: int, ids: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Arrays for `threads` threads and up to `lookups` lookups of a table, whose ids are of type `ids`."""
        have = self.arrays.get("order")
        if have is not None and have.shape[0] >= threads and have.shape[1] >= lookups:
            if self.arrays["listed"].dtype != ids:
                self.arrays["listed"] = np.empty(have.shape, dtype=ids)
            return self.arrays
        capacity = 1 << max(int(lookups * 1.25), 256).bit_length()
        shapes: dict[str, tuple[int, Any]] = {
            "index_of": (2 * capacity, np.int32),
            "slot_of": (capacity, np.int32),
            "listed": (capacity, ids),
            "source_of": (capacity, np.int64),
            "scale_of": (capacity, np.float32),
            "order": (capacity, np.int32),
            "row_of": (capacity, np.uint64),
            "count_of": (capacity, np.int32),
            "touched": (backward.DENSE_FLOATS, np.uint8),
        }
        self.arrays = {name: np.empty((threads, size), dtype=kind) for name, (size, kind) in shapes.items()}
        # Whole pages for each thread: no cache line is shared, no row straddles two.
        for name, size in (("row_sum", -(-width // _PAGE_FLOATS) * _PAGE_FLOATS), ("dense", backward.DENSE_FLOATS)):
            self.arrays[name] = allocate(threads * size).reshape(threads, size)
        self.arrays["index_of"].fill(-1)
        self.arrays["dense"].fill(backward.NOTHING)
        self.arrays["touched"].fill(0)
        return self.arrays


def pool(weights: Floats, group: GroupLayout, lookups: BagBatch, out: Floats) -> int:
    """Pool every pooled feature of the group into ``out[b, column[f]:column[f] + D]``.

    Returns
    -------
    int
        Place in `values` of an id outside its table, or -1. A bad id is never read through.
    """
    chosen = group.pooled
    key, base, sizes, column = lookups.key[chosen], group.base[chosen], group.rows[chosen], group.column[chosen]
    if not len(key) or not lookups.batch:
        return -1
    threads = team_threads()
    tile, stride = _tile(lookups.batch, threads), out.shape[1]
    if lookups.offsets is None and lookups.weights is None:
        streaming = out.nbytes >= _STREAM_BYTES and group.lines and not (stride % 16 or out.ctypes.data % 64)
        bad = group.lookup_kernels.pool_singles(
            team_of(threads), weights, group.width, lookups.values, lookups.batch, key, base, sizes, column,
            out.reshape(-1), stride, tile, streaming,
        )  # fmt: skip
        return int(bad)
    sample_weights = _NO_FLOATS if lookups.weights is None else lookups.weights
    filled = np.full(len(key), lookups.batch) if lookups.filled is None else lookups.filled[chosen]
    bad = group.lookup_kernels.pool_bags(
        team_of(threads), weights, group.width, lookups.values, _all_offsets(lookups), sample_weights,
        lookups.weights is not None, lookups.batch, filled, key, base, sizes, column, group.mean[chosen],
        out.reshape(-1), stride, tile,
    )  # fmt: skip
    return int(bad)


def _tile(count: int, threads: int) -> int:
    return tile_size(count, threads, least=_LEAST_TILE, most=_MOST_TILE)


def _all_offsets(lookups: BagBatch) -> NDArray[np.int64]:
    if lookups.offsets is not None:
        return lookups.offsets
    return np.arange(len(lookups.values) + 1, dtype=np.int64)


def offsets_or_empty(lookups: BagBatch) -> NDArray[np.int64]:
    """The offsets, or a placeholder for kernels that are told of single ids apart."""
    return _NO_OFFSETS if lookups.offsets is None else lookups.offsets


def gather(weights: Floats, group: GroupLayout, lookups: BagBatch, feature: int, out: Floats) -> int:
    """``out[i] = row of values[first + i]`` for the ids of one sequence feature; returns as `pool` does."""
    first, last = lookups.span(feature)
    values, threads = lookups.values[first:last], team_threads()
    bad = group.lookup_kernels.gather(
        team_of(threads), weights, group.width, values, group.base[feature], group.rows[feature], out.reshape(-1),
        _tile(last - first, threads),
    )  # fmt: skip
    return int(bad) if bad < 0 else first + int(bad)


def schedule(costs: list[float], threads: int) -> tuple[NDArray[np.int64], ...]:
    """Tables in descending order of cost, in which threads take them; large ones are cut into parts by row.

    Returns
    -------
    tuple of ndarray
        ``(task_table, task_part, task_parts)``.
    """
    fair = sum(costs) / max(threads, 1)
    tasks = []
    for table, cost in enumerate(costs):
        parts = threads if cost > fair / 2 else 1
        tasks += [(-cost / parts, table, part, parts) for part in range(parts)]
    dealt = np.array([task for _, *task in sorted(tasks)], dtype=np.int64).reshape(-1, 3)
    return dealt[:, 0].copy(), dealt[:, 1].copy(), dealt[:, 2].copy()


def update(
    weights: Floats,
    row_state: Floats,
    full_state: Floats,
    group: GroupLayout,
    lookups: BagBatch,
    gradient: Floats,
    sequence_gradient: Floats,
    sequence_start: NDArray[np.int64],
    rule: RowUpdate,
    workspace: Workspace,
) -> None:
    """Sum gradients by distinct row, in ascending order of lookup position, and apply the row optimizer in place.

    Parameters
    ----------
    weights : ndarray
        ``[R * D]`` float32.
    row_state, full_state : ndarray
        ``[R]`` and ``[R * D]`` float32, or of any size where `rule` keeps no such state.
    gradient : ndarray
        ``[B, columns]`` float32 gradient of the pooled output, C-contiguous.
    sequence_gradient : ndarray
        Flat float32; feature f's ``[N_f, D]`` gradient starts at ``sequence_start[f]``.

    Notes
    -----
    The bits do not depend on the number of threads: every row is summed and updated by one thread.
    """
    threads = team_threads()
    counts = lookups_by_table(group, lookups)
    if not counts.any():
        return
    plan = workspace.plan(group, counts, threads)
    work = workspace.prepare(threads, int(counts.max()), group.width, lookups.values.dtype)
    single = np.float32
    group.backward_kernels.update(
        team_of(threads), weights, group.width, row_state, full_state, lookups.values,
        offsets_or_empty(lookups), lookups.offsets is None,
        _NO_FLOATS if lookups.weights is None else lookups.weights, lookups.weights is not None, lookups.batch,
        lookups.key, group.base, group.rows, group.column, group.mean, group.sequence, sequence_start,
        group.table_start, group.table_features, counts, *plan,
        gradient.reshape(-1), sequence_gradient, gradient.shape[1],
        *(work[name] for name in _WORKSPACES),
        KINDS[rule.kind], single(rule.rate), single(rule.eps), single(rule.decay), single(rule.beta1),
        single(rule.beta2), single(1 - rule.beta1**rule.step), single(1 - rule.beta2**rule.step),
    )  # fmt: skip


def lookups_by_table(group: GroupLayout, lookups: BagBatch) -> NDArray[np.int64]:
    """``[tables]`` number of lookups of each table in the batch."""
    if lookups.offsets is None:
        return np.diff(group.table_start) * lookups.batch
    first = lookups.key[group.table_features] * lookups.batch
    return np.add.reduceat(lookups.offsets[first + lookups.batch] - lookups.offsets[first], group.table_start[:-1])


def weight_gradient(weights: Floats, group: GroupLayout, lookups: BagBatch, gradient: Floats, out: Floats) -> None:
    """Add to ``out[N]`` the gradient of each pooled lookup's per-sample weight."""
    chosen = group.pooled
    group.lookup_kernels.weight_gradient(
        team_of(team_threads()), weights, group.width, lookups.values, _all_offsets(lookups), lookups.batch,
        lookups.key[chosen], group.base[chosen], group.column[chosen], group.mean[chosen], gradient.reshape(-1),
        gradient.shape[1], out,
    )  # fmt: skip


def first_falling(offsets: NDArray[np.int64], total: int) -> int:
    """The first place i at which ``offsets[i]``, ``offsets[i + 1]`` fall or do not lie in [0, total]; or -1."""
    return int(rows.first_falling(offsets, total))


def mark_rows(group: GroupLayout, lookups: BagBatch, bits: NDArray[np.uint8]) -> None:
    """Set the bit of every row of the group that the batch looks up: bit ``r & 7`` of byte ``r >> 3``."""
    rows.mark_rows(
        lookups.values, offsets_or_empty(lookups), lookups.offsets is None, lookups.batch, lookups.key, group.base, bits
    )
