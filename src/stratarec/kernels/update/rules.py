"""What a row optimizer does to one row and its state, for Numba kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally, njit

from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.rows import U, prefetch_row
from stratarec.kernels.team import BODY
from stratarec.kernels.vector import broadcast, load, multiply, store, subtract, total

SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM = 0, 1, 2, 3
KINDS = {"sgd": SGD, "rowwise_adagrad": ROWWISE_ADAGRAD, "adagrad": ADAGRAD, "rowwise_adam": ROWWISE_ADAM}


class Rule(NamedTuple):
    """A step's numbers; `moment` and `second` are Adam's bias corrections 1 - beta1^t and 1 - beta2^t."""

    kind: int
    rate: np.float32
    eps: np.float32
    decay: np.float32
    beta1: np.float32
    beta2: np.float32
    moment: np.float32
    second: np.float32


def compiled(rule):
    """A `RowUpdate`, `Rule` as kernels take it."""
    numbers = (
        rule.rate, rule.eps, rule.decay, rule.beta1, rule.beta2, 1 - rule.beta1**rule.step, 1 - rule.beta2**rule.step
    )  # fmt: skip
    return KINDS[rule.kind], *(np.float32(number) for number in numbers)


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
def step_by(lanes, weights, first, gradient, start, D, factor):
    """``weights[first:][:D] -= factor * gradient[start:][:D]``."""
    literally(lanes)
    for block in range(U(0), D, U(lanes)):
        change = multiply(broadcast(factor, lanes), load(gradient, start + block, lanes))
        store(weights, first + block, subtract(load(weights, first + block, lanes), change))


@njit(**BODY)
def update_row(lanes, rule, slots, row, D, gradient, start):
    """Apply one summed gradient ``gradient[start:start + D]`` to row `row` and its state."""
    literally(lanes)
    weights, row_state, full_state = slots
    first, one = row * D, np.float32(1.0)
    if rule.kind == SGD or rule.kind == ROWWISE_ADAGRAD:
        if rule.decay != 0:
            for d in range(D):
                gradient[start + d] += rule.decay * weights[first + d]
        factor = rule.rate
        if rule.kind == ROWWISE_ADAGRAD:
            row_state[row] += mean_square(lanes, gradient, start, D)
            factor = rule.rate / (np.sqrt(row_state[row]) + rule.eps)
        step_by(lanes, weights, first, gradient, start, D, factor)
    elif rule.kind == ADAGRAD:
        for d in range(D):
            g = gradient[start + d] + rule.decay * weights[first + d]
            full_state[first + d] += g * g
            weights[first + d] -= rule.rate * g / (np.sqrt(full_state[first + d]) + rule.eps)
    else:
        square = mean_square(lanes, gradient, start, D)
        row_state[row] = rule.beta2 * row_state[row] + (one - rule.beta2) * square
        scale = np.sqrt(row_state[row] / rule.second) + rule.eps
        for d in range(D):
            full_state[first + d] = rule.beta1 * full_state[first + d] + (one - rule.beta1) * gradient[start + d]
            delta = full_state[first + d] / rule.moment / scale + rule.decay * weights[first + d]
            weights[first + d] -= rule.rate * delta


@njit(**BODY)
def prefetch_state(kind, slots, row, D):
    """Ask for all that `update_row` will touch."""
    prefetch_row(slots[0], row * D, D)
    if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
        prefetch(slots[1], row)
    if kind == ADAGRAD or kind == ROWWISE_ADAM:
        prefetch_row(slots[2], row * D, D)
