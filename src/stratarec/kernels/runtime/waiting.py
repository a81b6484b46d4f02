"""Choose how threads wait for each other: spin until there is work, or sleep and leave their core to others.

A spinning thread starts the next kernel at once, a sleeping one 50 us later. Next to other busy processes a spinning
thread wastes its share of the processor, and the thread that it waits for is late. Thousand samples/s of a DCN V2,
batches of 256, two cores, spinning and sleeping: alone 20.3 and 11.1, next to one busy process 6.1 and 9.1, to two 3.9
and 10.4, to four 1.4 and 3.3. The assignment of work to threads does not change, so no bit depends on it.

libgomp, which runs torch's own operations, spins 300,000 times before it sleeps, but 100 times if it has more threads
than processors. So additional idle threads make the others sleep.
"""

from __future__ import annotations

import os
import threading

from stratarec.kernels.runtime.team import DEFECT

# Whether the way of waiting can be changed.
AVAILABLE = not DEFECT

if AVAILABLE:
    from stratarec.kernels.runtime import openmp, workers
    from stratarec.kernels.runtime.helpers import HELPERS

_SLEEPY_NS = 0
_LOCK = threading.Lock()
_pool: OversubscribedPool | None = None


class OversubscribedPool:
    """Sleeping OpenMP threads of another Python thread: with `threads` in use, more threads than processors."""

    def __init__(self, threads: int) -> None:
        self._ready, self._end = threading.Event(), threading.Event()
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
    """Make waiting threads sleep from now on, in this process, or spin, as they do by default.

    Parameters
    ----------
    threads : int
        Threads of torch.
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
    """Reset in a forked child, which has none of its parent's threads."""
    global _pool, _LOCK
    _pool, _LOCK = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
