"""Number of threads of a kernel: torch's number, within the cores of the process and the limit of
the calling thread.

Several Python threads run kernels at once (a loader thread and the training thread), so Numba's
threading layer must allow this. Numba's built-in work queue aborts in this case; therefore only the
layers `omp` and `tbb` are allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

from stratarec.errors import StrataError
from stratarec.kernels.runtime.cores import cores

numba.config.THREADING_LAYER = "threadsafe"

_LIMITS = threading.local()
# More tiles than threads, so that a late thread delays the others less.
_TILES_PER_THREAD = 4
# Looking up fewer rows takes less time than starting another thread.
_ROWS_PER_THREAD = 512


def limit_threads(most: int, *, idle_cores: bool = False) -> None:
    """Limit the number of threads of kernels that the calling Python thread starts.

    Parameters
    ----------
    most : int
        Maximum number of threads.
    idle_cores : bool
        Whether the other cores are idle while this thread works, so that starting threads is cheap.
    """
    _LIMITS.most = most
    _LIMITS.idle_cores = idle_cores


def has_idle_cores() -> bool:
    """Return whether the calling Python thread may expect that other cores are idle."""
    return getattr(_LIMITS, "idle_cores", False)


def team_threads() -> int:
    """Return ``torch.get_num_threads()``, but at most the number of `cores` and the calling Python
    thread's limit.
    """
    limit = getattr(_LIMITS, "most", numba.config.NUMBA_NUM_THREADS)
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, limit, cores()))


@contextmanager
def within_cores() -> Iterator[None]:
    """While the context is active, limit torch to `cores` threads in the calling Python thread."""
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
    """Return `team_threads`, or fewer if a kernel looks up only a few `rows`."""
    useful = 1 + rows // _ROWS_PER_THREAD
    # For small batches torch is not asked, which saves a microsecond of a step of about seventy.
    return 1 if useful == 1 else min(team_threads(), useful)


def use_torch_threads() -> int:
    """Set the number of threads of Numba's own parallel kernels to `team_threads` and return it.

    Raises
    ------
    StrataError
        If the system lacks GNU's OpenMP library; torch brings its own, which Numba cannot use.
    """
    threads, before = team_threads(), torch.get_num_threads()
    try:
        numba.set_num_threads(threads)
    except ValueError as error:
        raise StrataError(
            "Numba cannot start threads, because the system has no libgomp.so.1; install it, on Debian and "
            "Ubuntu by `apt-get install libgomp1`"
        ) from error
    if torch.get_num_threads() != before:
        # When Numba starts its threads, it sets OpenMP's number of threads. torch uses this number
        # too, and with another number its matrix products have other bits.
        torch.set_num_threads(before)
    return threads


def tile_size(count: int, threads: int, *, least: int = 1, most: int | None = None) -> int:
    """Return how many of `count` items a thread takes at a time, between `least` and `most`."""
    size = max(-(-count // (threads * _TILES_PER_THREAD)), least)
    return size if most is None else min(size, most)
