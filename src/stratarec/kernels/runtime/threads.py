"""How many threads a kernel uses: as many as torch does.

The layer must be safe to enter from several Python threads at once (a loader thread and the training thread both run
kernels); Numba's built-in work queue aborts there, so only the `omp` and `tbb` layers are allowed.
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
# More tiles than threads even out what one of them is late with.
_TILES_PER_THREAD = 4

# That another thread looks up in less time than starting it takes.
_ROWS_PER_THREAD = 512


def limit_threads(most: int) -> None:
    """Let kernels that the calling Python thread starts use at most so many threads."""
    _LIMITS.most = most


def team_threads() -> int:
    """``torch.get_num_threads()`` within the cores and the calling Python thread's limit: for kernels of teams."""
    limit = getattr(_LIMITS, "most", numba.config.NUMBA_NUM_THREADS)
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, limit, cores()))


@contextmanager
def within_cores() -> Iterator[None]:
    """Let torch use no more threads than there are `cores`, in the calling Python thread, as long as this lasts."""
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
    """`team_threads`, or fewer where there are too few rows of a table to look up for so many to gain by it."""
    wanted = 1 + rows // _ROWS_PER_THREAD
    # Small batches are spared asking torch and the environment: a microsecond of some seventy of a step.
    return 1 if wanted == 1 else min(team_threads(), wanted)


def use_torch_threads() -> int:
    """Set the calling thread's threads for Numba's own parallel kernels to `team_threads`; returns the number."""
    threads, before = team_threads(), torch.get_num_threads()
    numba.set_num_threads(threads)
    if torch.get_num_threads() != before:
        # Numba, when it starts its threads, tells OpenMP how many there are, and torch goes by that, too: its products
        # of matrices would have other bits than before.
        torch.set_num_threads(before)
    return threads


def tile_size(count: int, threads: int, *, least: int = 1, most: int | None = None) -> int:
    """How many of `count` things a thread takes at a time, within limits."""
    size = max(-(-count // (threads * _TILES_PER_THREAD)), least)
    return size if most is None else min(size, most)
