"""Numba bodies of the interaction where some vectors are the same for all samples of a run.

A run's V2 common vectors meet each other once, and each sample's V1 own vectors meet them and one another. Side by side
in the first cache lie the own vectors (the dense one first), then the common ones.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.interaction.cpu import copy, product
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import broadcast, load, multiply_add, store, store_totals, total

U = np.uint64


class RunSamples(NamedTuple):
    """Flat inputs as `Samples`; which features samples own and share; where runs start; how many are one task."""

    dense: NDArray[np.float32]
    pooled: NDArray[np.float32]
    first: int
    width: int
    features: int
    own: NDArray[np.int64]
    common: NDArray[np.int64]
    start: NDArray[np.int64]
    tile: int


class RunProducts(NamedTuple):
    """Both outputs of `forward`, or gradients of them, flat, and the columns that a sample and a run have of them."""

    own: NDArray[np.float32]
    common: NDArray[np.float32]
    own_columns: int
    common_columns: int


@njit(**BODY)
def products_with(lanes, scratch, one, begin, end, D, out, place):
    """``out[place + j - begin]`` = product of vector `one` and vector j, for j from `begin` to `end`."""
    literally(lanes)
    fours = begin + ((end - begin) & ~U(3))
    for j in range(begin, fours, U(4)):
        store_totals(
            out, place + j - begin,
            product(lanes, scratch, one * D, j * D, D),
            product(lanes, scratch, one * D, (j + U(1)) * D, D),
            product(lanes, scratch, one * D, (j + U(2)) * D, D),
            product(lanes, scratch, one * D, (j + U(3)) * D, D),
        )  # fmt: skip
    for j in range(fours, end):
        out[place + j - begin] = total(product(lanes, scratch, one * D, j * D, D))


@njit(**BODY)
def pick(lanes, source, row, features, chosen, scratch, place, D):
    """Vectors `chosen` of a row of `source` side by side from vector `place` on."""
    literally(lanes)
    for k in range(U(len(chosen))):
        copy(lanes, source, (row * features + U(chosen[k])) * D, scratch, (place + k) * D, D)


@njit(**BODY)
def put(lanes, found, place, target, row, features, chosen, D):
    """The transpose of `pick`."""
    literally(lanes)
    for k in range(U(len(chosen))):
        copy(lanes, found, (place + k) * D, target, (row * features + U(chosen[k])) * D, D)


@njit(**BODY)
def fill_zeros(out, begin, end):
    for column in range(begin, end):
        out[column] = np.float32(0.0)


@njit(**BODY)
def forward(member, lanes, whole, counter, samples, out, scratches):
    """out.own[b] = dense[b], own vectors' pairs, each with all common vectors; out.common[r] = pairs of the latter."""
    literally(lanes)
    pooled, own, common, tile = samples.pooled, samples.own, samples.common, samples.tile
    D, F, front = U(lanes if whole else samples.width), U(samples.features), U(samples.first)
    start, runs = samples.start, len(samples.start) - 1
    mine, V = front + U(len(own)), front + U(len(own)) + U(len(common))
    scratch = scratches[member]
    while True:
        low = take(counter) * tile
        if low >= runs:
            break
        for run in range(low, min(low + tile, runs)):
            pick(lanes, pooled, U(run), F, common, scratch, mine, D)
            place = U(run * out.common_columns)
            for i in range(mine + U(1), V):
                products_with(lanes, scratch, i, mine, i, D, out.common, place)
                place += i - mine
            fill_zeros(out.common, place, U((run + 1) * out.common_columns))
            for b in range(U(start[run]), U(start[run + 1])):
                place = b * U(out.own_columns)
                copy(lanes, samples.dense, b * D, scratch, 0, front * D)
                copy(lanes, samples.dense, b * D, out.own, place, front * D)
                pick(lanes, pooled, b, F, own, scratch, front, D)
                place += front * D
                for i in range(U(1), mine):
                    products_with(lanes, scratch, i, U(0), i, D, out.own, place)
                    place += i
                for i in range(mine):
                    products_with(lanes, scratch, i, mine, V, D, out.own, place)
                    place += V - mine
                fill_zeros(out.own, place, (b + U(1)) * U(out.own_columns))


