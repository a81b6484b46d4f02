"""Numba bodies of the pairwise dot interaction: one sample at a time, its vectors side by side in the first cache."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import broadcast, load, multiply, multiply_add, store, store_totals, total

U = np.uint64
# Samples that a thread takes at once.
TILE = 32


class Samples(NamedTuple):
    """Flat inputs of a batch: `first` dense vectors of a sample, one or none, and the pooled ones behind them.

    `columns` is how many a sample has of the output, its zeros included.
    """

    dense: NDArray[np.float32]
    pooled: NDArray[np.float32]
    first: int
    batch: int
    vectors: int
    width: int
    columns: int


class Scratch(NamedTuple):
    """Of each member: a sample's vectors, the square of its gradients, and the gradients of its vectors."""

    vectors: NDArray[np.float32]
    square: NDArray[np.float32]
    totals: NDArray[np.float32]


@njit(**BODY)
def copy(lanes, source, begin, target, start, count):
    """``target[start:][:count] = source[begin:][:count]``; `count` is a multiple of `lanes`."""
    literally(lanes)
    for d in range(U(0), U(count), U(lanes)):
        store(target, U(start) + d, load(source, U(begin) + d, lanes))


@njit(**BODY)
def product(lanes, scratch, one, other, width):
    """Element-wise products of two vectors, blocks summed."""
    literally(lanes)
    found = multiply(load(scratch, one, lanes), load(scratch, other, lanes))
    for d in range(U(lanes), width, U(lanes)):
        found = multiply_add(load(scratch, one + d, lanes), load(scratch, other + d, lanes), found)
    return found


@njit(**BODY)
def lay_side_by_side(lanes, samples, b, scratch):
    """All vectors of sample b, the dense one first."""
    front, pooled = samples.first * samples.width, (samples.vectors - samples.first) * samples.width
    copy(lanes, samples.dense, b * samples.width, scratch, 0, front)
    copy(lanes, samples.pooled, b * pooled, scratch, front, pooled)


@njit(**BODY)
def forward(member, lanes, whole, counter, samples, out, scratches):
    """out[b] = dense[b], then x_i . x_j for i = 1 .. V - 1 and j < i, then zeros."""
    literally(lanes)
    first, width, columns = samples.first, samples.width, samples.columns
    D, V = U(lanes if whole else width), U(samples.vectors)
    scratch = scratches[member]
    while True:
        begin = take(counter) * TILE
        if begin >= samples.batch:
            break
        for b in range(begin, min(begin + TILE, samples.batch)):
            lay_side_by_side(lanes, samples, b, scratch)
            place = U(b * columns)
            copy(lanes, scratch, 0, out, place, first * width)
            place += U(first * width)
            for i in range(U(1), V):
                whole_fours = i & ~U(3)
                for j in range(U(0), whole_fours, U(4)):
                    store_totals(
                        out, place + j,
                        product(lanes, scratch, i * D, j * D, D),
                        product(lanes, scratch, i * D, (j + U(1)) * D, D),
                        product(lanes, scratch, i * D, (j + U(2)) * D, D),
                        product(lanes, scratch, i * D, (j + U(3)) * D, D),
                    )  # fmt: skip
                for j in range(whole_fours, i):
                    out[place + j] = total(product(lanes, scratch, i * D, j * D, D))
                place += i
            for column in range(place, U((b + 1) * columns)):
                out[column] = np.float32(0.0)


@njit(**BODY)
def spread(gradient, place, vectors, square):
    """The symmetric ``[V, V]`` matrix, zero on its diagonal, whose lower triangle starts at ``gradient[place]``."""
    for i in range(vectors):
        square[i * vectors + i] = np.float32(0.0)
        for j in range(i):
            square[i * vectors + j] = gradient[place + j]
            square[j * vectors + i] = gradient[place + j]
        place += i


@njit(**BODY)
def backward(member, lanes, whole, counter, samples, gradient, dense_out, pooled_out, work):
    """Gradients of `forward`'s inputs: those of x_i are the sum over j of g_ij x_j, four i at a time in registers."""
    literally(lanes)
    first, vectors, width = samples.first, samples.vectors, samples.width
    D, V, count = U(lanes if whole else width), U(vectors), (vectors - first) * width
    scratch, square, found = work.vectors[member], work.square[member], work.totals[member]
    while True:
        begin = take(counter) * TILE
        if begin >= samples.batch:
            break
        for b in range(begin, min(begin + TILE, samples.batch)):
            lay_side_by_side(lanes, samples, b, scratch)
            place = U(b * samples.columns)
            spread(gradient, place + U(first * width), V, square)
            for i in range(U(0), V, U(4)):
                for block in range(U(0), D, U(lanes)):
                    one = two = three = four = broadcast(np.float32(0.0), lanes)
                    if first and i == U(0):
                        one = load(gradient, place + block, lanes)
                    for j in range(V):
                        x, s = load(scratch, j * D + block, lanes), i * V + j
                        one = multiply_add(broadcast(square[s], lanes), x, one)
                        two = multiply_add(broadcast(square[s + V], lanes), x, two)
                        three = multiply_add(broadcast(square[s + V + V], lanes), x, three)
                        four = multiply_add(broadcast(square[s + V + V + V], lanes), x, four)
                    store(found, i * D + block, one)
                    store(found, (i + U(1)) * D + block, two)
                    store(found, (i + U(2)) * D + block, three)
                    store(found, (i + U(3)) * D + block, four)
            copy(lanes, found, 0, dense_out, b * width, first * width)
            copy(lanes, found, first * width, pooled_out, b * count, count)


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """Both passes for vectors in blocks of `lanes`, compiled at their first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_forward(team, samples, out):
        samples = Samples(*samples)
        scratches = np.empty((team.threads, samples.vectors * samples.width + 16), np.float32)
        run_team(team, forward, (lanes, whole, np.zeros(1, np.int64), samples, out, scratches))

    @njit(nogil=True, cache=True)
    def run_backward(team, samples, gradient, dense_out, pooled_out):
        samples = Samples(*samples)
        # Four rows at a time: the last rows may be beyond the vectors, and what is computed there is not used.
        rows = (samples.vectors + 3) // 4 * 4
        work = Scratch(
            np.empty((team.threads, rows * samples.width + 16), np.float32),
            np.zeros((team.threads, rows * samples.vectors + 16), np.float32),
            np.empty((team.threads, rows * samples.width + 16), np.float32),
        )
        given = (lanes, whole, np.zeros(1, np.int64), samples, gradient, dense_out, pooled_out, work)
        run_team(team, backward, given)

    return SimpleNamespace(forward=run_forward, backward=run_backward)
