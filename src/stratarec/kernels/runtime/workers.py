"""The compiled half of `helpers`: how helper threads find work, and how the kernel that leads them ends.

Leaders and helpers share a board of words. A leader claims a job's line, writes a function and its data to it, opens
the line to a number of helpers, wakes sleeping ones and starts to work itself. The function takes its tasks from a
counter, so no task is left to start when it returns to the leader: the leader closes the line and waits only for
helpers that are inside. A late helper finds the line closed, reads nothing and sleeps again.

A helper enters by replacing the line's first word, which marks it as open, with one that counts the helper; only then
does it read the other words. So data on the leader's stack outlive every helper that reads them.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numba import njit, types

from stratarec.kernels.runtime import atomics

# Words of a line: two cache lines, since processors fetch them in pairs.
LINE = 16
JOBS, MOST_HELPERS = 8, 255
# Words of the board: jobs posted so far, whether helpers should end, their number, nanoseconds for which an idle helper
# looks for a job before it sleeps, processors they may run on.
POSTED, STOPPED, HELPERS, SPINS, ALLOWED = 0, 1, 2, 3, LINE
FIRST_JOB = 2 * LINE
FIRST_HELPER = FIRST_JOB + JOBS * LINE
WORDS = FIRST_HELPER + MOST_HELPERS * LINE
# Words of a job's line.
STATE, FUNCTION, DATA = 0, 1, 2
# Words of a helper's line.
ASLEEP, THREAD, AVOIDED = 0, 1, 2
# Words of either line: descriptors to write to and to read from. Eight bytes wake one sleeper.
RING, LISTEN = 8, 9

# Parts of a job's state: helpers inside, number that may still enter, and flags.
INSIDE, PLACE, PLACES, OPEN, WAITING, TAKEN = 0xFFFF, 1 << 16, 0xFFFF << 16, 1 << 32, 1 << 33, 1 << 34

# `SPINS` by default: kernels of a step follow one another closely, and waking takes 50 us. Spinning helpers regularly
# yield the core to others, mainly to torch's threads.
SPINS_NS = 2_000_000
# Waking a halted core takes the caller 45 us, and the helper comes 70 us later; an awake helper enters after 0.3.
# Time for which a leader whose helper lost its core spins before it sleeps: other work of that core can then move here.
LEADER_SPINS_NS = 300_000
# Pauses, of 10 to 60 ns, between two looks at the clock.
_PAUSES = 64

_BODY = {"nogil": True, "cache": True, "error_model": "numpy"}
_CPU_SET_WORDS = 16

_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_CLOCK = time.CLOCK_MONOTONIC if hasattr(time, "CLOCK_MONOTONIC") else 0
_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_yield = types.ExternalFunction("sched_yield", types.int32())
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


@njit(**_BODY)
def ring(board, line):
    """Wake the thread that listens on a line."""
    word = np.ones(1, np.int64)
    while _write(np.int32(board[line + RING]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**_BODY)
def listen(board, line):
    """Sleep until the line is rung; signals are ignored."""
    word = np.zeros(1, np.int64)
    while _read(np.int32(board[line + LISTEN]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**_BODY)
def now():
    """Return nanoseconds of the system's clock."""
    read = np.empty(2, np.int64)
    _clock(np.int32(_CLOCK), np.int64(read.ctypes.data))
    return read[0] * 1_000_000_000 + read[1]


if sys.platform == "linux":
    _cpu = types.ExternalFunction("sched_getcpu", types.int32())
    _allow = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.int64, types.int64))

    @njit(**_BODY)
    def avoid_core(board, line):
        """Make a sleeping helper wake on any allowed processor except the caller's.

        The system may choose that one although others are idle. The helper then waits for the thread that woke it:
        after a pause every other helper came too late.
        """
        here = np.int64(_cpu())
        if board[line + AVOIDED] == here or not 0 <= here < 64 * _CPU_SET_WORDS:
            return
        allowed = board[ALLOWED : ALLOWED + _CPU_SET_WORDS].copy()
        allowed[here >> 6] &= ~(np.int64(1) << (here & 63))
        board[line + AVOIDED] = here
        _allow(np.int32(board[line + THREAD]), 8 * _CPU_SET_WORDS, np.int64(allowed.ctypes.data))

