"""Choose how threads wait for work: spin, or sleep and leave their core to others.

A spinning thread starts the next kernel at once, a sleeping thread 50 us later. But next to other
busy processes, a spinning thread wastes its share of the processor, and the thread that it waits
for is late. Thousand samples/s of a DCN V2 with batches of 256 on two cores:

    other busy processes    0     1     2     4
    spinning             20.3   6.1   3.9   1.4
    sleeping             11.1   9.1  10.4   3.3

The assignment of work to threads does not change, so no bit depends on this choice.

libgomp, which runs torch's operations, spins 300,000 times before it sleeps, but only 100 times if
it has more threads than processors. So additional idle threads make the others sleep.
"""

from __future__ import annotations

import os
import threading

from stratarec.kernels.runtime import openmp, workers
from stratarec.kernels.runtime.helpers import AVAILABLE, HELPERS

_SLEEPY_NS = 0
_LOCK = threading.Lock()
_pool: OversubscribedPool | None = None


class OversubscribedPool:
    """OpenMP threads of another Python thread, which with `threads` outnumber the processors."""

    def __init__(self, threads: int) -> None:
        self._ready = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._stay, args=(threads,), name="stratarec-oversubscribed", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def _stay(self, threads: int) -> None:
        try:
            openmp.start_threads(max(2, openmp.PROCESSORS - threads + 2))
        finally:
            self._ready.set()
        self._end.wait()

    def leave(self) -> None:
        """End the threads."""
        self._end.set()
        self._thread.join()


def sleep_while_waiting(sleep: bool, threads: int = 2) -> None:
    """Make threads of this process sleep while they wait, or make them spin, which is the default.

    Parameters
    ----------
    threads : int
        Number of torch's threads.
    """
    global _pool
    if not AVAILABLE:
        return
    with _LOCK:
        HELPERS.board[workers.SPINS] = _SLEEPY_NS if sleep else workers.SPINS_NS
        if sleep and _pool is None and openmp.launcher():
            _pool = OversubscribedPool(threads)
        elif not sleep and _pool is not None:
            _pool.leave()
            _pool = None


def _forget() -> None:
    """Reset this module in a forked child, which has no threads of its parent."""
    global _pool, _LOCK
    _pool, _LOCK = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
