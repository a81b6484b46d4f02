"""What an update keeps from step to step on the processor: the order of its tasks and each thread's scratch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.bags import BagBatch, GroupLayout, lookups_by_table
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.threads import threads_for
from stratarec.kernels.update.lists import DIGIT_BITS, MemberScratch

DENSE_FLOATS = 1 << 17
"""Of a block of a member's dense sums; half of a second cache of 1 MiB, the rows themselves being the other half."""
_WIDE_ROWS, _MOST_DENSE = 1024, 1 << 19
"""Rows of several blocks that are summed so, and floats of theirs."""
NOTHING = np.float32(-0.0)
"""Adding to it gives any number's own bits, as starting from that number would; +0.0 would change -0.0."""
_PAGE_FLOATS = 1024
_FEW = 204
"""Lookups that are not counted by table, which took a tenth of such a step: all fit the least scratch there is."""


class UpdateTasks(NamedTuple):
    """The next task, and table, part and number of parts of each, in the order in which threads take them."""

    counter: NDArray[np.int64]
    table: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: NDArray[np.int64]


def schedule(costs: list[float], threads: int) -> tuple[NDArray[np.int64], ...]:
    """`UpdateTasks` but for the counter: tables in descending order of cost; large ones are cut into parts by row."""
    fair = sum(costs) / max(threads, 1)
    tasks = []
    for table, cost in enumerate(costs):
        parts = threads if cost > fair / 2 else 1
        tasks += [(-cost / parts, table, part, parts) for part in range(parts)]
    dealt = np.array([task for _, *task in sorted(tasks)], dtype=np.int64).reshape(-1, 3)
    return tuple(dealt[:, column].copy() for column in range(3))


def shapes(lookups: int, width: int) -> dict[str, tuple[int, Any]]:
    """Elements and type of each array of a thread's scratch for up to `lookups` lookups of a table."""
    capacity = 1 << max(int(lookups * 1.25), 256).bit_length()
    return {
        "listed": (capacity, np.int64),
        "source_of": (capacity, np.int64),
        "scale_of": (capacity, np.float32),
        "keys": (2 * capacity, np.uint64),
        "counters": (2 << DIGIT_BITS, np.int32),
        "order": (capacity, np.int32),
        "row_of": (capacity, np.uint64),
        "end_of": (capacity, np.int32),
        # Whole pages: no cache line is shared between threads, no row straddles two.
        "row_sum": (-(-width // _PAGE_FLOATS) * _PAGE_FLOATS, np.float32),
        "dense": (min(max(_WIDE_ROWS * width, DENSE_FLOATS), _MOST_DENSE), np.float32),
        "touched": (DENSE_FLOATS, np.uint8),
    }


def scratch_bytes(lookups: int, width: int, threads: int) -> int:
    """Bytes of the scratch of so many threads."""
    return threads * sum(size * int(np.dtype(kind).itemsize) for size, kind in shapes(lookups, width).values())


@cache
def in_turn(tables: int) -> tuple[NDArray[np.int64], ...]:
    """`schedule` for one thread, to which any order is as good."""
    return np.arange(tables), np.zeros(tables, dtype=np.int64), np.ones(tables, dtype=np.int64)


class Load:
    """How many lookups of each table a batch has, and how threads share them.

    Parameters
    ----------
    counts : ndarray
        ``[tables]`` int64.
    batch : int or None
        Samples, where every bag holds one id: nothing else then decides the counts.
    """

    def __init__(self, counts: NDArray[np.int64], batch: int | None) -> None:
        self.counts, self.batch = counts, batch
        self.total, self.most = int(counts.sum()), int(counts.max(initial=0))
        self._tasks: dict[int, tuple[NDArray[np.int64], ...]] = {}

    def tasks(self, group: GroupLayout, threads: int) -> tuple[NDArray[np.int64], ...]:
        """`schedule` for so many threads."""
        if threads == 1:
            return in_turn(len(self.counts))
        if threads not in self._tasks:
            rows = group.rows[group.table_features[group.table_start[:-1]]]
            # A lookup adds one gradient row; a distinct row also reads and writes a row of the table.
            costs = (self.counts + 2 * np.minimum(self.counts, rows)).astype(float).tolist()
            self._tasks[threads] = schedule(costs, threads)
        return self._tasks[threads]


class Arrays:
    """The scratch of the largest batch met, of all tables that share it."""

    def __init__(self) -> None:
        self._threads = self._lookups = self._capacity = self._width = 0
        # By the type of the ids that are listed, which lie in the same memory.
        self._made: dict[Any, MemberScratch] = {}
        self.nbytes = 0

    def fit(self, threads: int, lookups: int, width: int, ids: np.dtype[Any]) -> MemberScratch:
        """Arrays for `threads` threads and up to `lookups` lookups of a table, whose ids are of type `ids`."""
        if threads > self._threads or lookups > self._capacity or width > self._width:
            self._made = {}
            self._make(max(threads, self._threads), max(lookups, self._lookups), max(width, self._width))
        found = self._made.get(ids)
        if found is None:
            made = self._made[np.dtype(np.int64)]
            found = self._made[ids] = made._replace(listed=made.listed.view(ids))
        return found

    def _make(self, threads: int, lookups: int, width: int) -> None:
        arrays: dict[str, Any] = {
            name: allocate(threads * size).reshape(threads, size)
            if kind is np.float32
            else np.empty((threads, size), kind)
            for name, (size, kind) in shapes(lookups, width).items()
        }
        made = MemberScratch(**arrays, squares=arrays["keys"].view(np.float64))
        made.dense.fill(NOTHING)
        made.touched.fill(0)
        self._made[np.dtype(np.int64)] = made
        self._threads, self._lookups, self._width = threads, lookups, width
        self._capacity = made.order.shape[1]
        self.nbytes = sum(array.nbytes for array in arrays.values())


class Kept:
    """The load of the last batch, and the scratch that is shared.

    Parameters
    ----------
    arrays : Arrays
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._load: Load | None = None

    def share(self, group: GroupLayout, bags: BagBatch) -> tuple[int, int, tuple[NDArray[np.int64], ...]]:
        """Threads for a batch, how many lookups of a table there are at most, and the tasks."""
        lookups = len(bags.values)
        if bags.offsets is not None and lookups <= _FEW:
            return 1, lookups, in_turn(len(group.table_start) - 1)
        load = self._load_of(group, bags)
        threads = threads_for(load.total)
        return threads, load.most, load.tasks(group, threads)

    def _load_of(self, group: GroupLayout, bags: BagBatch) -> Load:
        """The batch's load; that of the last one where it is the same, as it is without jagged features."""
        # Counted once for batches of single ids: with counts at every step batches of 4 and 32 took 1.2 times as long.
        last, batch = self._load, bags.batch if bags.offsets is None else None
        if last is not None and batch is not None and last.batch == batch:
            return last
        counts = lookups_by_table(group, bags)
        if last is None or last.batch != batch or not np.array_equal(counts, last.counts):
            self._load = last = Load(counts, batch)
        return last


def kept_for(workspace: Any) -> Kept:
    """What the workspace keeps, made when it is first used."""
    if workspace.kept is None:
        if workspace.scratch.kept is None:
            workspace.scratch.kept = Arrays()
        workspace.kept = Kept(workspace.scratch.kept)
    kept: Kept = workspace.kept
    return kept
