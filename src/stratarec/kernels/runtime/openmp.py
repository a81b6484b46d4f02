"""torch's OpenMP threads: how to start kernels on them, and whether they are awake.

After a parallel operation, these threads spin for some milliseconds before they sleep. While they
spin, a kernel that borrows them starts at once, and threads of any other pool would have to wait
for their cores. Once they sleep, borrowing them is useless: at its end, the kernel would wait for
all of them to wake.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.runtime.outline import write_thread_ids

# Number of the system call gettid; libc has no function for it before 2019.
_NUMBER = {"x86_64": 186, "aarch64": 178}.get(platform.machine(), 0)
_WATCHED = sys.platform == "linux" and bool(_NUMBER)

# Number of processors of this process at import, as OpenMP saw it when it was loaded.
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_WORKER = threading.local()
_forked = False
_had_threads = False


@cache
def launcher() -> int:
    """Return the address of ``GOMP_parallel`` of torch's OpenMP runtime, or 0 if it has none."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    for library in sorted((Path(spec.origin).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def awake(threads: int) -> int:
    """Return `launcher()` if the OpenMP threads of the calling Python thread are spinning,
    otherwise 0.

    Every Python thread has a separate set of OpenMP threads. They compute nothing while the calling
    thread is in this function, so threads that use processor time must be spinning.
    """
    # If the state of the threads cannot be known, helper threads are the safer choice. Unloaded,
    # torch has no threads.
    if not _WATCHED or _forked or "torch" not in sys.modules or not launcher():
        return 0
    if getattr(_WORKER, "threads", 0) != threads:
        # torch ends these threads and starts others when their number changes.
        ids = _thread_ids(threads)
        others = [int(thread) for thread in ids if thread not in (0, threading.get_native_id())]
        _WORKER.threads = threads
        _WORKER.clock = _clock(others[0]) if others else None
    return launcher() if _WORKER.clock is not None and _advances(_WORKER.clock) else 0


def start_threads(threads: int) -> None:
    """Start `threads` OpenMP threads for the calling Python thread, including itself; they live as
    long as it does.
    """
    if _NUMBER and not _forked:
        _thread_ids(threads)


def _thread_ids(threads: int) -> NDArray[np.int64]:
    """Return the system's ids of the OpenMP threads, 0 for a thread that did not take part."""
    ids = np.zeros(threads, np.int64)
    write_thread_ids(launcher(), _NUMBER, ids)
    return ids


def _clock(thread: int) -> int:
    """Return the number by which Linux identifies the CPU-time clock of a thread."""
    return (~thread << 3) | 6


def _advances(clock: int) -> bool:
    try:
        # Between two readings, the clock of a spinning thread advances and the clock of a sleeping
        # thread does not.
        return time.clock_gettime_ns(clock) != time.clock_gettime_ns(clock)
    except OSError:
        _WORKER.threads = 0
        return False


def _count_threads() -> None:
    """Note whether the process that is about to fork has several threads, perhaps torch's."""
    global _had_threads
    tasks = Path("/proc/self/task")
    _had_threads = not tasks.is_dir() or len(list(tasks.iterdir())) > 1


def _forget() -> None:
    """Mark OpenMP as unusable: an OpenMP runtime with threads does not survive a fork.

    A parallel operation of torch would wait forever for threads that exist only in the parent, so
    torch gets one thread, and kernels as well.
    """
    global _forked
    _forked = True
    if _had_threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_threads, after_in_child=_forget)
