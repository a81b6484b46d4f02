"""Numba kernels of the pairwise dot interaction: one sample at a time, its vectors side by side in
the L1 cache.

If samples of a segment share vectors, products between the V2 shared vectors are computed once a
segment. Products of the V1 unshared vectors, with each other and with the shared ones, are computed
for each sample. The unshared vectors (the dense one first) then precede the shared ones.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.vector import (
    broadcast,
    load,
    multiply,
    multiply_add,
    store,
    store_totals,
    total,
)

U = np.uint64
# Number of samples that a thread processes at a time.
TILE = 32


class Samples(NamedTuple):
    """Flat inputs of a batch: the dense vector of each sample if `first` is 1, and the pooled
    vectors of each sample.

    `columns` is the number of output columns, including the zeros.
    """

    dense: NDArray[np.float32]
    pooled: NDArray[np.float32]
    first: int
    batch: int
    vectors: int
    width: int
    columns: int


class Scratch(NamedTuple):
    """Scratch of a thread: a sample's vectors, gradient of its products, gradients of vectors."""

    vectors: NDArray[np.float32]
    square: NDArray[np.float32]
    totals: NDArray[np.float32]


@njit(**BODY)
def copy(lanes, source, begin, target, start, count):
    """Copy `count` floats, a multiple of `lanes`, from ``source[begin:]`` to ``target[start:]``."""
    literally(lanes)
    for d in range(U(0), U(count), U(lanes)):
        store(target, U(start) + d, load(source, U(begin) + d, lanes))


@njit(**BODY)
def product(lanes, scratch, one, other, width):
    """Return partial sums of a dot product of two vectors, one block; `total` adds them up."""
    literally(lanes)
    products = multiply(load(scratch, one, lanes), load(scratch, other, lanes))
    for d in range(U(lanes), width, U(lanes)):
        products = multiply_add(load(scratch, one + d, lanes), load(scratch, other + d, lanes), products)
    return products


@njit(**BODY)
def products_with(lanes, scratch, one, begin, end, D, out, place):
    """Set ``out[place + j - begin]`` to the dot product of vector `one` and vector j, for j from
    `begin` to `end`.
    """
    literally(lanes)
    # Four dot products at once: adding up their lanes takes half the shuffles.
    fours = begin + ((end - begin) & ~U(3))
    for j in range(begin, fours, U(4)):
        store_totals(
            out,
            place + j - begin,
            product(lanes, scratch, one * D, j * D, D),
            product(lanes, scratch, one * D, (j + U(1)) * D, D),
            product(lanes, scratch, one * D, (j + U(2)) * D, D),
            product(lanes, scratch, one * D, (j + U(3)) * D, D),
        )
    for j in range(fours, end):
        out[place + j - begin] = total(product(lanes, scratch, one * D, j * D, D))


@njit(**BODY)
def fill_zeros(out, begin, end):
    for column in range(begin, end):
        out[column] = np.float32(0.0)


@njit(**BODY)
def lay_side_by_side(lanes, samples, b, scratch):
    """Copy all vectors of sample b to `scratch`, the dense one first."""
    front, pooled = samples.first * samples.width, (samples.vectors - samples.first) * samples.width
    # The vectors come from two tensors; side by side, one index reaches them all.
    copy(lanes, samples.dense, b * samples.width, scratch, 0, front)
    copy(lanes, samples.pooled, b * pooled, scratch, front, pooled)


@njit(**BODY)
def forward(member, lanes, one_block, counter, samples, out, scratches):
    """Set out[b] to dense[b], the dot products x_i . x_j for 1 <= i < V and j < i, and zeros."""
    literally(lanes)
    first, width, columns = samples.first, samples.width, samples.columns
    D, V = U(lanes if one_block else width), U(samples.vectors)
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
                products_with(lanes, scratch, i, U(0), i, D, out, place)
                place += i
            fill_zeros(out, place, U((b + 1) * columns))


