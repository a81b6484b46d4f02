"""The compiled half of `helpers`: how helper threads find work, and how the kernel that leads them
ends.

Leaders and helpers share a board of words, which is divided into lines. A leader claims a line for
its job, writes a function and its data to the line, opens the line to a number of helpers, wakes
sleeping helpers and starts to work itself. The function takes tasks from a counter, so when it
returns to the leader, no task is left to start. The leader then closes the line and waits only for
helpers that are inside the function. A late helper finds the line closed, reads nothing and sleeps
again.

The first word of a line says whether it is open and counts the helpers inside. A helper enters by
replacing this word, and only then reads the other words. So data on the leader's stack outlive
every helper that reads them.
"""

from __future__ import annotations

import sys
import time
from functools import cache

import numpy as np
from numba import carray, cfunc, njit, types

from stratarec.kernels.runtime import atomics
from stratarec.kernels.runtime.outline import BODY
from stratarec.kernels.runtime.stack import stack_array

# Number of words of a line: two cache lines, because processors fetch cache lines in pairs.
LINE = 16
JOBS, MOST_HELPERS = 8, 255
# Words of the board: number of jobs so far, whether helpers should end, number of helpers,
# nanoseconds for which an idle helper looks for a job before it sleeps, and the processors that
# helpers may run on.
POSTED = 0
STOPPED = 1
HELPERS = 2
SPINS = 3
ALLOWED = LINE
FIRST_JOB = 2 * LINE
FIRST_HELPER = FIRST_JOB + JOBS * LINE
WORDS = FIRST_HELPER + MOST_HELPERS * LINE
# Words of a job's line.
STATE, FUNCTION, DATA = 0, 1, 2
# Words of a helper's line.
ASLEEP, THREAD, AVOIDED = 0, 1, 2
# Words of either kind of line: descriptors to write to and to read from. Writing eight bytes wakes
# one sleeping thread.
RING, LISTEN = 8, 9

# Parts of a job's state: number of helpers inside, number that may still enter, and flags.
INSIDE = 0xFFFF
PLACE = 1 << 16
PLACES = 0xFFFF << 16
OPEN = 1 << 32
WAITING = 1 << 33
TAKEN = 1 << 34

# Default of `SPINS`: kernels of a step follow one another closely, and waking a thread takes 50 us.
# Spinning helpers regularly yield the core to other threads, mainly torch's.
SPINS_NS = 2_000_000
# Waking a halted core takes the caller 45 us, and the helper enters 70 us later; an awake helper
# enters after 0.3 us. If a helper has lost its core to other work, its leader spins only for this
# time and then sleeps, so that the other work can move to the leader's core.
LEADER_SPINS_NS = 300_000
# Number of pauses, of 10 to 60 ns each, between two looks at the clock.
_PAUSES = 64

_KERNEL = {"nogil": True, "cache": True, "error_model": "numpy"}
_CPU_SET_WORDS = 16

_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_CLOCK = time.CLOCK_MONOTONIC if hasattr(time, "CLOCK_MONOTONIC") else 0
_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_yield = types.ExternalFunction("sched_yield", types.int32())
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


@njit(**BODY)
def ring(board, line):
    """Wake the thread that listens on `line`."""
    word = stack_array(1, np.int64)
    word[0] = 1
    while _write(np.int32(board[line + RING]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**BODY)
def listen(board, line):
    """Sleep until another thread rings `line`; signals are ignored."""
    word = stack_array(1, np.int64)
    while _read(np.int32(board[line + LISTEN]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**BODY)
def now():
    """Return the time of the system's clock in nanoseconds."""
    read = stack_array(2, np.int64)
    _clock(np.int32(_CLOCK), np.int64(read.ctypes.data))
    return read[0] * 1_000_000_000 + read[1]


if sys.platform == "linux":
    _cpu = types.ExternalFunction("sched_getcpu", types.int32())
    _allow = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.int64, types.int64))

    @njit(**BODY)
    def avoid_core(board, line):
        """Make a sleeping helper wake on any allowed processor except the caller's.

        The system may choose the caller's processor although others are idle. The helper then waits
        for the thread that woke it: after a pause, every other helper came too late.
        """
        here = np.int64(_cpu())
        if board[line + AVOIDED] == here or not 0 <= here < 64 * _CPU_SET_WORDS:
            return
        allowed = stack_array(_CPU_SET_WORDS, np.int64)
        for word in range(_CPU_SET_WORDS):
            allowed[word] = board[ALLOWED + word]
        allowed[here >> 6] &= ~(np.int64(1) << (here & 63))
        board[line + AVOIDED] = here
        _allow(np.int32(board[line + THREAD]), 8 * _CPU_SET_WORDS, np.int64(allowed.ctypes.data))

