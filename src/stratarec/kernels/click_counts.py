"""Features of an item that is shown at a click: counts of earlier clicks in sliding windows.

In memory are: the clicks of the longest window (40 bytes each), the clicks of the shorter windows,
a table of counts, and the time of each item's first click. Counts are in open-addressing tables of
64-bit keys. The key 0 marks an empty slot, so the lowest bit of every key is set. Users, sessions,
items and contexts are well-mixed 64-bit hashes; two of them share a key with a probability of
2^-63.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.cpu import GOLDEN, mix

Hashes = NDArray[np.uint64]
FEATURES = (
    "popularity",
    "recent_popularity",
    "item_age",
    "long_popularity",
    "user_clicks",
    "moves",
    "moves_back",
    "previous_popularity",
    "session_clicks",
    "idle",
    "step_popularity",
)
_SMALLEST = 1 << 12


class Lookback:
    """Sliding-window counts over a log of clicks, which is passed piece by piece.

    Parameters
    ----------
    recent, window, memory : int
        Lengths of the windows, from the shortest to the longest, in the unit of the times.
    second : int
        Length of a second in the unit of the times.
    contexts : int
        C, number of columns that describe the context of a click.
    """

    def __init__(self, *, recent: int, window: int, memory: int, second: int, contexts: int) -> None:
        self._spans = LookbackSpans(recent, window, memory, second)
        self._contexts = contexts
        self._fresh = _queue(1)
        self._short = _queue(SHORT_KEYS + contexts)
        self._long = _queue(LONG_KEYS)
        self._keys = np.zeros(_SMALLEST, np.uint64)
        self._counts = np.zeros(_SMALLEST, np.int32)
        # At least the number of keys in the table, including those with a count of 0.
        self._most_keys = 0
        self._last = _last_table(_SMALLEST)
        self._first = np.zeros(_SMALLEST, np.uint64), np.zeros(_SMALLEST, np.int64)

    @property
    def reach(self) -> int:
        """Maximum age of the clicks that affect a click's counts, `memory` + `window`, in the unit
        of the times.

        Counted clicks are at most `memory` earlier. How a click is counted, such as a move from the
        user's previous item, depends on clicks up to `window` before it. The first click of an item
        has an effect at any age.
        """
        return self._spans.memory + self._spans.window

    def firsts(self) -> tuple[Hashes, NDArray[np.int64]]:
        """Return the hash of each clicked item and the time of the item's first click."""
        used = np.flatnonzero(self._first[0])
        return self._first[0][used], self._first[1][used]

    def set_firsts(self, items: Hashes, times: NDArray[np.int64]) -> None:
        """Set the first clicks of items from another log. Nothing may be counted yet.

        Parameters
        ----------
        items : ndarray
            ``[n]`` uint64 distinct hashes of items.
        times : ndarray
            ``[n]`` int64 time of the first click of each item.
        """
        size = _size(len(items))
        self._first = np.zeros(size, np.uint64), np.zeros(size, np.int64)
        _move_first(items | np.uint64(1), times, *self._first)

    def features(self, clicks: Clicks, shown: Hashes) -> NDArray[np.float32]:
        """Count `clicks`, which follow all earlier calls' clicks; return the features of the items
        shown at each click.

        Parameters
        ----------
        clicks : Clicks
            N clicks, in order of time.
        shown : ndarray
            ``[N, K]`` hashes of items; 0 where no item is shown.

        Returns
        -------
        ndarray
            ``[N, K, 11 + C]`` float32 in the order of `FEATURES`, computed from clicks strictly
            before each click:

            - clicks of the item within `window` and within `recent`
            - seconds since the item's first click (NaN if there is none)
            - clicks of the item within `memory`, by anyone and by the user
            - moves from the user's previous item to this item, and moves back (a move is two
              consecutive clicks of a user, at most `window` apart)
            - clicks of the user's previous item
            - clicks of the session
            - seconds since the user's previous click (NaN if there is none within `memory`)
            - clicks of the item within `window` at the same place in a session (first, second,
              later)
            - for each context, clicks of the item within `window` in the same context (NaN if the
              context is missing)
        """
        count = len(clicks.times)
        self._make_room(count, int(clicks.times[0]) if count else 0)
        queues = [_extend(queue, clicks.times) for queue in (self._fresh, self._short, self._long)]
        out = np.zeros((*shown.shape, FIXED + self._contexts), dtype=np.float32)
        tables = Tables(self._keys, self._counts, *self._last, *self._first)
        expired = _scan(clicks, shown, self._spans, *queues, tables, out)
        self._fresh, self._short, self._long = (
            _drop(queue, n) for queue, n in zip(queues, expired, strict=True)
        )
        return out

    def _make_room(self, clicks: int, now: int) -> None:
        """Resize the tables so that they are at most half full after `clicks` more clicks."""
        entries = clicks * (LONG_KEYS + SHORT_KEYS + 1 + self._contexts)
        # Keys with a count of 0 stay until the table is rebuilt, because emptying their slots would
        # break the chains.
        if 2 * (self._most_keys + entries) > len(self._keys):
            self._most_keys = int(np.count_nonzero(self._counts))
            # With room for half as many keys again, a call moves a constant number of keys per
            # click on average.
            size = _size(self._most_keys * 3 // 2 + entries)
            keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
            _move_counts(self._keys, self._counts, keys, counts)
            self._keys = keys
            self._counts = counts
        self._most_keys += entries
        oldest = now - self._spans.memory
        last = _last_table(_size(int(np.count_nonzero(self._last[2] >= oldest)) + clicks))
        _move_last(*self._last, oldest, *last)
        self._last = last
        size = _size(int(np.count_nonzero(self._first[0])) + clicks)
        if size > len(self._first[0]):
            first = np.zeros(size, np.uint64), np.zeros(size, np.int64)
            _move_first(*self._first, *first)
            self._first = first


def _queue(width: int) -> Queue:
    return Queue(np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.uint64), 0)


