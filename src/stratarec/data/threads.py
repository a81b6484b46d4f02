"""Threads for work on columns and for stages of a pipeline. Polars, pyarrow, NumPy and compiled
kernels release Python's lock, so threads of one process use several processors.

Results have the order of the inputs, so they do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import polars as pl

from stratarec.kernels.runtime.cores import cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count() -> int:
    """Return the number of processors, or fewer if Polars may use fewer, as in a worker of Ray."""
    return min(cores(), pl.thread_pool_size())


def map_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Apply `function` to all items, on `thread_count` threads.

    The results have the order of the items. If several calls fail, the error of the first of these
    items is raised.
    """
    threads = min(thread_count(), len(items))
    if threads < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(threads, "stratarec-columns") as pool:
        return list(pool.map(function, items))


def ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`, while a thread already computes the next item.

    At most two items exist: the one that the caller uses, and the next one. An error is raised
    after all earlier items.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "stratarec-ahead") as pool:
        future = pool.submit(next, iterator, end)
        while (item := future.result()) is not end:
            future = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
            del item  # while the next item is computed
