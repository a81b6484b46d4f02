"""How a kernel's helper threads find work, and how a kernel that leads them ends: the compiled half of `helpers`.

Leaders and helpers meet on a board of words. A leader takes a job's line, writes down a function and its data, opens
the line to a number of others, wakes as many as sleep and goes to work itself. The function takes its tasks from a
counter, so when it returns to the leader nothing is left to begin: the leader closes the line and waits only for
helpers that are inside. One that comes late finds the line closed, reads nothing and sleeps again.

A helper enters by replacing the line's first word, which says open, with one that counts it; only then does it read
what else is there. So data on the leader's stack outlive every helper that looks at them.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numba import njit, types

from stratarec.kernels.runtime import atomics

LINE = 16
"""Words of a line: two cache lines, since processors fetch them in pairs."""
JOBS, MOST_HELPERS = 8, 255
POSTED, STOPPED, HELPERS, SPINS, ALLOWED = 0, 1, 2, 3, LINE
"""Words of the board: jobs posted so far, whether helpers should end, their number, nanoseconds that one without a job
looks for another before it sleeps, processors they may run on."""
FIRST_JOB = 2 * LINE
FIRST_HELPER = FIRST_JOB + JOBS * LINE
WORDS = FIRST_HELPER + MOST_HELPERS * LINE
STATE, FUNCTION, DATA = 0, 1, 2
"""Words of a job's line, before its bell."""
ASLEEP, THREAD, KEPT_OFF = 0, 1, 2
"""Words of a helper's line, before its bell."""
RING, LISTEN = 8, 9
"""Words of either line: descriptors to write to and to read from. Eight bytes wake one sleeper."""

# The state of a job: helpers inside, how many more may enter, and what else is so.
INSIDE, PLACE, PLACES, OPEN, WAITING, TAKEN = 0xFFFF, 1 << 16, 0xFFFF << 16, 1 << 32, 1 << 33, 1 << 34

SPINS_NS = 2_000_000
"""`SPINS` of a machine for itself: kernels of a step follow one another closely, and waking takes 50 us. Every so often
a helper lets others have the core, torch's threads above all."""
# Waking a halted core takes its caller 45 us and comes 70 us later; an awake helper enters after 0.3.
# How long a leader whose helper lost its core spins before it sleeps, too: then that core's other work can move here.
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
    """Wake the one that listens."""
    word = np.ones(1, np.int64)
    while _write(np.int32(board[line + RING]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**_BODY)
def listen(board, line):
    """Sleep until somebody rings; a signal does not count."""
    word = np.zeros(1, np.int64)
    while _read(np.int32(board[line + LISTEN]), np.int64(word.ctypes.data), 8) != 8:
        pass


@njit(**_BODY)
def now():
    """Nanoseconds of the system's clock."""
    read = np.empty(2, np.int64)
    _clock(np.int32(_CLOCK), np.int64(read.ctypes.data))
    return read[0] * 1_000_000_000 + read[1]


if sys.platform == "linux":
    _cpu = types.ExternalFunction("sched_getcpu", types.int32())
    _allow = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.int64, types.int64))

    @njit(**_BODY)
    def keep_off(board, line):
        """Let a sleeping helper wake on any allowed processor but the caller's.

        The system may well put it there, though others are idle, and it then waits for the very thread that woke it:
        after a pause every other helper came too late to help.
        """
        here = np.int64(_cpu())
        if board[line + KEPT_OFF] == here or not 0 <= here < 64 * _CPU_SET_WORDS:
            return
        allowed = board[ALLOWED : ALLOWED + _CPU_SET_WORDS].copy()
        allowed[here >> 6] &= ~(np.int64(1) << (here & 63))
        board[line + KEPT_OFF] = here
        _allow(np.int32(board[line + THREAD]), 8 * _CPU_SET_WORDS, np.int64(allowed.ctypes.data))

else:

    @njit(**_BODY)
    def keep_off(board, line):
        """Nothing: only Linux can be told."""


@njit(**_BODY)
def wake(board, wanted):
    """Wake up to `wanted` sleeping helpers."""
    for helper in range(board[HELPERS]):
        line = FIRST_HELPER + helper * LINE
        if wanted > 0 and atomics.read(board, line + ASLEEP) and atomics.replace(board, line + ASLEEP, 1, 0):
            keep_off(board, line)
            ring(board, line)
            wanted -= 1


@njit(**_BODY)
def claim(board):
    """The line of a job that nobody leads, now the caller's, or -1."""
    for job in range(FIRST_JOB, FIRST_HELPER, LINE):
        if atomics.read(board, job) == 0 and atomics.replace(board, job, 0, TAKEN):
            return job
    return -1


@njit(**_BODY)
def close(board, job):
    """Let nobody else in, wait for those inside, and give the line back."""
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
    # What is left inside sees the mark when it leaves, and the last one rings.
    if inside and atomics.mark(board, job, WAITING) & INSIDE:
        listen(board, job)
    atomics.write(board, job, 0)


@njit(**_BODY)
def lead(board, threads, function, data):
    """Call ``function(data)`` here and on up to ``threads - 1`` helpers that come before it is done here."""
    job = claim(board)
    if job < 0:
        # Every line is led by another thread of Python: this one works alone.
        atomics.call(function, data)
        return
    # Before the line opens: a helper reads them as soon as it is in.
    board[job + FUNCTION], board[job + DATA] = function, data
    atomics.write(board, job, TAKEN | OPEN | (threads - 1) * PLACE)
    # Counted before sleepers are woken: one that is about to sleep looks at the count once more.
    atomics.add(board, POSTED, 1)
    wake(board, threads - 1)
    atomics.call(function, data)
    close(board, job)


@njit(**_BODY)
def help_with(board, job):
    """Enter a job that is open, do it and leave; whether it was."""
    state = atomics.read(board, job)
    while state & OPEN and state & PLACES:
        if atomics.replace(board, job, state, state + 1 - PLACE):
            atomics.call(board[job + FUNCTION], board[job + DATA])
            state = atomics.add(board, job, -1)
            # The last one out, and its leader sleeps.
            if state & WAITING and state & INSIDE == 1:
                ring(board, job)
            return True
        state = atomics.read(board, job)
    return False


@njit(**_BODY)
def look_out(board, posted):
    """Wait a little for another job than the first `posted`; whether there is one."""
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
    """What a helper does until it is told to stop."""
    while atomics.read(board, STOPPED) == 0:
        posted = atomics.read(board, POSTED)
        helped = False
        for job in range(FIRST_JOB, FIRST_HELPER, LINE):
            helped |= help_with(board, job)
        if helped or look_out(board, posted):
            continue
        atomics.write(board, line + ASLEEP, 1)
        # Again, now that the word says asleep: a job that was posted in between rang for nobody.
        news = atomics.read(board, POSTED) != posted or atomics.read(board, STOPPED)
        # Who clears the word rings as well, so one that could not clear it himself has to listen.
        if not news or not atomics.replace(board, line + ASLEEP, 1, 0):
            listen(board, line)


@njit(**_BODY)
def stop(board):
    """Tell all helpers to end."""
    atomics.write(board, STOPPED, 1)
    wake(board, board[HELPERS])
