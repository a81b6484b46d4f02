"""Numba body of negatives: an even draw of the clicks of other users in a window ahead."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.random.cpu import GOLDEN, mix

# Draws for one negative before the window is gone through click by click.
TRIES = 16


@njit(nogil=True, cache=True)
def _nth_of_others(users, user, order, low, high, state):
    """An even draw of the places whose user is not `user`, found by counting them; -1 where there is none."""
    others = np.uint64(0)
    for place in range(low, high):
        others += np.uint64(users[order[place]] != user)
    if others == np.uint64(0):
        return -1
    wanted = state % others
    for place in range(low, high):
        if users[order[place]] != user:
            if wanted == np.uint64(0):
                return order[place]
            wanted -= np.uint64(1)
    return -1


@njit(nogil=True, cache=True)
def draw(times, users, splits, first, window, key, number, order, edges, drawn):
    """Fill ``drawn[c]`` with places of clicks of [t, t + window] in the split of click ``first + c``, by other users.

    `order` sorts clicks by split and then by time; those of split s take ``order[edges[s]:edges[s + 1]]``.
    """
    clicks, wanted = drawn.shape
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
        for k in range(wanted):
            found = -1
            # As a rule the first draw is by another user; a window of one user alone ends in the count below.
            for _ in range(TRIES):
                state = mix(state + GOLDEN)
                place = order[low[s] + np.int64(state % size)]
                if users[place] != user:
                    found = place
                    break
            if found < 0:
                state = mix(state + GOLDEN)
                found = _nth_of_others(users, user, order, low[s], high[s], state)
            if found < 0:
                break
            drawn[c, k] = found