@njit(**BODY)
def pairs_gradient(lanes, scratch, first, end, D, gradient, place, found):
    """found[i] += g_ij x_j and found[j] += g_ij x_i for all pairs j < i of the vectors from `first` to `end`."""
    literally(lanes)
    for one in range(end - first):
        for other in range(one):
            g = broadcast(gradient[place + one * (one - U(1)) // U(2) + other], lanes)
            for block in range(U(0), D, U(lanes)):
                i, j = (first + one) * D + block, (first + other) * D + block
                store(found, i, multiply_add(g, load(scratch, j, lanes), load(found, i, lanes)))
                store(found, j, multiply_add(g, load(scratch, i, lanes), load(found, j, lanes)))


@njit(**BODY)
def cross_gradient(lanes, scratch, mine, V, D, gradient, place, found):
    """The same for the pairs of an own vector i and a common vector j; what is added to found[i] stays in registers."""
    literally(lanes)
    for i in range(mine):
        for block in range(U(0), D, U(lanes)):
            x = load(scratch, i * D + block, lanes)
            row = load(found, i * D + block, lanes)
            for j in range(mine, V):
                g = broadcast(gradient[place + i * (V - mine) + j - mine], lanes)
                row = multiply_add(g, load(scratch, j * D + block, lanes), row)
                store(found, j * D + block, multiply_add(g, x, load(found, j * D + block, lanes)))
            store(found, i * D + block, row)


@njit(**BODY)
def backward(member, lanes, whole, counter, samples, gradients, dense_out, pooled_out, scratches, totals):
    """Gradients of `forward`'s inputs; those of common vectors are summed over a run's samples in order."""
    literally(lanes)
    pooled, own, common, tile = samples.pooled, samples.own, samples.common, samples.tile
    D, F, front = U(lanes if whole else samples.width), U(samples.features), U(samples.first)
    start, runs = samples.start, len(samples.start) - 1
    mine, V = front + U(len(own)), front + U(len(own)) + U(len(common))
    pairs = mine * (mine - U(1)) // U(2)
    scratch, found = scratches[member], totals[member]
    while True:
        low = take(counter) * tile
        if low >= runs:
            break
        for run in range(low, min(low + tile, runs)):
            pick(lanes, pooled, U(run), F, common, scratch, mine, D)
            for place in range(mine * D, V * D, U(lanes)):
                store(found, place, broadcast(np.float32(0.0), lanes))
            for b in range(U(start[run]), U(start[run + 1])):
                copy(lanes, samples.dense, b * D, scratch, 0, front * D)
                pick(lanes, pooled, b, F, own, scratch, front, D)
                place = b * U(gradients.own_columns)
                for d in range(front * D, mine * D, U(lanes)):
                    store(found, d, broadcast(np.float32(0.0), lanes))
                copy(lanes, gradients.own, place, found, 0, front * D)
                place += front * D
                pairs_gradient(lanes, scratch, U(0), mine, D, gradients.own, place, found)
                cross_gradient(lanes, scratch, mine, V, D, gradients.own, place + pairs, found)
                copy(lanes, found, 0, dense_out, b * D, front * D)
                put(lanes, found, front, pooled_out, b, F, own, D)
            place = U(run * gradients.common_columns)
            pairs_gradient(lanes, scratch, mine, V, D, gradients.common, place, found)
            put(lanes, found, mine, pooled_out, U(run), F, common, D)


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """Both passes for vectors in blocks of `lanes`, compiled at their first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_forward(team, samples, out):
        samples = RunSamples(*samples)
        scratches = np.empty((team.threads, (samples.features + samples.first) * samples.width + 16), np.float32)
        run_team(team, forward, (lanes, whole, np.zeros(1, np.int64), samples, RunProducts(*out), scratches))

    @njit(nogil=True, cache=True)
    def run_backward(team, samples, gradients, dense_out, pooled_out):
        samples = RunSamples(*samples)
        scratches = np.empty((team.threads, (samples.features + samples.first) * samples.width + 16), np.float32)
        given = (
            lanes, whole, np.zeros(1, np.int64), samples, RunProducts(*gradients), dense_out, pooled_out, scratches,
            np.empty_like(scratches),
        )  # fmt: skip
        run_team(team, backward, given)

    return SimpleNamespace(forward=run_forward, backward=run_backward)
