"""What happens to one row: prefetched, summed, updated.

A row of D floats is handled in blocks of `lanes`, a constant of each compiled kernel; most widths are one block.
"""

from __future__ import annotations

import numpy as np
from numba import literally, njit

from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.team import BODY
from stratarec.kernels.vector import LANES, add, broadcast, load, multiply, store, subtract, total

SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM = 0, 1, 2, 3

U = np.uint64
LINE = U(LANES)


@njit(**BODY)
def ahead_of(width):
    """How many rows before its use a row is prefetched: about 256 cache lines, between 16 and 64 rows.

    With fewer lines under way a core does not reach its memory bandwidth: random rows of 16 floats took 14 ns each with
    16 rows ahead and 8 ns with 64, rows of 64 floats 12 and 10 ns.
    """
    return min(max(U(4096) // width, U(16)), U(64))


@njit(**BODY)
def prefetch_row(array, start, width):
    for element in range(U(0), width, LINE):
        prefetch(array, start + element)


@njit(**BODY)
def mean_square(lanes, gradient, start, D):
    """Mean of squares, block after block, each in `vector.total`'s order: the same bits on every machine."""
    literally(lanes)
    found = np.float32(0.0)
    for block in range(start, start + D, U(lanes)):
        part = load(gradient, block, lanes)
        found += total(multiply(part, part))
    return found / np.float32(D)


@njit(**BODY)
def update_row(
    lanes, kind, weights, row, D, gradient, start, row_state, full_state, rate, eps, decay, beta1, beta2, moment, second
):
    """Apply one summed gradient ``gradient[start:start + D]`` to row `row` and its state.

    `moment` and `second` are Adam's bias corrections 1 - beta1^t and 1 - beta2^t.
    """
    literally(lanes)
    first = row * D
    if kind == SGD or kind == ROWWISE_ADAGRAD:
        if decay != 0:
            for d in range(D):
                gradient[start + d] += decay * weights[first + d]
        factor = rate
        if kind == ROWWISE_ADAGRAD:
            row_state[row] += mean_square(lanes, gradient, start, D)
            factor = rate / (np.sqrt(row_state[row]) + eps)
        for block in range(U(0), D, U(lanes)):
            change = multiply(broadcast(factor, lanes), load(gradient, start + block, lanes))
            store(weights, first + block, subtract(load(weights, first + block, lanes), change))
    elif kind == ADAGRAD:
        for d in range(D):
            g = gradient[start + d] + decay * weights[first + d]
            full_state[first + d] += g * g
            weights[first + d] -= rate * g / (np.sqrt(full_state[first + d]) + eps)
    else:
        one = np.float32(1.0)
        row_state[row] = beta2 * row_state[row] + (one - beta2) * mean_square(lanes, gradient, start, D)
        scale = np.sqrt(row_state[row] / second) + eps
        for d in range(D):
            full_state[first + d] = beta1 * full_state[first + d] + (one - beta1) * gradient[start + d]
            delta = full_state[first + d] / moment / scale + decay * weights[first + d]
            weights[first + d] -= rate * delta


@njit(**BODY)
def prefetch_state(kind, weights, row, D, row_state, full_state):
    """Ask for all that `update_row` will touch."""
    prefetch_row(weights, row * D, D)
    if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
        prefetch(row_state, row)
    if kind == ADAGRAD or kind == ROWWISE_ADAM:
        prefetch_row(full_state, row * D, D)


@njit(**BODY)
def accumulate(lanes, target, start, source, begin, factor, D):
    """``target[start:][:D] += factor * source[begin:][:D]``."""
    literally(lanes)
    for block in range(U(0), D, U(lanes)):
        part = multiply(broadcast(factor, lanes), load(source, begin + block, lanes))
        store(target, start + block, add(load(target, start + block, lanes), part))


@njit(nogil=True, cache=True)
def mark_rows(values, offsets, singles, batch, key, base, bits):
    """Set the bit of every row that the batch looks up."""
    for f in range(len(key)):
        shift = key[f] * batch
        begin, end = (shift, shift + batch) if singles else (offsets[shift], offsets[shift + batch])
        for i in range(U(begin), U(end)):
            row = U(base[f] + values[i])
            bits[row >> U(3)] |= np.uint8(1) << np.uint8(row & U(7))


@njit(nogil=True, cache=True)
def first_falling(offsets, total):
    """The first place i at which offsets[i], offsets[i + 1] fall or do not lie in [0, total]; or -1."""
    last = len(offsets) - 1
    falls = np.int64(offsets[0] < 0) + np.int64(offsets[last] > total)
    # Without a branch in it the loop is vectorised: batches are nearly always right.
    for i in range(U(last)):
        falls += offsets[i] > offsets[i + U(1)]
    if falls == 0:
        return -1
    for i in range(last):
        if offsets[i] < 0 or offsets[i] > offsets[i + 1] or offsets[i + 1] > total:
            return i
    return last