else:

    @njit(**BODY)
    def avoid_core(board, line):
        """Do nothing, because only Linux can move a thread."""


@njit(**BODY)
def wake(board, count):
    """Wake up to `count` sleeping helpers."""
    for helper in range(board[HELPERS]):
        line = FIRST_HELPER + helper * LINE
        if count > 0 and atomics.read(board, line + ASLEEP) and atomics.replace(board, line + ASLEEP, 1, 0):
            avoid_core(board, line)
            ring(board, line)
            count -= 1


@njit(**BODY)
def claim(board):
    """Claim a free job line for the caller; return the line, or -1 if none is free."""
    for job in range(FIRST_JOB, FIRST_HELPER, LINE):
        if atomics.read(board, job) == 0 and atomics.replace(board, job, 0, TAKEN):
            return job
    return -1


@njit(**BODY)
def close(board, job):
    """Close a job to further helpers, wait for the helpers inside, and release the line."""
    inside = atomics.keep(board, job, ~OPEN) & INSIDE
    pauses, until = 0, np.int64(0)
    while inside:
        atomics.pause()
        pauses += 1
        if pauses % _PAUSES == 0:
            until = until if until else now() + min(LEADER_SPINS_NS, board[SPINS])
            if now() > until:
                break
        inside = atomics.read(board, job) & INSIDE
    # Helpers see this mark when they leave, and the last one rings.
    if inside and atomics.mark(board, job, WAITING) & INSIDE:
        listen(board, job)
    atomics.write(board, job, 0)


def lead(function, data, threads, board):
    """Call ``function(data)`` on this thread and on up to ``threads - 1`` helpers that join before
    its call ends.

    `board` is a pointer to the board.
    """
    board = carray(board, WORDS)
    job = claim(board)
    if job < 0:
        # Other Python threads use all lines, so this thread works alone.
        atomics.call(function, data)
        return
    # Written before the line opens, because a helper reads these words as soon as it has entered.
    board[job + FUNCTION], board[job + DATA] = function, data
    atomics.write(board, job, TAKEN | OPEN | (threads - 1) * PLACE)
    # Counted before helpers are woken, because a helper that is about to sleep checks the count
    # once more.
    atomics.add(board, POSTED, 1)
    wake(board, threads - 1)
    atomics.call(function, data)
    close(board, job)


@cache
def leader():
    """Return `lead` as a C function, whose address kernels call."""
    return cfunc(
        types.void(types.int64, types.int64, types.int32, types.CPointer(types.int64)),
        cache=True,
        error_model="numpy",
    )(lead)


@njit(**BODY)
def help_with(board, job):
    """If a job is open, enter it, run it and leave; return whether it was open."""
    state = atomics.read(board, job)
    while state & OPEN and state & PLACES:
        if atomics.replace(board, job, state, state + 1 - PLACE):
            atomics.call(board[job + FUNCTION], board[job + DATA])
            state = atomics.add(board, job, -1)
            # This was the last helper inside, and the leader sleeps.
            if state & WAITING and state & INSIDE == 1:
                ring(board, job)
            return True
        state = atomics.read(board, job)
    return False


@njit(**BODY)
def look_out(board, posted):
    """Wait a little for a job after the first `posted` jobs; return whether there is one."""
    until = now() + board[SPINS]
    while now() < until:
        for _ in range(_PAUSES):
            if atomics.read(board, POSTED) != posted:
                return True
            atomics.pause()
        _yield()
    return False


@njit(**_KERNEL)
def serve(board, line):
    """Run a helper until the board says that helpers should end."""
    while atomics.read(board, STOPPED) == 0:
        posted = atomics.read(board, POSTED)
        helped = False
        for job in range(FIRST_JOB, FIRST_HELPER, LINE):
            helped |= help_with(board, job)
        if helped or look_out(board, posted):
            continue
        atomics.write(board, line + ASLEEP, 1)
        # Check again after the word says asleep, because a job that was posted in between woke no
        # helper.
        news = atomics.read(board, POSTED) != posted or atomics.read(board, STOPPED)
        # The thread that clears the word also rings. So a helper that could not clear the word
        # itself has to listen.
        if not news or not atomics.replace(board, line + ASLEEP, 1, 0):
            listen(board, line)


@njit(**_KERNEL)
def stop(board):
    """Make all helpers end."""
    atomics.write(board, STOPPED, 1)
    wake(board, board[HELPERS])
