"""Numba bodies of sliding counts: an open-addressing table of 64-bit keys, and one pass over a log.

A key of 0 marks an empty slot, so every key has its lowest bit set. Users, sessions, items and contexts come as
well-mixed 64-bit hashes; two things then share a key with a chance of 2^-63.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.cpu import GOLDEN, mix

U = np.uint64
ITEM, USER_ITEM, MOVE, SESSION, STEP, NEAR, FRESH, CONTEXT = (U(n) for n in range(1, 9))
# Keys that a click counts under within `memory`, and within `window` beside one for each context.
LONG_KEYS, SHORT_KEYS = 4, 2
LAST_STEP = 2
# Columns of the features that do not depend on the number of contexts.
FIXED = 11


class Clicks(NamedTuple):
    """N clicks in order of time; everything but times as 64-bit hashes."""

    times: NDArray[np.int64]
    """``[N]``"""
    users: NDArray[np.uint64]
    """``[N]``"""
    sessions: NDArray[np.uint64]
    """``[N]``"""
    items: NDArray[np.uint64]
    """``[N]``"""
    contexts: NDArray[np.uint64]
    """``[N, C]``; 0 where a context is missing."""


class Tables(NamedTuple):
    """Open-addressing tables: counts, users with their last item and when, items with their first click."""

    keys: NDArray[np.uint64]
    counts: NDArray[np.int32]
    last_keys: NDArray[np.uint64]
    last_items: NDArray[np.uint64]
    last_times: NDArray[np.int64]
    first_keys: NDArray[np.uint64]
    first_times: NDArray[np.int64]


class Queue(NamedTuple):
    """Clicks that are still counted, oldest first, their keys, and the place of the first new one."""

    times: NDArray[np.int64]
    keys: NDArray[np.uint64]
    start: int


class LookbackSpans(NamedTuple):
    """How far back is looked, and a second, all in the unit of the times."""

    recent: int
    window: int
    memory: int
    second: int


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
def _expire(queue, low, end, oldest, keys, counts):
    """Take the clicks before `oldest` out of the counts; returns the first click that stays."""
    while low < end and queue.times[low] < oldest:
        for key in queue.keys[low]:
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
def move_first(keys, times, new_keys, new_times):
    """Insert every item into an empty table."""
    for old in range(len(keys)):
        if keys[old] != U(0):
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_times[place] = times[old]


@njit(nogil=True, cache=True)
def scan(clicks, shown, spans, fresh, short, long, tables, out):
    """Count clicks as time passes, and read the counts for what is shown at each click.

    New clicks n take the places ``start + n`` of the queues, whose times are already set. ``out[n, k]`` is filled for
    every ``shown[n, k]`` that is not 0. A context of 0 is missing. Returns how many clicks each queue has let go.
    """
    times, users, sessions, items, contexts = clicks
    keys, counts, last_keys, last_items, last_times, first_keys, first_times = tables
    rounds, width = shown.shape
    fresh_low, short_low, long_low, high = 0, 0, 0, 0
    missing = np.float32(np.nan)
    for n in range(rounds + 1):
        # The last round is there to count the clicks that no later one of this call has counted.
        # Strictly before: a click must not count for what is shown with it.
        while high < rounds and (n == rounds or times[high] < times[n]):
            user, item, now = users[high], items[high], times[high]
            long_low = _expire(long, long_low, long.start + high, now - spans.memory, keys, counts)
            place = _slot(last_keys, user | U(1))
            known = last_keys[place] != U(0) and now - last_times[place] <= spans.window
            last_keys[place] = user | U(1)
            previous = last_items[place]
            last_items[place], last_times[place] = item, now
            place = _slot(first_keys, item | U(1))
            if first_keys[place] == U(0):
                first_keys[place], first_times[place] = item | U(1), now
            row = long.keys[long.start + high]
            row[0] = _pair(ITEM, item, U(0))
            row[1] = _pair(USER_ITEM, user, item)
            row[2] = _pair(MOVE, previous, item) if known else U(0)
            row[3] = _pair(SESSION, sessions[high], U(0))
            step = min(counts[_slot(keys, row[3])], LAST_STEP)
            for k in range(LONG_KEYS):
                if row[k]:
                    _add(keys, counts, row[k])
            near = short.keys[short.start + high]
            near[0] = _pair(STEP, item, U(step))
            near[1] = _pair(NEAR, item, U(0))
            for c in range(contexts.shape[1]):
                context = contexts[high, c]
                near[SHORT_KEYS + c] = _pair(CONTEXT + U(c), item, context) if context else U(0)
            for key in near:
                if key:
                    _add(keys, counts, key)
            fresh.keys[fresh.start + high, 0] = _pair(FRESH, item, U(0))
            _add(keys, counts, fresh.keys[fresh.start + high, 0])
            high += 1
        if n == rounds:
            break
        now = times[n]
        fresh_low = _expire(fresh, fresh_low, fresh.start + high, now - spans.recent, keys, counts)
        short_low = _expire(short, short_low, short.start + high, now - spans.window, keys, counts)
        long_low = _expire(long, long_low, long.start + high, now - spans.memory, keys, counts)
        place = _slot(last_keys, users[n] | U(1))
        known = last_keys[place] != U(0) and now - last_times[place] <= spans.memory
        previous = last_items[place]
        in_session = counts[_slot(keys, _pair(SESSION, sessions[n], U(0)))]
        step = U(min(in_session, LAST_STEP))
        for k in range(width):
            item = shown[n, k]
            if item == U(0):
                continue
            row = out[n, k]
            row[0] = _get(keys, counts, _pair(NEAR, item, U(0)))
            row[1] = _get(keys, counts, _pair(FRESH, item, U(0)))
            born = _slot(first_keys, item | U(1))
            row[2] = (now - first_times[born]) / spans.second if first_keys[born] else missing
            row[3] = _get(keys, counts, _pair(ITEM, item, U(0)))
            row[4] = _get(keys, counts, _pair(USER_ITEM, users[n], item))
            row[5] = _get(keys, counts, _pair(MOVE, previous, item)) if known else np.float32(0)
            row[6] = _get(keys, counts, _pair(MOVE, item, previous)) if known else np.float32(0)
            row[7] = _get(keys, counts, _pair(ITEM, previous, U(0))) if known else np.float32(0)
            row[8] = in_session
            row[9] = (now - last_times[place]) / spans.second if known else missing
            row[10] = _get(keys, counts, _pair(STEP, item, step))
            for c in range(contexts.shape[1]):
                context = contexts[n, c]
                row[FIXED + c] = _get(keys, counts, _pair(CONTEXT + U(c), item, context)) if context else missing
    return fresh_low, short_low, long_low
