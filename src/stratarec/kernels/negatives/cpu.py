"""Numba body of popularity-weighted negatives."""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.random.cpu import mix

TRIES = 16


@njit(nogil=True, cache=True)
def draw(times, items, first, window, recent, wanted, key, number, popularity, fresh_popularity, negatives, counts):
    """For clicks first, first + 1, ...: `wanted` items from the clicks of [t - window, t), and how popular each was.

    `times` rises. ``negatives[c]`` is padded with -1. ``counts[c, :, 0]`` holds the clicks in the window of the clicked
    item and of each negative, ``counts[c, :, 1]`` those in its last stretch, [t - recent, t). `popularity` and
    `fresh_popularity` are scratch, one zero an item.
    """
    low, middle, high = 0, 0, 0
    for i in range(first, len(times)):
        while times[high] < times[i]:
            popularity[items[high]] += 1
            fresh_popularity[items[high]] += 1
            high += 1
        while low < high and times[low] < times[i] - window:
            popularity[items[low]] -= 1
            low += 1
        while middle < high and times[middle] < times[i] - recent:
            fresh_popularity[items[middle]] -= 1
            middle += 1
        c = i - first
        counts[c, 0, 0] = popularity[items[i]]
        counts[c, 0, 1] = fresh_popularity[items[i]]
        found = 0
        state = mix(key ^ mix(np.uint64(number + c)))
        if high > low:
            for _ in range(TRIES * wanted):
                if found == wanted:
                    break
                state = mix(state + np.uint64(0x9E3779B97F4A7C15))
                item = items[low + np.int64(state % np.uint64(high - low))]
                fresh = item != items[i]
                for k in range(found):
                    fresh = fresh and negatives[c, k] != item
                if fresh:
                    negatives[c, found] = item
                    counts[c, found + 1, 0] = popularity[item]
                    counts[c, found + 1, 1] = fresh_popularity[item]
                    found += 1
