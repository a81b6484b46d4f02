"""Helper threads. A kernel waits for a helper only if the helper has started to help.

Helpers are Python threads that run compiled code without the interpreter lock. They sleep on a pipe
or an event until a kernel wakes them; `workers` describes how they find work. They start when a
kernel first needs them and end with the interpreter. A forked child starts new ones.
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.runtime import workers

# Whether this system has file descriptors to sleep on.
AVAILABLE = os.name == "posix"


class Helpers:
    """Helper threads of this process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._descriptors: set[int] = set()
        self._growing = AVAILABLE
        self.board = _board()
        self._address = self.board.ctypes.data

    def ready(self, count: int) -> tuple[int, int]:
        """Start `count` helpers, or as many as the system allows; return the addresses of `lead`
        and of the board.
        """
        if len(self._threads) < count and self._growing:
            with self._lock:
                self._grow(count)
        return workers.leader().address, self._address

    def _grow(self, count: int) -> None:
        if not self._descriptors:
            for job in range(workers.FIRST_JOB, workers.FIRST_HELPER, workers.LINE):
                self._create_eventfd(job)
        while self._growing and len(self._threads) < min(count, workers.MOST_HELPERS):
            line = workers.FIRST_HELPER + len(self._threads) * workers.LINE
            self._create_eventfd(line)
            thread = threading.Thread(
                target=_serve, args=(self.board, line), name="stratarec-helper", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # The system refuses more threads, or the interpreter is about to end: kernels use
                # the existing helpers.
                self._growing = False
                return
            self._threads.append(thread)
            self.board[workers.HELPERS] = len(self._threads)

    def _create_eventfd(self, line: int) -> None:
        if hasattr(os, "eventfd"):
            # Writing eight bytes wakes the thread that reads, and reading them resets the event.
            listen = ring = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            listen, ring = os.pipe()
        self._descriptors |= {listen, ring}
        self.board[line + workers.RING], self.board[line + workers.LISTEN] = ring, listen

    def stop(self) -> None:
        """End all helpers; kernels then run without them."""
        with self._lock:
            self._growing = False
            # loading the kernel would take half a second at the end of a command without helpers
            if self._threads:
                workers.stop(self.board)
            for thread in self._threads:
                thread.join()
            self.board[workers.HELPERS] = 0

    def forget(self) -> None:
        """Reset the helpers in a forked child, which has no threads of its parent."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._reset()


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
    board[line + workers.THREAD], board[line + workers.AVOIDED] = threading.get_native_id(), -1
    workers.serve(board, line)


HELPERS = Helpers()
atexit.register(HELPERS.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HELPERS.forget)
