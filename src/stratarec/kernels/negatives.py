"""Draw negatives for logs that hold only clicks: items that other users clicked next."""

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
    """Draw for each click `count` clicks of other users that follow it in the same split, evenly and with replacement.

    Parameters
    ----------
    times : ndarray
        ``[N]`` rising times; they must cover the window of each of `clicks`.
    users : ndarray
        ``[N]`` hashes of users.
    splits : ndarray
        ``[N]`` number of the split that each click belongs to.
    clicks : pair of int
        First and last (exclusive) of the clicks to draw for; later clicks can only be drawn.
    window : int
        Length of the window ``[t, t + window]`` after a click at t, in the unit of `times`.
    count : int
        K.
    key, number : int
        The noise of click c is a function of (key, number + c - first).

    Returns
    -------
    ndarray
        ``[last - first, K]`` places in `times`; a row of -1 for a click that no other user's click follows.
    """
    first, last = clicks
    order = np.argsort(splits, kind="stable")
    edges = np.searchsorted(splits[order], np.arange(int(splits.max(initial=0)) + 2))
    drawn = np.full((last - first, count), -1, dtype=np.int64)
    _draw(times, users, splits, first, window, np.uint64(key), number, order, edges, drawn)
    return drawn


# Draws for one negative before the window is searched click by click.
TRIES = 16


@njit(nogil=True, cache=True)
def _nth_of_others(users, user, order, low, high, state):
    """Draw evenly among the places whose user is not `user`, by counting them; -1 where there is none."""
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
    """Fill ``drawn[c]`` with places of clicks of [t, t + window] in the split of click ``first + c``, by other users.

    `order` sorts clicks by split and then by time; those of split s take ``order[edges[s]:edges[s + 1]]``.
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
            # The first draw is usually by another user; a window with a single user ends in the count below.
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
    """List the clicks of ``[t, t + window]`` by other users in the split of click number `click`."""
    inside = (times >= times[click]) & (times <= times[click] + window)
    return np.flatnonzero(inside & (users != users[click]) & (splits == splits[click])).tolist()
