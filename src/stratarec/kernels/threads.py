"""How many threads a kernel uses: as many as torch does.

The layer must be safe to enter from several Python threads at once (a loader thread and the training thread both run
kernels); Numba's built-in work queue aborts there, so only the `omp` and `tbb` layers are allowed.
"""

from __future__ import annotations

import threading

import numba
import torch

numba.config.THREADING_LAYER = "threadsafe"

_LIMITS = threading.local()


def limit_threads(most: int) -> None:
    """Let kernels that the calling Python thread starts use at most so many threads."""
    _LIMITS.most = most


def use_torch_threads() -> int:
    """Set the calling thread's kernel threads to ``torch.get_num_threads()``, within its limit; returns the number."""
    limit = getattr(_LIMITS, "most", numba.config.NUMBA_NUM_THREADS)
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, limit)
    numba.set_num_threads(threads)
    return int(threads)
