"""Helper threads of our own, which a kernel waits for only if they have begun to help.

They are Python threads that spend their lives in compiled code without the interpreter lock, asleep on a pipe or an
event until a kernel rings; `workers` says how they find work. They start when a kernel first wants them, are gone in a
forked child, which starts its own, and end with the interpreter.
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.runtime import workers

AVAILABLE = os.name == "posix"
"""Whether this system has what helpers sleep on."""


class Helpers:
    """The helpers of this process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._descriptors: set[int] = set()
        self._growing = AVAILABLE
        self.board = _board()

    def ready(self, wanted: int) -> NDArray[np.int64]:
        """The board on which a kernel finds `wanted` helpers, or as many as the system gives."""
        if len(self._threads) < wanted and self._growing:
            with self._lock:
                self._grow(wanted)
        return self.board

    def _grow(self, wanted: int) -> None:
        if not self._descriptors:
            for job in range(workers.FIRST_JOB, workers.FIRST_HELPER, workers.LINE):
                self._create_eventfd(job)
        while self._growing and len(self._threads) < min(wanted, workers.MOST_HELPERS):
            line = workers.FIRST_HELPER + len(self._threads) * workers.LINE
            self._create_eventfd(line)
            thread = threading.Thread(target=_serve, args=(self.board, line), name="stratarec-helper", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No more threads for this process, or its interpreter ends: kernels make do with those there are.
                self._growing = False
                return
            self._threads.append(thread)
            self.board[workers.HELPERS] = len(self._threads)

    def _create_eventfd(self, line: int) -> None:
        if hasattr(os, "eventfd"):
            # Semaphore or not, one eight-byte write wakes the one that reads, and is taken back by its read.
            listen = ring = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            listen, ring = os.pipe()
        self._descriptors |= {listen, ring}
        self.board[line + workers.RING], self.board[line + workers.LISTEN] = ring, listen

    def stop(self) -> None:
        """End all helpers; kernels go on without."""
        with self._lock:
            self._growing = False
            workers.stop(self.board)
            for thread in self._threads:
                thread.join()
            self.board[workers.HELPERS] = 0

    def forget(self) -> None:
        """Begin anew in a forked child: its parent's threads are gone, whatever they were at."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._begin()


def _board() -> NDArray[np.int64]:
    words = np.zeros(workers.WORDS + workers.LINE, dtype=np.int64)
    first = -(words.ctypes.data // words.itemsize) % workers.LINE
    board = words[first : first + workers.WORDS]
    board[workers.SPINS] = workers.SPINS_NS
    if hasattr(os, "sched_getaffinity"):
        allowed = board[workers.ALLOWED : workers.ALLOWED + workers.LINE].view(np.uint64)
        for processor in os.sched_getaffinity(0):
            if processor < 64 * workers.LINE:
                allowed[processor >> 6] |= np.uint64(1 << (processor & 63))
    return board


def _serve(board: NDArray[np.int64], line: int) -> None:
    board[line + workers.THREAD], board[line + workers.KEPT_OFF] = threading.get_native_id(), -1
    workers.serve(board, line)


HELPERS = Helpers()
atexit.register(HELPERS.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HELPERS.forget)