@njit(**BODY)
def spread(gradient, place, vectors, square):
    """Write a symmetric matrix with a zero diagonal to `square`; ``gradient[place:]`` is its lower
    triangle.
    """
    for i in range(vectors):
        square[i * vectors + i] = np.float32(0.0)
        for j in range(i):
            square[i * vectors + j] = gradient[place + j]
            square[j * vectors + i] = gradient[place + j]
        place += i


@njit(**BODY)
def backward(member, lanes, one_block, counter, samples, gradient, dense_out, pooled_out, work):
    """Compute the gradient of each x_i, which is the sum over j of g_ij x_j; four i at a time stay
    in registers.
    """
    literally(lanes)
    first, vectors, width = samples.first, samples.vectors, samples.width
    D, V, count = U(lanes if one_block else width), U(vectors), (vectors - first) * width
    scratch, square, sums = work.vectors[member], work.square[member], work.totals[member]
    while True:
        begin = take(counter) * TILE
        if begin >= samples.batch:
            break
        for b in range(begin, min(begin + TILE, samples.batch)):
            lay_side_by_side(lanes, samples, b, scratch)
            place = U(b * samples.columns)
            # The full matrix, so that the loop below reads coefficients in rows and needs no test
            # for j < i.
            spread(gradient, place + U(first * width), V, square)
            for i in range(U(0), V, U(4)):
                for block in range(U(0), D, U(lanes)):
                    one = two = three = four = broadcast(np.float32(0.0), lanes)
                    # The dense vector is also part of the output: its gradient starts with the
                    # gradient of this part.
                    if first and i == U(0):
                        one = load(gradient, place + block, lanes)
                    for j in range(V):
                        x, s = load(scratch, j * D + block, lanes), i * V + j
                        one = multiply_add(broadcast(square[s], lanes), x, one)
                        two = multiply_add(broadcast(square[s + V], lanes), x, two)
                        three = multiply_add(broadcast(square[s + V + V], lanes), x, three)
                        four = multiply_add(broadcast(square[s + V + V + V], lanes), x, four)
                    store(sums, i * D + block, one)
                    store(sums, (i + U(1)) * D + block, two)
                    store(sums, (i + U(2)) * D + block, three)
                    store(sums, (i + U(3)) * D + block, four)
            copy(lanes, sums, 0, dense_out, b * width, first * width)
            copy(lanes, sums, first * width, pooled_out, b * count, count)


class SegmentSamples(NamedTuple):
    """Flat inputs as in `Samples`; indices of unshared and shared features; starts of segments;
    segments per task.
    """

    dense: NDArray[np.float32]
    pooled: NDArray[np.float32]
    first: int
    width: int
    features: int
    unshared: NDArray[np.int64]
    shared: NDArray[np.int64]
    start: NDArray[np.int64]
    tile: int


class SegmentProducts(NamedTuple):
    """Both outputs of `segment_forward`, or the gradients of both, flat, and the number of columns
    of each.
    """

    unshared: NDArray[np.float32]
    shared: NDArray[np.float32]
    unshared_columns: int
    shared_columns: int


@njit(**BODY)
def pick(lanes, source, row, features, chosen, scratch, place, D):
    """Copy vectors `chosen` of a row of `source` to `scratch`, from vector number `place` on."""
    literally(lanes)
    for k in range(U(len(chosen))):
        copy(lanes, source, (row * features + U(chosen[k])) * D, scratch, (place + k) * D, D)


@njit(**BODY)
def put(lanes, gradients, place, target, row, features, chosen, D):
    """Copy vectors from number `place` on to the vectors `chosen` of a row of `target`; the inverse
    of `pick`.
    """
    literally(lanes)
    for k in range(U(len(chosen))):
        copy(lanes, gradients, (place + k) * D, target, (row * features + U(chosen[k])) * D, D)


