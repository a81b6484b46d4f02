"""What a log of clicks says of an item at the moment it is shown: counts over sliding windows, strictly looking back.

Memory holds the clicks of the longer window, 40 bytes each, those of the shorter ones, a table of counts, and when
each item was first clicked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.click_counts import cpu
from stratarec.kernels.click_counts.cpu import Clicks as Clicks

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
    """Counts of a log that is handed over piece by piece.

    Parameters
    ----------
    recent, window, memory : int
        The stretches that are looked back on, from the shortest to the longest, in the unit of the times.
    second : int
        A second in the unit of the times.
    contexts : int
        C, columns that describe the moment of a click.
    """

    def __init__(self, *, recent: int, window: int, memory: int, second: int, contexts: int) -> None:
        self._spans, self._contexts = cpu.LookbackSpans(recent, window, memory, second), contexts
        self._fresh, self._short, self._long = _queue(1), _queue(cpu.SHORT_KEYS + contexts), _queue(cpu.LONG_KEYS)
        self._keys, self._counts = np.zeros(_SMALLEST, np.uint64), np.zeros(_SMALLEST, np.int32)
        self._last = _last_table(_SMALLEST)
        self._first = np.zeros(_SMALLEST, np.uint64), np.zeros(_SMALLEST, np.int64)

    @property
    def reach(self) -> int:
        """How far before a click the clicks lie that its counts follow from, but for items' first clicks: what a click
        within `memory` counts under follows from those within `window` before it, and the other way round."""
        return self._spans.memory + self._spans.window

    def firsts(self) -> tuple[Hashes, NDArray[np.int64]]:
        """Of each item that was clicked its hash, and when that was first."""
        there = np.flatnonzero(self._first[0])
        return self._first[0][there], self._first[1][there]

    def set_firsts(self, items: Hashes, times: NDArray[np.int64]) -> None:
        """Take over what another log knew of items before anything is counted; their hashes are distinct."""
        size = _size(len(items))
        self._first = np.zeros(size, np.uint64), np.zeros(size, np.int64)
        cpu.move_first(items | np.uint64(1), times, *self._first)

    def features(self, clicks: Clicks, shown: Hashes) -> NDArray[np.float32]:
        """Count `clicks`, which are later than all before, and say what was known of the items shown at each.

        Parameters
        ----------
        shown : ndarray
            ``[N, K]`` items; 0 where there is none.

        Returns
        -------
        ndarray
            ``[N, K, 11 + C]`` float32 in the order of `FEATURES`, from clicks strictly before each click: clicks of the
            item within `window` and within `recent`; seconds since its first click (NaN before it); clicks of the item
            within `memory`, by anyone and by the user; moves from the user's previous item to this one and back (a move
            is two clicks of a user in a row, at most `window` apart); clicks of the previous item; clicks of the
            session; seconds since the user's previous click (NaN without one); and within `window` clicks of the item
            at the same place in a session (first, second, later), then in the same context, for each context (NaN where
            that is missing).
        """
        count = len(clicks.times)
        self._make_room(count, int(clicks.times[0]) if count else 0)
        queues = [_extend(queue, clicks.times) for queue in (self._fresh, self._short, self._long)]
        out = np.zeros((*shown.shape, cpu.FIXED + self._contexts), dtype=np.float32)
        tables = cpu.Tables(self._keys, self._counts, *self._last, *self._first)
        gone = cpu.scan(clicks, shown, self._spans, *queues, tables, out)
        self._fresh, self._short, self._long = (_drop(queue, n) for queue, n in zip(queues, gone, strict=True))
        return out

    def _make_room(self, clicks: int, now: int) -> None:
        """Fit the tables to what is alive and what `clicks` more can add, at most half full."""
        # Made anew at every call: keys whose count fell to 0 stay until then, since an emptied slot would cut chains.
        each = cpu.LONG_KEYS + cpu.SHORT_KEYS + 1 + self._contexts
        size = _size(int(np.count_nonzero(self._counts)) + clicks * each)
        keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
        cpu.move_counts(self._keys, self._counts, keys, counts)
        self._keys, self._counts = keys, counts
        oldest = now - self._spans.memory
        last = _last_table(_size(int(np.count_nonzero(self._last[2] >= oldest)) + clicks))
        cpu.move_last(*self._last, oldest, *last)
        self._last = last
        size = _size(int(np.count_nonzero(self._first[0])) + clicks)
        if size > len(self._first[0]):
            first = np.zeros(size, np.uint64), np.zeros(size, np.int64)
            cpu.move_first(*self._first, *first)
            self._first = first


def _queue(width: int) -> cpu.Queue:
    return cpu.Queue(np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.uint64), 0)


def _extend(queue: cpu.Queue, times: NDArray[np.int64]) -> cpu.Queue:
    """With room for more clicks behind those it has."""
    room = np.zeros((len(times), queue.keys.shape[1]), dtype=np.uint64)
    return cpu.Queue(np.concatenate([queue.times, times]), np.concatenate([queue.keys, room]), len(queue.times))


def _drop(queue: cpu.Queue, count: int) -> cpu.Queue:
    """Without its first `count` clicks."""
    return cpu.Queue(queue.times[count:].copy(), queue.keys[count:].copy(), 0)


def _last_table(size: int) -> tuple[Hashes, Hashes, NDArray[np.int64]]:
    """Users, their last items and when; empty."""
    return np.zeros(size, np.uint64), np.zeros(size, np.uint64), np.full(size, np.iinfo(np.int64).min // 2)


def _size(entries: int) -> int:
    return max(_SMALLEST, 1 << int(2 * entries).bit_length())
