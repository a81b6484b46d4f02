"""State of the update on the CPU between steps: order of tasks and scratch of threads."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.bags import BagBatch, GroupLayout, lookups_by_table
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.threads import threads_for
from stratarec.kernels.update.lists import DIGIT_BITS, MemberScratch

# Number of floats of one block of a thread's dense sums: half of an L2 cache of 1 MiB; the rows
# take the other half.
DENSE_FLOATS = 1 << 17
# Number of rows of several blocks that are summed densely, and largest number of floats of such
# sums.
_WIDE_ROWS, _MOST_DENSE = 1024, 1 << 19
# Adding a number to -0.0 gives exactly this number; added to 0.0, the number -0.0 would become 0.0.
NOTHING = np.float32(-0.0)
_PAGE_FLOATS = 1024
# So few lookups fit the smallest scratch. They are not counted by table, which took a tenth of such
# a step.
_FEW = 204


class UpdateTasks(NamedTuple):
    """Tasks of an update in the order of execution: the table, the part, and the number of parts of
    that table.

    `counter` holds the number of the next task.
    """

    counter: NDArray[np.int64]
    table: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: NDArray[np.int64]


def schedule(costs: list[float], threads: int) -> tuple[NDArray[np.int64], ...]:
    """Return `UpdateTasks` without the counter: tables by falling cost, large ones in parts."""
    fair = sum(costs) / max(threads, 1)
    tasks = []
    for table, cost in enumerate(costs):
        parts = threads if cost > fair / 2 else 1
        tasks += [(-cost / parts, table, part, parts) for part in range(parts)]
    columns = np.array([task for _, *task in sorted(tasks)], dtype=np.int64).reshape(-1, 3)
    return tuple(columns[:, column].copy() for column in range(3))


def shapes(lookups: int, width: int) -> dict[str, tuple[int, Any]]:
    """Return size and type of a thread's scratch arrays for tables with up to `lookups` lookups."""
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
        # Whole pages, so that threads share no cache line and no row is in two pages.
        "row_sum": (-(-width // _PAGE_FLOATS) * _PAGE_FLOATS, np.float32),
        "dense": (min(max(_WIDE_ROWS * width, DENSE_FLOATS), _MOST_DENSE), np.float32),
        "touched": (DENSE_FLOATS, np.uint8),
    }


def scratch_bytes(lookups: int, width: int, threads: int) -> int:
    """Return the scratch bytes of `threads` threads, for tables up to `width` wide with up to
    `lookups` lookups.
    """
    return threads * sum(
        size * int(np.dtype(kind).itemsize) for size, kind in shapes(lookups, width).values()
    )


@cache
def sequential_tasks(tables: int) -> tuple[NDArray[np.int64], ...]:
    """Return the tasks for one thread: the tables in their order."""
    return np.arange(tables), np.zeros(tables, dtype=np.int64), np.ones(tables, dtype=np.int64)


class LookupLoad:
    """Number of lookups of each table in a batch, and their division among threads.

    Parameters
    ----------
    counts : ndarray
        ``[tables]`` int64 number of lookups.
    batch : int or None
        Number of samples if every bag holds one id, in which case it determines the counts;
        otherwise None.
    """

    def __init__(self, counts: NDArray[np.int64], batch: int | None) -> None:
        self.counts = counts
        self.batch = batch
        self.total = int(counts.sum())
        self.most = int(counts.max(initial=0))
        self._tasks: dict[int, tuple[NDArray[np.int64], ...]] = {}

    def tasks(self, group: GroupLayout, threads: int) -> tuple[NDArray[np.int64], ...]:
        """Return the tasks for `threads` threads."""
        if threads == 1:
            return sequential_tasks(len(self.counts))
        if threads not in self._tasks:
            rows = group.rows[group.table_features[group.table_start[:-1]]]
            # A lookup reads one gradient row; a distinct row also reads and writes a row of the
            # table.
            costs = (self.counts + 2 * np.minimum(self.counts, rows)).astype(float).tolist()
            self._tasks[threads] = schedule(costs, threads)
        return self._tasks[threads]


class ScratchArrays:
    """Scratch that all tables of a scratchpad share, large enough for the largest batch so far."""

    def __init__(self) -> None:
        self._threads = self._lookups = self._capacity = self._width = 0
        # Type of the listed ids -> views of the scratch; all views share the same memory.
        self._views: dict[Any, MemberScratch] = {}
        self.nbytes = 0

    def fit(self, threads: int, lookups: int, width: int, ids: np.dtype[Any]) -> MemberScratch:
        """Return arrays for `threads` threads and tables with up to `lookups` lookups; `ids` is the
        type of ids.
        """
        if threads > self._threads or lookups > self._capacity or width > self._width:
            self._allocate(
                max(threads, self._threads), max(lookups, self._lookups), max(width, self._width)
            )
        if ids not in self._views:
            views = self._views[np.dtype(np.int64)]
            self._views[ids] = views._replace(listed=views.listed.view(ids))
        return self._views[ids]

    def _allocate(self, threads: int, lookups: int, width: int) -> None:
        arrays: dict[str, Any] = {
            name: allocate(threads * size).reshape(threads, size)
            if kind is np.float32
            else np.empty((threads, size), kind)
            for name, (size, kind) in shapes(lookups, width).items()
        }
        scratch = MemberScratch(**arrays, squares=arrays["keys"].view(np.float64))
        scratch.dense.fill(NOTHING)
        scratch.touched.fill(0)
        self._views = {np.dtype(np.int64): scratch}
        self._threads = threads
        self._lookups = lookups
        self._width = width
        self._capacity = scratch.order.shape[1]
        self.nbytes = sum(array.nbytes for array in arrays.values())


class UpdateState:
    """Lookups of the last batch, and the shared scratch."""

    def __init__(self, arrays: ScratchArrays) -> None:
        self.arrays = arrays
        self._load: LookupLoad | None = None

    def share(self, group: GroupLayout, bags: BagBatch) -> tuple[int, int, tuple[NDArray[np.int64], ...]]:
        """Return the number of threads for a batch, the largest number of lookups of a table, and
        the tasks.
        """
        lookups = len(bags.values)
        if bags.offsets is not None and lookups <= _FEW:
            return 1, lookups, sequential_tasks(len(group.table_start) - 1)
        load = self._load_of(group, bags)
        threads = threads_for(load.total)
        return threads, load.most, load.tasks(group, threads)

    def _load_of(self, group: GroupLayout, bags: BagBatch) -> LookupLoad:
        # Batches of single ids are counted once; counting at every step made batches of 4 and 32
        # take 1.2 times as long.
        last, batch = self._load, bags.batch if bags.offsets is None else None
        if last is not None and batch is not None and last.batch == batch:
            return last
        counts = lookups_by_table(group, bags)
        if last is None or last.batch != batch or not np.array_equal(counts, last.counts):
            self._load = last = LookupLoad(counts, batch)
        return last


def state_of(workspace: Any) -> UpdateState:
    """Return the state of a workspace, which is created at its first use."""
    if workspace.state is None:
        if workspace.scratch.state is None:
            workspace.scratch.state = ScratchArrays()
        workspace.state = UpdateState(workspace.scratch.state)
    state: UpdateState = workspace.state
    return state