@njit(**BODY)
def segment_forward(member, lanes, one_block, counter, samples, out, scratches):
    """Set out.unshared[b] to dense[b] and all products with an unshared vector, out.shared[r] to
    all other products.

    Products of two unshared vectors come first, then products of an unshared and a shared vector.
    """
    literally(lanes)
    pooled = samples.pooled
    unshared = samples.unshared
    shared = samples.shared
    tile = samples.tile
    D, F, front = U(lanes if one_block else samples.width), U(samples.features), U(samples.first)
    start, segments = samples.start, len(samples.start) - 1
    mine, V = front + U(len(unshared)), front + U(len(unshared)) + U(len(shared))
    scratch = scratches[member]
    while True:
        low = take(counter) * tile
        if low >= segments:
            break
        for segment in range(low, min(low + tile, segments)):
            # Once a segment: the shared vectors stay in the L1 cache for all its samples.
            pick(lanes, pooled, U(segment), F, shared, scratch, mine, D)
            place = U(segment * out.shared_columns)
            for i in range(mine + U(1), V):
                products_with(lanes, scratch, i, mine, i, D, out.shared, place)
                place += i - mine
            fill_zeros(out.shared, place, U((segment + 1) * out.shared_columns))
            for b in range(U(start[segment]), U(start[segment + 1])):
                place = b * U(out.unshared_columns)
                copy(lanes, samples.dense, b * D, scratch, 0, front * D)
                copy(lanes, samples.dense, b * D, out.unshared, place, front * D)
                pick(lanes, pooled, b, F, unshared, scratch, front, D)
                place += front * D
                for i in range(U(1), mine):
                    products_with(lanes, scratch, i, U(0), i, D, out.unshared, place)
                    place += i
                for i in range(mine):
                    products_with(lanes, scratch, i, mine, V, D, out.unshared, place)
                    place += V - mine
                fill_zeros(out.unshared, place, (b + U(1)) * U(out.unshared_columns))


