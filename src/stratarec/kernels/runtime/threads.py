"""Number of threads of a kernel: that of torch, within the cores and limits of the calling thread.

Numba's threading layer must be safe to enter from several Python threads at once (a loader thread and the training
thread both run kernels). Numba's built-in work queue aborts there, so only the `omp` and `tbb` layers are allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

from stratarec.kernels.runtime.cores import cores

numba.config.THREADING_LAYER = "threadsafe"

_LIMITS = threading.local()
# More tiles than threads, so that a late thread delays the others less.
_TILES_PER_THREAD = 4
# Fewer rows than these take less time than starting another thread.
_ROWS_PER_THREAD = 512


def limit_threads(most: int) -> None:
    """Limit the threads of kernels that the calling Python thread starts."""
    _LIMITS.most = most


def team_threads() -> int:
    """Return ``torch.get_num_threads()`` within the cores and the calling Python thread's limit."""
    limit = getattr(_LIMITS, "most", numba.config.NUMBA_NUM_THREADS)
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, limit, cores()))


@contextmanager
def within_cores() -> Iterator[None]:
    """Limit torch's threads to `cores` in the calling Python thread, within the context."""
    before = torch.get_num_threads()
    if before <= cores():
        yield
        return
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(rows: int) -> int:
    """Return `team_threads`, or fewer where there are too few rows to look up."""
    useful = 1 + rows // _ROWS_PER_THREAD
    # For small batches torch is not asked, which saves a microsecond of some seventy of a step.
    return 1 if useful == 1 else min(team_threads(), useful)


def use_torch_threads() -> int:
    """Set the number of threads of Numba's own parallel kernels to `team_threads` and return it."""
    threads, before = team_threads(), torch.get_num_threads()
    numba.set_num_threads(threads)
    if torch.get_num_threads() != before:
        # When Numba starts its threads it sets OpenMP's number of threads, which torch uses too: its matrix products
        # would have other bits.
        torch.set_num_threads(before)
    return threads


def tile_size(count: int, threads: int, *, least: int = 1, most: int | None = None) -> int:
    """Return how many of `count` items a thread takes at a time, within limits."""
    size = max(-(-count // (threads * _TILES_PER_THREAD)), least)
    return size if most is None else min(size, most)
