"""Numba bodies of a sum of what samples and their runs have, rectified or not, in float32 or bfloat16.

Arithmetic is in float32 either way. Every output element belongs to one thread.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import literally, njit

from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import add, load, passed, store

U = np.uint64


@njit(**BODY)
def forward_tiles(member, lanes, relu, counter, samples, runs, starts, width, tile):
    """samples[b] += runs[r] for the samples b of run r, where `relu` is 1 at least 0."""
    literally(lanes)
    literally(relu)
    W, count = U(width), len(starts) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(starts[run]), U(starts[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    found = add(load(samples, b * W + d, lanes), load(runs, U(run) * W + d, lanes))
                    store(samples, b * W + d, passed(found, found) if relu else found)


@njit(**BODY)
def backward_tiles(member, lanes, relu, counter, gradient, out, starts, width, samples, runs, tile):
    """samples[b] = gradient[b], where `relu` is 1 but 0 where out[b] <= 0; runs[r] = their sum over the run's samples,
    ascending."""
    literally(lanes)
    literally(relu)
    W, count = U(width), len(starts) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(starts[run]), U(starts[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    found = load(gradient, b * W + d, lanes)
                    found = passed(found, load(out, b * W + d, lanes)) if relu else found
                    store(samples, b * W + d, found)
                    place = U(run) * W + d
                    store(runs, place, found if b == U(starts[run]) else add(load(runs, place, lanes), found))


@cache
def kernels(lanes: int, relu: int) -> SimpleNamespace:
    """Both passes in blocks of `lanes`, compiled for each type at its first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def forward(team, samples, runs, starts, width, tile):
        given = (lanes, relu, np.zeros(1, np.int64), samples, runs, starts, width, tile)
        run_team(team, forward_tiles, given)

    @njit(nogil=True, cache=True)
    def backward(team, gradient, out, starts, width, samples, runs, tile):
        given = (lanes, relu, np.zeros(1, np.int64), gradient, out, starts, width, samples, runs, tile)
        run_team(team, backward_tiles, given)

    return SimpleNamespace(forward=forward, backward=backward)