@njit(**BODY)
def pairs_gradient(lanes, scratch, first, end, D, gradient, place, sums):
    """Add g_ij x_j to sums[i] and g_ij x_i to sums[j] for all pairs j < i of the vectors from
    `first` to `end`.
    """
    literally(lanes)
    for one in range(end - first):
        for other in range(one):
            g = broadcast(gradient[place + one * (one - U(1)) // U(2) + other], lanes)
            for block in range(U(0), D, U(lanes)):
                i, j = (first + one) * D + block, (first + other) * D + block
                store(sums, i, multiply_add(g, load(scratch, j, lanes), load(sums, i, lanes)))
                store(sums, j, multiply_add(g, load(scratch, i, lanes), load(sums, j, lanes)))


@njit(**BODY)
def cross_gradient(lanes, scratch, mine, V, D, gradient, place, sums):
    """Do the same as `pairs_gradient` for all pairs of an unshared vector i and a shared vector j.

    The sum for vector i stays in registers.
    """
    literally(lanes)
    for i in range(mine):
        for block in range(U(0), D, U(lanes)):
            x = load(scratch, i * D + block, lanes)
            row = load(sums, i * D + block, lanes)
            for j in range(mine, V):
                g = broadcast(gradient[place + i * (V - mine) + j - mine], lanes)
                row = multiply_add(g, load(scratch, j * D + block, lanes), row)
                store(sums, j * D + block, multiply_add(g, x, load(sums, j * D + block, lanes)))
            store(sums, i * D + block, row)


@njit(**BODY)
def segment_backward(
    member, lanes, one_block, counter, samples, gradients, dense_out, pooled_out, scratches, totals
):
    """Compute the gradients of `segment_forward`. Gradients of shared vectors are summed over a
    segment's samples in order.
    """
    literally(lanes)
    pooled = samples.pooled
    unshared = samples.unshared
    shared = samples.shared
    tile = samples.tile
    D, F, front = U(lanes if one_block else samples.width), U(samples.features), U(samples.first)
    start, segments = samples.start, len(samples.start) - 1
    mine, V = front + U(len(unshared)), front + U(len(unshared)) + U(len(shared))
    pairs = mine * (mine - U(1)) // U(2)
    scratch, sums = scratches[member], totals[member]
    while True:
        low = take(counter) * tile
        if low >= segments:
            break
        for segment in range(low, min(low + tile, segments)):
            pick(lanes, pooled, U(segment), F, shared, scratch, mine, D)
            # One thread adds all samples of the segment in their order, which fixes the bits.
            for place in range(mine * D, V * D, U(lanes)):
                store(sums, place, broadcast(np.float32(0.0), lanes))
            for b in range(U(start[segment]), U(start[segment + 1])):
                copy(lanes, samples.dense, b * D, scratch, 0, front * D)
                pick(lanes, pooled, b, F, unshared, scratch, front, D)
                place = b * U(gradients.unshared_columns)
                for d in range(front * D, mine * D, U(lanes)):
                    store(sums, d, broadcast(np.float32(0.0), lanes))
                # The dense vector is also part of the output: its gradient starts with the gradient
                # of this part.
                copy(lanes, gradients.unshared, place, sums, 0, front * D)
                place += front * D
                pairs_gradient(lanes, scratch, U(0), mine, D, gradients.unshared, place, sums)
                cross_gradient(lanes, scratch, mine, V, D, gradients.unshared, place + pairs, sums)
                copy(lanes, sums, 0, dense_out, b * D, front * D)
                put(lanes, sums, front, pooled_out, b, F, unshared, D)
            place = U(segment * gradients.shared_columns)
            pairs_gradient(lanes, scratch, mine, V, D, gradients.shared, place, sums)
            put(lanes, sums, mine, pooled_out, U(segment), F, shared, D)


@cache
def kernels(lanes: int, one_block: bool) -> SimpleNamespace:
    """Return both passes for blocks of `lanes` floats, compiled when called and cached on disk."""

    @njit(nogil=True, cache=True)
    def forward_of_all(team, samples, out):
        samples = Samples(*samples)
        scratches = np.empty((team.threads, samples.vectors * samples.width + 16), np.float32)
        run_team(team, forward, (lanes, one_block, stack_array(1, np.int64), samples, out, scratches))

    @njit(nogil=True, cache=True)
    def backward_of_all(team, samples, gradient, dense_out, pooled_out):
        samples = Samples(*samples)
        # Vectors are processed four at a time. In the last four some may not exist, and their
        # results are not used.
        rows = (samples.vectors + 3) // 4 * 4
        work = Scratch(
            np.empty((team.threads, rows * samples.width + 16), np.float32),
            np.zeros((team.threads, rows * samples.vectors + 16), np.float32),
            np.empty((team.threads, rows * samples.width + 16), np.float32),
        )
        args = (lanes, one_block, stack_array(1, np.int64), samples, gradient, dense_out, pooled_out, work)
        run_team(team, backward, args)

    @njit(nogil=True, cache=True)
    def forward_of_segments(team, samples, out):
        samples = SegmentSamples(*samples)
        scratches = np.empty(
            (team.threads, (samples.features + samples.first) * samples.width + 16), np.float32
        )
        run_team(
            team,
            segment_forward,
            (lanes, one_block, stack_array(1, np.int64), samples, SegmentProducts(*out), scratches),
        )

    @njit(nogil=True, cache=True)
    def backward_of_segments(team, samples, gradients, dense_out, pooled_out):
        samples = SegmentSamples(*samples)
        scratches = np.empty(
            (team.threads, (samples.features + samples.first) * samples.width + 16), np.float32
        )
        args = (
            lanes,
            one_block,
            stack_array(1, np.int64),
            samples,
            SegmentProducts(*gradients),
            dense_out,
            pooled_out,
            scratches,
            np.empty_like(scratches),
        )
        run_team(team, segment_backward, args)

    return SimpleNamespace(
        forward=forward_of_all,
        backward=backward_of_all,
        segment_forward=forward_of_segments,
        segment_backward=backward_of_segments,
    )