def _extend(queue: Queue, times: NDArray[np.int64]) -> Queue:
    """Return a copy of the queue with room for clicks at `times` at its end."""
    room = np.zeros((len(times), queue.keys.shape[1]), dtype=np.uint64)
    return Queue(np.concatenate([queue.times, times]), np.concatenate([queue.keys, room]), len(queue.times))


def _drop(queue: Queue, count: int) -> Queue:
    """Return a queue without its first `count` clicks."""
    return Queue(queue.times[count:].copy(), queue.keys[count:].copy(), 0)


def _last_table(size: int) -> tuple[Hashes, Hashes, NDArray[np.int64]]:
    """Return an empty table of users, with the item and the time of each user's last click."""
    return np.zeros(size, np.uint64), np.zeros(size, np.uint64), np.full(size, np.iinfo(np.int64).min // 2)


def _size(entries: int) -> int:
    return max(_SMALLEST, 1 << int(2 * entries).bit_length())


U = np.uint64
ITEM, USER_ITEM, MOVE, SESSION, STEP, NEAR, FRESH, CONTEXT = (U(n) for n in range(1, 9))
# Number of keys that a click adds to the counts of `memory`, and to the counts of `window`. The
# counts of `window` also get one key per context.
LONG_KEYS, SHORT_KEYS = 4, 2
LAST_STEP = 2
# Feature columns that do not depend on the number of contexts.
FIXED = 11


class Clicks(NamedTuple):
    """N clicks by time: ``[N]`` times and hashes, ``[N, C]`` hashes of contexts (0: missing)."""

    times: NDArray[np.int64]
    users: NDArray[np.uint64]
    sessions: NDArray[np.uint64]
    items: NDArray[np.uint64]
    contexts: NDArray[np.uint64]


class Tables(NamedTuple):
    """Open-addressing tables: counts; users with item and time of the last click; items with time
    of first click.
    """

    keys: NDArray[np.uint64]
    counts: NDArray[np.int32]
    last_keys: NDArray[np.uint64]
    last_items: NDArray[np.uint64]
    last_times: NDArray[np.int64]
    first_keys: NDArray[np.uint64]
    first_times: NDArray[np.int64]


class Queue(NamedTuple):
    """Clicks that are still counted, oldest first: their times, their keys, and the position of the
    first new click.
    """

    times: NDArray[np.int64]
    keys: NDArray[np.uint64]
    start: int


class LookbackSpans(NamedTuple):
    """Lengths of the windows and of a second, in the unit of the times."""

    recent: int
    window: int
    memory: int
    second: int


@njit(nogil=True, cache=True)
def _pair(kind, one, other):
    return mix(one ^ mix(other + kind * GOLDEN)) | U(1)


@njit(nogil=True, cache=True)
def _slot(keys, key):
    """Return the slot of `key`; if the key is not in the table, the empty slot for it."""
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
    """Subtract clicks before `oldest` from counts; return the first position that remains."""
    while low < end and queue.times[low] < oldest:
        for key in queue.keys[low]:
            if key:
                counts[_slot(keys, key)] -= 1
        low += 1
    return low


@njit(nogil=True, cache=True)
def _move_counts(keys, counts, new_keys, new_counts):
    """Insert the keys with a count above 0 into an empty table."""
    for old in range(len(keys)):
        if keys[old] != U(0) and counts[old]:
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_counts[place] = counts[old]


@njit(nogil=True, cache=True)
def _move_last(keys, items, times, oldest, new_keys, new_items, new_times):
    """Insert the users whose last click is not before `oldest` into an empty table."""
    for old in range(len(keys)):
        if keys[old] != U(0) and times[old] >= oldest:
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_items[place] = items[old]
            new_times[place] = times[old]


@njit(nogil=True, cache=True)
def _move_first(keys, times, new_keys, new_times):
    """Insert every item into an empty table."""
    for old in range(len(keys)):
        if keys[old] != U(0):
            place = _slot(new_keys, keys[old])
            new_keys[place] = keys[old]
            new_times[place] = times[old]


@njit(nogil=True, cache=True)
def _scan(clicks, shown, spans, fresh, short, long, tables, out):
    """Count clicks in order of time, and read the counts of the items shown at each click.

    New click n takes position ``start + n`` of each queue, whose times are already set. ``out[n,
    k]`` is filled wherever ``shown[n, k]`` is not 0. A context of 0 is missing. Returns the number
    of expired clicks of each queue.
    """
    times, users, sessions, items, contexts = clicks
    keys, counts, last_keys, last_items, last_times, first_keys, first_times = tables
    rounds, width = shown.shape
    fresh_low = 0
    short_low = 0
    long_low = 0
    high = 0
    missing = np.float32(np.nan)
    for n in range(rounds + 1):
        # Before click n is read, all clicks with an earlier time are counted, so a click does not
        # count for the items shown with it. The last round only counts the remaining clicks.
        while high < rounds and (n == rounds or times[high] < times[n]):
            user, item, now = users[high], items[high], times[high]
            long_low = _expire(long, long_low, long.start + high, now - spans.memory, keys, counts)
            place = _slot(last_keys, user | U(1))
            recent = last_keys[place] != U(0) and now - last_times[place] <= spans.window
            last_keys[place] = user | U(1)
            previous = last_items[place]
            last_items[place], last_times[place] = item, now
            place = _slot(first_keys, item | U(1))
            if first_keys[place] == U(0):
                first_keys[place], first_times[place] = item | U(1), now
            row = long.keys[long.start + high]
            row[0] = _pair(ITEM, item, U(0))
            row[1] = _pair(USER_ITEM, user, item)
            row[2] = _pair(MOVE, previous, item) if recent else U(0)
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
        recent = last_keys[place] != U(0) and now - last_times[place] <= spans.memory
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
            row[5] = _get(keys, counts, _pair(MOVE, previous, item)) if recent else np.float32(0)
            row[6] = _get(keys, counts, _pair(MOVE, item, previous)) if recent else np.float32(0)
            row[7] = _get(keys, counts, _pair(ITEM, previous, U(0))) if recent else np.float32(0)
            row[8] = in_session
            row[9] = (now - last_times[place]) / spans.second if recent else missing
            row[10] = _get(keys, counts, _pair(STEP, item, step))
            for c in range(contexts.shape[1]):
                context = contexts[n, c]
                row[FIXED + c] = (
                    _get(keys, counts, _pair(CONTEXT + U(c), item, context)) if context else missing
                )
    return fresh_low, short_low, long_low


@dataclass(frozen=True, kw_only=True)
class Click:
    """A click of a log; a context of 0 is missing."""

    time: int
    user: int
    session: int
    item: int
    contexts: tuple[int, ...]


def reference_features(
    log: Sequence[Click], at: Click, item: int, *, recent: int, window: int, memory: int, second: int
) -> list[float]:
    """Compute the features of `item` when it is shown at the click `at`, from all clicks of `log`,
    in order of time.
    """
    past = [click for click in log if click.time < at.time]
    fresh = [click for click in past if click.time >= at.time - recent]
    born = next((click.time for click in past if click.item == item), None)
    near = [click for click in past if click.time >= at.time - window]
    far = [click for click in past if click.time >= at.time - memory]
    moves = [
        (before.item, click.item)
        for click in far
        if (before := _previous(log, click)) is not None and click.time - before.time <= window
    ]
    last = next((click for click in reversed(far) if click.user == at.user), None)
    session = sum(click.session == at.session for click in far)
    return [
        sum(click.item == item for click in near),
        sum(click.item == item for click in fresh),
        math.nan if born is None else (at.time - born) / second,
        sum(click.item == item for click in far),
        sum(click.item == item and click.user == at.user for click in far),
        0 if last is None else moves.count((last.item, item)),
        0 if last is None else moves.count((item, last.item)),
        0 if last is None else sum(click.item == last.item for click in far),
        session,
        math.nan if last is None else (at.time - last.time) / second,
        sum(click.item == item and _step(log, click, memory) == min(session, 2) for click in near),
        *(
            sum(click.item == item and click.contexts[c] == value for click in near) if value else math.nan
            for c, value in enumerate(at.contexts)
        ),
    ]


def _previous(log: Sequence[Click], click: Click) -> Click | None:
    """Return the user's previous click in the log."""
    place = next(place for place, other in enumerate(log) if other is click)
    return next((other for other in reversed(log[:place]) if other.user == click.user), None)


def _step(log: Sequence[Click], click: Click, memory: int) -> int:
    """Return the number of earlier clicks of the click's session in the log, at most 2."""
    place = next(place for place, other in enumerate(log) if other is click)
    earlier = [other for other in log[:place] if other.session == click.session]
    return min(sum(other.time >= click.time - memory for other in earlier), 2)
