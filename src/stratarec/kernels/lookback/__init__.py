"""What a log of clicks says of an item at the moment it is shown: counts over sliding windows, strictly looking back.

Memory holds the clicks of the longer window, 40 bytes each, those of the shorter one, and a table of counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.lookback import cpu

Hashes = NDArray[np.uint64]
FEATURES = (
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


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """N clicks in order of time; everything but times as 64-bit hashes."""

    times: NDArray[np.int64]
    """``[N]``"""
    users: Hashes
    """``[N]``"""
    sessions: Hashes
    """``[N]``"""
    items: Hashes
    """``[N]``"""
    contexts: Hashes
    """``[N, C]``"""


class Lookback:
    """Counts of a log that is handed over piece by piece.

    Parameters
    ----------
    window, memory : int
        The shorter and the longer stretch that is looked back on, in the unit of the times.
    unit : int
        A second in the unit of the times.
    contexts : int
        C, columns that describe the moment of a click.
    """

    def __init__(self, *, window: int, memory: int, unit: int, contexts: int) -> None:
        self._window, self._memory, self._unit, self._contexts = window, memory, unit, contexts
        self._short = _Queue(contexts + 1)
        self._long = _Queue(cpu.LONG_KEYS)
        self._keys, self._counts = np.zeros(_SMALLEST, np.uint64), np.zeros(_SMALLEST, np.int32)
        self._last = _last_table(_SMALLEST)

    def features(self, clicks: Clicks, shown: Hashes) -> NDArray[np.float32]:
        """Count `clicks`, which are later than all before, and say what was known of the items shown at each.

        Parameters
        ----------
        shown : ndarray
            ``[N, K]`` items; 0 where there is none.

        Returns
        -------
        ndarray
            ``[N, K, 8 + C]`` float32 from clicks strictly before each click: clicks of the item within `memory`, by
            anyone and by the user; moves from the user's previous item to this one and back (a move is two clicks of a
            user in a row, at most `window` apart); clicks of the previous item; clicks of the session; seconds since
            the user's previous click (NaN without one); and within `window` clicks of the item at the same place in a
            session (first, second, later), then in the same context, for each context.
        """
        count = len(clicks.times)
        self._make_room(count, int(clicks.times[0]) if count else 0)
        short, long = self._short.extend(clicks.times), self._long.extend(clicks.times)
        out = np.zeros((*shown.shape, cpu.FIXED + self._contexts), dtype=np.float32)
        gone = cpu.scan(
            clicks.times, clicks.users, clicks.sessions, clicks.items, clicks.contexts, shown,
            self._window, self._memory, self._unit,
            self._short.times, self._short.keys, self._long.times, self._long.keys, short, long,
            self._keys, self._counts, *self._last,
            out,
        )  # fmt: skip
        self._short.drop(gone[0])
        self._long.drop(gone[1])
        return out

    def _make_room(self, clicks: int, now: int) -> None:
        """Fit the tables to what is alive and what `clicks` more can add, at most half full."""
        size = _size(int(np.count_nonzero(self._counts)) + clicks * (cpu.LONG_KEYS + 1 + self._contexts))
        keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int32)
        cpu.move_counts(self._keys, self._counts, keys, counts)
        self._keys, self._counts = keys, counts
        oldest = now - self._memory
        last = _last_table(_size(int(np.count_nonzero(self._last[2] >= oldest)) + clicks))
        cpu.move_last(*self._last, oldest, *last)
        self._last = last


class _Queue:
    """Clicks that are still counted, oldest first, and the keys under which they are."""

    def __init__(self, width: int) -> None:
        self.times: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.keys: Hashes = np.zeros((0, width), dtype=np.uint64)

    def extend(self, times: NDArray[np.int64]) -> int:
        """Make room for more clicks; returns the place of the first."""
        start = len(self.times)
        self.times = np.concatenate([self.times, times])
        self.keys = np.concatenate([self.keys, np.zeros((len(times), self.keys.shape[1]), dtype=np.uint64)])
        return start

    def drop(self, count: int) -> None:
        self.times, self.keys = self.times[count:].copy(), self.keys[count:].copy()


def _last_table(size: int) -> tuple[Hashes, Hashes, NDArray[np.int64]]:
    """Users, their last items and when; empty."""
    return np.zeros(size, np.uint64), np.zeros(size, np.uint64), np.full(size, np.iinfo(np.int64).min // 2)


def _size(entries: int) -> int:
    return max(_SMALLEST, 1 << int(2 * entries).bit_length())
