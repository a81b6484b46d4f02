"""torch's own OpenMP threads: how to start kernels on them, and whether they are awake.

After a parallel operation they spin for some milliseconds before they sleep. While they spin, a kernel that borrows
them starts at once, and threads of any other pool would wait for their cores. Once they sleep, borrowing them is
useless: the kernel would wait at its end for all of them to wake.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from functools import cache
from pathlib import Path

import torch

from stratarec.kernels.runtime.outline import thread_ids

# Number of the system call gettid, for which libc has a function only since 2019.
_NUMBER = {"x86_64": 186, "aarch64": 178}.get(platform.machine(), 0)
_WATCHED = sys.platform == "linux" and bool(_NUMBER)

# As OpenMP counted them when it was loaded.
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_WORKER = threading.local()
_forked = False


@cache
def launcher() -> int:
    """Return the address of the ``GOMP_parallel`` that torch uses, or 0 where its runtime has none."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def awake(threads: int) -> int:
    """Return `launcher()` if the OpenMP threads of the calling Python thread are spinning, else 0.

    Every Python thread has OpenMP threads of its own. They compute nothing while the calling thread is here, so those
    that run must be spinning.
    """
    # Where their state is unknown, helper threads are the safer choice.
    if not _WATCHED or _forked or not launcher():
        return 0
    if getattr(_WORKER, "threads", 0) != threads:
        # torch ends and starts threads when their number changes.
        ids = thread_ids(launcher(), threads, _NUMBER)
        others = [int(thread) for thread in ids if thread not in (0, threading.get_native_id())]
        _WORKER.threads, _WORKER.clock = threads, _clock(others[0]) if others else None
    return launcher() if _WORKER.clock is not None and _advances(_WORKER.clock) else 0


def start_threads(threads: int) -> None:
    """Start so many OpenMP threads for the calling Python thread, including itself, for as long as it lives."""
    if _NUMBER and not _forked:
        thread_ids(launcher(), threads, _NUMBER)


def _clock(thread: int) -> int:
    """Return Linux's number of the CPU-time clock of a thread."""
    return (~thread << 3) | 6


def _advances(clock: int) -> bool:
    try:
        # Between two readings the clock of a spinning thread advances, and that of a sleeping one does not.
        return time.clock_gettime_ns(clock) != time.clock_gettime_ns(clock)
    except OSError:
        _WORKER.threads = 0
        return False


def _forget() -> None:
    """Mark the runtime as unusable: an OpenMP runtime with threads does not survive a fork."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
