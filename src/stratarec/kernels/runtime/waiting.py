"""What threads do that wait for each other: turn until there is work, or sleep and leave their core to others.

One that turns begins the next kernel at once, one that sleeps 50 us later. Beside other busy processes a thread that
turns spends on nothing what the system gives it, and the one that it waits for comes late. Thousand samples/s of a DCN
V2, batches of 256, two cores, turning and asleep: alone 20.3 and 11.1, beside one busy process 6.1 and 9.1, beside two
3.9 and 10.4, beside four 1.4 and 3.3. Which thread does what stays as it was, so no bit depends on it.

libgomp, with which torch runs its own operations, turns 300,000 times before it sleeps, but 100 times where it has more
threads than there are processors. So threads that only are there make the others sleep.
"""

from __future__ import annotations

import os
import threading

from stratarec.kernels.runtime.team import DEFECT

AVAILABLE = not DEFECT
"""Whether it can be changed here."""

if AVAILABLE:
    from stratarec.kernels.runtime import openmp, workers
    from stratarec.kernels.runtime.helpers import HELPERS

_SLEEPY_NS = 0
_LOCK = threading.Lock()
_pool: OversubscribedPool | None = None


class OversubscribedPool:
    """OpenMP threads of a Python thread, all asleep, beside `threads` of another: together more than processors."""

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
    """Let threads that wait sleep from now on, in the whole process, or turn, as they do by default.

    Parameters
    ----------
    threads : int
        Those of a team of torch.
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
    """In a forked child, which has none of its parent's threads."""
    global _pool, _LOCK
    _pool, _LOCK = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
