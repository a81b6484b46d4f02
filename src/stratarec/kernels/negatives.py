"""Draw negatives for logs of clicks alone: items that other users clicked next."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.random.cpu import GOLDEN, mix


def draw_negatives(
    times: NDArray[np.int64],
    users: NDArray[np.uint64],
    splits: NDArray[np.int8],
    *,
    clicks: tuple[int, int],
    window: int,
    count: int,
    key: int,
    number: int,
) -> NDArray[np.int64]:
    """Draw for each click `count` clicks of other users that follow it in the same split, evenly
    and with replacement.

    Parameters
    ----------
    times : ndarray
        ``[N]`` rising times; they must cover the window of each of `clicks`.
    users : ndarray
        ``[N]`` hashes of users.
    splits : ndarray
        ``[N]`` number of each click's split.
    clicks : pair of int
        First and last (exclusive) click to draw for; clicks after them can only be drawn.
    window : int
        Clicks in ``[t, t + window]`` can be drawn for a click at time t; in the unit of `times`.
    count : int
        K.
    key, number : int
        Draws for click c are a function of (key, number + c - first).

    Returns
    -------
    ndarray
        ``[last - first, K]`` indices of clicks; a row of -1 if no other user clicks in the window.
    """
    first, last = clicks
    order = np.argsort(splits, kind="stable")
    edges = np.searchsorted(splits[order], np.arange(int(splits.max(initial=0)) + 2))
    drawn = np.full((last - first, count), -1, dtype=np.int64)
    _draw(times, users, splits, first, window, np.uint64(key), number, order, edges, drawn)
    return drawn


# Number of draws for one negative before the clicks of other users are counted.
TRIES = 16


@njit(nogil=True, cache=True)
def _nth_of_others(users, user, order, low, high, state):
    """Draw evenly among the clicks of users other than `user`, by counting these clicks; return -1
    if there is none.
    """
    others = np.uint64(0)
    for place in range(low, high):
        others += np.uint64(users[order[place]] != user)
    if others == np.uint64(0):
        return -1
    skipped = state % others
    for place in range(low, high):
        if users[order[place]] != user:
            if skipped == np.uint64(0):
                return order[place]
            skipped -= np.uint64(1)
    return -1


@njit(nogil=True, cache=True)
def _draw(times, users, splits, first, window, key, number, order, edges, drawn):
    """Fill ``drawn[c]`` with clicks of other users within the window and split of click ``first +
    c``.

    `order` sorts clicks by split and then by time; the clicks of split s are
    ``order[edges[s]:edges[s + 1]]``.
    """
    clicks, count = drawn.shape
    low, high = edges[:-1].copy(), edges[:-1].copy()
    for c in range(clicks):
        click = first + c
        s, user, now = splits[click], users[click], times[click]
        while low[s] < edges[s + 1] and times[order[low[s]]] < now:
            low[s] += 1
        while high[s] < edges[s + 1] and times[order[high[s]]] <= now + window:
            high[s] += 1
        size = np.uint64(high[s] - low[s])
        state = mix(key ^ mix(np.uint64(number + c)))
        for k in range(count):
            negative = -1
            # The first draw is usually by another user. If the window has a single user, the count
            # below ends the search.
            for _ in range(TRIES):
                state = mix(state + GOLDEN)
                place = order[low[s] + np.int64(state % size)]
                if users[place] != user:
                    negative = place
                    break
            if negative < 0:
                state = mix(state + GOLDEN)
                negative = _nth_of_others(users, user, order, low[s], high[s], state)
            if negative < 0:
                break
            drawn[c, k] = negative


def reference_candidates(
    times: NDArray[np.int64], users: NDArray[np.uint64], splits: NDArray[np.int8], click: int, window: int
) -> list[int]:
    """Return the clicks in ``[t, t + window]`` by other users in the split of click number `click`,
    whose time is t.
    """
    inside = (times >= times[click]) & (times <= times[click] + window)
    return np.flatnonzero(inside & (users != users[click]) & (splits == splits[click])).tolist()
