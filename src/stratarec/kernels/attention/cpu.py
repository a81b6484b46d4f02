"""Numba bodies over (sample, event) pairs: combine both sides of every pair, and sum pairs to either side.

Every output row belongs to one thread and sums over pairs in ascending order, so the bits do not depend on the number
of threads.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import add, broadcast, load, multiply, store, total

U = np.uint64
# What a sum over pairs adds: the pair's own row; its product with the other side's row; that row times one number.
PLAIN, PRODUCT, SCALED = 0, 1, 2


class PairRows(NamedTuple):
    """`attention.Pairs`, floats of a row, and how many samples (or events) a member takes at a time."""

    first: NDArray[np.int64]
    offsets: NDArray[np.int64]
    width: int
    tile: int


@njit(**BODY)
def combine(member, lanes, whole, counter, pairs, times, samples, events, out):
    """out[p] = samples[b] + events[e], or their product."""
    literally(lanes)
    D, first, offsets, tile = U(lanes if whole else pairs.width), pairs.first, pairs.offsets, pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            source = U(first[b]) * D
            for target in range(U(offsets[b]) * D, U(offsets[b + 1]) * D, D):
                for block in range(U(0), D, U(lanes)):
                    one, other = load(samples, U(b) * D + block, lanes), load(events, source + block, lanes)
                    store(out, target + block, multiply(one, other) if times else add(one, other))
                source += D


@njit(**BODY)
def term_of(lanes, term, left, p, right, place, D):
    """One block of what pair p adds; `place` is where the other side's block lies, `p` where the pair's own does."""
    literally(lanes)
    if term == PLAIN:
        return load(left, p, lanes)
    row = load(right, place, lanes)
    if term == PRODUCT:
        return multiply(load(left, p, lanes), row)
    return multiply(broadcast(left[p // D], lanes), row)


@njit(**BODY)
def sum_to_samples(member, lanes, whole, counter, pairs, term, left, events, out):
    """out[b] = sum of the terms of its pairs."""
    literally(lanes)
    D, first, offsets, tile = U(lanes if whole else pairs.width), pairs.first, pairs.offsets, pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            for block in range(U(0), D, U(lanes)):
                found = broadcast(np.float32(0.0), lanes)
                source = U(first[b]) * D + block
                for p in range(U(offsets[b]) * D + block, U(offsets[b + 1]) * D + block, D):
                    found = add(found, term_of(lanes, term, left, p, events, source, D))
                    source += D
                store(out, U(b) * D + block, found)


@njit(**BODY)
def sum_to_events(member, lanes, whole, counter, pairs, term, left, samples, out):
    """out[e] = sum of the terms of its pairs: a tile of events at a time, over all samples whose pairs reach it."""
    literally(lanes)
    D, first, offsets, tile = U(lanes if whole else pairs.width), pairs.first, pairs.offsets, pairs.tile
    events = len(out) // pairs.width
    while True:
        low = take(counter) * tile
        if low >= events:
            break
        high = min(low + tile, events)
        for place in range(U(low) * D, U(high) * D, U(lanes)):
            store(out, place, broadcast(np.float32(0.0), lanes))
        for b in range(len(first)):
            begin, end = max(first[b], low), min(first[b] + offsets[b + 1] - offsets[b], high)
            if begin >= end:
                continue
            p = U(offsets[b] + begin - first[b]) * D
            for target in range(U(begin) * D, U(end) * D, D):
                for block in range(U(0), D, U(lanes)):
                    part = term_of(lanes, term, left, p + block, samples, U(b) * D + block, D)
                    store(out, target + block, add(load(out, target + block, lanes), part))
                p += D


@njit(**BODY)
def dots(member, lanes, whole, counter, pairs, samples, events, out):
    """out[p] = samples[b] . events[e]."""
    literally(lanes)
    D, first, offsets, tile = U(lanes if whole else pairs.width), pairs.first, pairs.offsets, pairs.tile
    while True:
        begin = take(counter) * tile
        if begin >= len(first):
            break
        for b in range(begin, min(begin + tile, len(first))):
            source = U(first[b]) * D
            for p in range(U(offsets[b]), U(offsets[b + 1])):
                product = np.float32(0.0)
                for block in range(U(0), D, U(lanes)):
                    one, other = load(samples, U(b) * D + block, lanes), load(events, source + block, lanes)
                    product += total(multiply(one, other))
                out[p] = product
                source += D


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """The passes for rows in blocks of `lanes`, compiled at their first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_combine(team, pairs, times, samples, events, out):
        given = (lanes, whole, np.zeros(1, np.int64), PairRows(*pairs), times, samples, events, out)
        run_team(team, combine, given)

    @njit(nogil=True, cache=True)
    def run_sum_to_samples(team, pairs, term, left, events, out):
        given = (lanes, whole, np.zeros(1, np.int64), PairRows(*pairs), term, left, events, out)
        run_team(team, sum_to_samples, given)

    @njit(nogil=True, cache=True)
    def run_sum_to_events(team, pairs, term, left, samples, out):
        given = (lanes, whole, np.zeros(1, np.int64), PairRows(*pairs), term, left, samples, out)
        run_team(team, sum_to_events, given)

    @njit(nogil=True, cache=True)
    def run_dots(team, pairs, samples, events, out):
        run_team(team, dots, (lanes, whole, np.zeros(1, np.int64), PairRows(*pairs), samples, events, out))

    return SimpleNamespace(
        combine=run_combine, sum_to_samples=run_sum_to_samples, sum_to_events=run_sum_to_events, dots=run_dots
    )
