"""Numba bodies of sliding counts: an open-addressing table of 64-bit keys, and one pass over a log.

A key of 0 marks an empty slot, so every key has its lowest bit set. Users, sessions, items and contexts come as
well-mixed 64-bit hashes; two things then share a key with a chance of 2^-63.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.random.cpu import GOLDEN, mix

U = np.uint64
ITEM, USER_ITEM, MOVE, SESSION, STEP, CONTEXT = (U(n) for n in range(1, 7))
LONG_KEYS = 4
LAST_STEP = 2
# Columns of the features that do not depend on the number of contexts.
FIXED = 8


@njit(nogil=True, cache=True)
def _pair(kind, one, other):
    return mix(one ^ mix(other + kind * GOLDEN)) | U(1)


@njit(nogil=True, cache=True)
def _slot(keys, key):
    """Where `key` is, or the empty slot where it belongs."""
    mask = U(len(keys) - 1)
    place = (key >> U(1)) & mask
    while keys[place] != U(0) and keys[place] != key:
        place = (place + U(1)) & mask
    return place


@njit(nogil=True, cache=True)
def _add(keys, counts, key):
    place = _slot(keys, key)
    keys[place] = key
    counts[place] += 1


@njit(nogil=True, cache=True)
def _get(keys, counts, key):
    return np.float32(counts[_slot(keys, key)])


@njit(nogil=True, cache=True)
def _expire(times, rows, low, end, oldest, keys, counts):
    """Take the clicks before `oldest` out of the counts; returns the first click that stays."""
    while low < end and times[low] < oldest:
        for key in rows[low]:
            if key:
                counts[_slot(keys, key)] -= 1
        low += 1
    return low


@njit(nogil=True, cache=True)
def move_counts(keys, counts, new_keys, new_counts):
    """Insert the live entries of one table into an empty one."""
    for old in range(len(keys)):
        if keys[old] != U(0) and counts[old]:
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_counts[place] = counts[old]


@njit(nogil=True, cache=True)
def move_last(keys, items, times, oldest, new_keys, new_items, new_times):
    """Insert the users whose last click is not before `oldest` into an empty table."""
    for old in range(len(keys)):
        if keys[old] != U(0) and times[old] >= oldest:
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_items[place] = items[old]
            new_times[place] = times[old]


@njit(nogil=True, cache=True)
def scan(
    times, users, sessions, items, contexts, shown,
    window, memory, unit,
    short_times, short_keys, long_times, long_keys, short_start, long_start,
    keys, counts, last_keys, last_items, last_times,
    out,
):  # fmt: skip
    """Count clicks as time passes, and read the counts for what is shown at each click.

    New clicks n take the places ``short_start + n`` and ``long_start + n`` of the queues, whose times are already set.
    ``out[n, k]`` is filled for every ``shown[n, k]`` that is not 0. Returns how many clicks each queue has let go.
    """
    clicks, width = shown.shape
    short_low, long_low, high = 0, 0, 0
    for n in range(clicks + 1):
        # The last round is there to count the clicks that no later one of this call has counted.
        while high < clicks and (n == clicks or times[high] < times[n]):
            user, item, now = users[high], items[high], times[high]
            long_low = _expire(long_times, long_keys, long_low, long_start + high, now - memory, keys, counts)
            place = _slot(last_keys, user | U(1))
            known = last_keys[place] != U(0) and now - last_times[place] <= window
            last_keys[place] = user | U(1)
            previous = last_items[place]
            last_items[place], last_times[place] = item, now
            row = long_keys[long_start + high]
            row[0] = _pair(ITEM, item, U(0))
            row[1] = _pair(USER_ITEM, user, item)
            row[2] = _pair(MOVE, previous, item) if known else U(0)
            row[3] = _pair(SESSION, sessions[high], U(0))
            step = min(counts[_slot(keys, row[3])], LAST_STEP)
            for k in range(LONG_KEYS):
                if row[k]:
                    _add(keys, counts, row[k])
            near = short_keys[short_start + high]
            near[0] = _pair(STEP, item, U(step))
            _add(keys, counts, near[0])
            for c in range(contexts.shape[1]):
                near[c + 1] = _pair(CONTEXT + U(c), item, contexts[high, c])
                _add(keys, counts, near[c + 1])
            high += 1
        if n == clicks:
            break
        now = times[n]
        short_low = _expire(short_times, short_keys, short_low, short_start + high, now - window, keys, counts)
        long_low = _expire(long_times, long_keys, long_low, long_start + high, now - memory, keys, counts)
        place = _slot(last_keys, users[n] | U(1))
        known = last_keys[place] != U(0) and now - last_times[place] <= memory
        previous = last_items[place]
        in_session = counts[_slot(keys, _pair(SESSION, sessions[n], U(0)))]
        step = U(min(in_session, LAST_STEP))
        for k in range(width):
            item = shown[n, k]
            if item == U(0):
                continue
            row = out[n, k]
            row[0] = _get(keys, counts, _pair(ITEM, item, U(0)))
            row[1] = _get(keys, counts, _pair(USER_ITEM, users[n], item))
            row[2] = _get(keys, counts, _pair(MOVE, previous, item)) if known else np.float32(0)
            row[3] = _get(keys, counts, _pair(MOVE, item, previous)) if known else np.float32(0)
            row[4] = _get(keys, counts, _pair(ITEM, previous, U(0))) if known else np.float32(0)
            row[5] = in_session
            row[6] = (now - last_times[place]) / unit if known else np.float32(np.nan)
            row[7] = _get(keys, counts, _pair(STEP, item, step))
            for c in range(contexts.shape[1]):
                row[FIXED + c] = _get(keys, counts, _pair(CONTEXT + U(c), item, contexts[n, c]))
    return short_low, long_low