else:

    @njit(**_BODY)
    def avoid_core(board, line):
        """Do nothing: only Linux allows it."""


@njit(**_BODY)
def wake(board, count):
    """Wake up to `count` sleeping helpers."""
    for helper in range(board[HELPERS]):
        line = FIRST_HELPER + helper * LINE
        if count > 0 and atomics.read(board, line + ASLEEP) and atomics.replace(board, line + ASLEEP, 1, 0):
            avoid_core(board, line)
            ring(board, line)
            count -= 1


@njit(**_BODY)
def claim(board):
    """Claim a free job line for the caller; return it, or -1."""
    for job in range(FIRST_JOB, FIRST_HELPER, LINE):
        if atomics.read(board, job) == 0 and atomics.replace(board, job, 0, TAKEN):
            return job
    return -1


@njit(**_BODY)
def close(board, job):
    """Close a job to further helpers, wait for those inside, and release the line."""
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
    # Helpers inside see the mark when they leave, and the last one rings.
    if inside and atomics.mark(board, job, WAITING) & INSIDE:
        listen(board, job)
    atomics.write(board, job, 0)


@njit(**_BODY)
def lead(board, threads, function, data):
    """Call ``function(data)`` here and on up to ``threads - 1`` helpers that come before it ends here."""
    job = claim(board)
    if job < 0:
        # Other Python threads lead all lines: this one works alone.
        atomics.call(function, data)
        return
    # Before the line opens: a helper reads them as soon as it has entered.
    board[job + FUNCTION], board[job + DATA] = function, data
    atomics.write(board, job, TAKEN | OPEN | (threads - 1) * PLACE)
    # Counted before sleepers are woken: a helper that is about to sleep checks the count once more.
    atomics.add(board, POSTED, 1)
    wake(board, threads - 1)
    atomics.call(function, data)
    close(board, job)


@njit(**_BODY)
def help_with(board, job):
    """Enter a job if it is open, run it and leave; return whether it was open."""
    state = atomics.read(board, job)
    while state & OPEN and state & PLACES:
        if atomics.replace(board, job, state, state + 1 - PLACE):
            atomics.call(board[job + FUNCTION], board[job + DATA])
            state = atomics.add(board, job, -1)
            # The last helper leaves, and the leader sleeps.
            if state & WAITING and state & INSIDE == 1:
                ring(board, job)
            return True
        state = atomics.read(board, job)
    return False


@njit(**_BODY)
def look_out(board, posted):
    """Wait a little for a job after the first `posted`; return whether there is one."""
    until = now() + board[SPINS]
    while now() < until:
        for _ in range(_PAUSES):
            if atomics.read(board, POSTED) != posted:
                return True
            atomics.pause()
        _yield()
    return False


@njit(**_BODY)
def serve(board, line):
    """Run a helper until the board says stop."""
    while atomics.read(board, STOPPED) == 0:
        posted = atomics.read(board, POSTED)
        helped = False
        for job in range(FIRST_JOB, FIRST_HELPER, LINE):
            helped |= help_with(board, job)
        if helped or look_out(board, posted):
            continue
        atomics.write(board, line + ASLEEP, 1)
        # Check again now that the word says asleep: a job posted in between woke no helper.
        news = atomics.read(board, POSTED) != posted or atomics.read(board, STOPPED)
        # Whichever thread clears the word also rings, so a helper that could not clear it has to listen.
        if not news or not atomics.replace(board, line + ASLEEP, 1, 0):
            listen(board, line)


@njit(**_BODY)
def stop(board):
    """Make all helpers end."""
    atomics.write(board, STOPPED, 1)
    wake(board, board[HELPERS])
