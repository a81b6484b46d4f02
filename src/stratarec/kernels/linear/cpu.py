"""Numba bodies of a sum of what samples and their runs have, rectified or not, in float32 or bfloat16.

Arithmetic is in float32 either way. Every output element belongs to one thread.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import add, load, passed, store

U = np.uint64


class Runs(NamedTuple):
    """Run r is samples ``start[r]:start[r + 1]``; floats of a sample, and runs that a member takes at a time."""

    start: NDArray[np.int64]
    width: int
    tile: int


@njit(**BODY)
def forward_tiles(member, lanes, relu, counter, runs, samples, common):
    """samples[b] += common[r] for the samples b of run r, where `relu` is 1 at least 0."""
    literally(lanes)
    literally(relu)
    W, start, tile, count = U(runs.width), runs.start, runs.tile, len(runs.start) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(start[run]), U(start[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    found = add(load(samples, b * W + d, lanes), load(common, U(run) * W + d, lanes))
                    store(samples, b * W + d, passed(found, found) if relu else found)


@njit(**BODY)
def backward_tiles(member, lanes, relu, counter, runs, gradient, out, samples, common):
    """samples[b] = gradient[b], where `relu` is 1 but 0 where out[b] <= 0; common[r] = their sum over the run's
    samples, ascending."""
    literally(lanes)
    literally(relu)
    W, start, tile, count = U(runs.width), runs.start, runs.tile, len(runs.start) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(start[run]), U(start[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    found = load(gradient, b * W + d, lanes)
                    found = passed(found, load(out, b * W + d, lanes)) if relu else found
                    store(samples, b * W + d, found)
                    place = U(run) * W + d
                    store(common, place, found if b == U(start[run]) else add(load(common, place, lanes), found))


@cache
def kernels(lanes: int, relu: int) -> SimpleNamespace:
    """Both passes in blocks of `lanes`, compiled for each type at its first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def forward(team, runs, samples, common):
        run_team(team, forward_tiles, (lanes, relu, np.zeros(1, np.int64), Runs(*runs), samples, common))

    @njit(nogil=True, cache=True)
    def backward(team, runs, gradient, out, samples, common):
        given = (lanes, relu, np.zeros(1, np.int64), Runs(*runs), gradient, out, samples, common)
        run_team(team, backward_tiles, given)

    return SimpleNamespace(forward=forward, backward=backward)
