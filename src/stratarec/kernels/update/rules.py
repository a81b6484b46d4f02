"""The row optimizers' update of one row and its state, for Numba kernels.

Every function works in blocks of `lanes`, a constant of each compiled kernel. The compiler may
neither contract nor reorder operations. So the new bits of a row depend only on its old bits, its
gradient and the numbers of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.optimizers import ROW_OPTIMIZERS
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import U, prefetch, prefetch_row
from stratarec.kernels.simd.vector import (
    add,
    broadcast,
    divide,
    load,
    multiply,
    square_root,
    store,
    subtract,
    total,
)

IS_CACHED = ROW_OPTIMIZERS.close()
KINDS = {name: number for number, name in enumerate(ROW_OPTIMIZERS)}
SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM, ADAM = [
    KINDS[name] for name in ("sgd", "rowwise_adagrad", "adagrad", "rowwise_adam", "adam")
]


class Slots(NamedTuple):
    """Rows and their state.

    Parameters
    ----------
    weights : ndarray
        ``[R * D]`` float32.
    row_state, full_state : ndarray
        ``[R]`` and ``[R * k * D]`` float32, with k floats per weight. For k = 2, a row has D first
        moments, then D second moments. An array that the rule does not use may have any size.
    clock : ndarray
        ``[R]`` int32, number of steps that each row has taken; empty if a step changes only the
        rows of its batch.
    """

    weights: NDArray[np.float32]
    row_state: NDArray[np.float32]
    full_state: NDArray[np.float32]
    clock: NDArray[np.int32]


class Rule(NamedTuple):
    """Constants of a row optimizer.

    `l2` is weight decay that is added to the gradient, `weight_decay` is decoupled; at least one of
    them is 0. `rest1` is 1 - beta1, computed before rounding: subtracting a rounded beta from 1 has
    a relative error of 1e-5.
    """

    kind: int
    scale: np.float32
    eps: np.float32
    l2: np.float32
    weight_decay: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32


class StepNumbers(NamedTuple):
    """Numbers of a row optimizer that change from step to step.

    `step_size` is the learning rate divided by Adam's first bias correction 1 - beta1^t;
    `inv_sqrt_bias2` is (1 - beta2^t)^-0.5.
    """

    rate: np.float32
    step_size: np.float32
    inv_sqrt_bias2: np.float32


class MissedSteps(NamedTuple):
    """Steps that rows may have missed: their number, the `StepNumbers` of each, and the gradient of
    a missed step.
    """

    steps: int
    numbers: NDArray[np.float32]
    still: NDArray[np.float32]


class Step(NamedTuple):
    """Inputs of a row's update, except its gradient."""

    rule: Rule
    numbers: StepNumbers
    missed: MissedSteps


def compiled(rule):
    """Return the fields of `Rule` and of `StepNumbers` for a `RowUpdate`, as plain tuples of
    Python's floats.

    Python creates and unpacks its own floats faster than NumPy's.
    """
    l2, weight_decay = (0.0, rule.decay) if rule.decoupled else (rule.decay, 0.0)
    numbers = (
        rule.scale,
        rule.eps,
        l2,
        weight_decay,
        rule.beta1,
        1 - rule.beta1,
        rule.beta2,
        1 - rule.beta2,
    )
    return (KINDS[rule.kind], *map(float, numbers)), step_numbers(rule)


def step_numbers(rule):
    """Return the fields of `StepNumbers` for a `RowUpdate`."""
    first, second = 1 - rule.beta1**rule.step, 1 - rule.beta2**rule.step
    return float(rule.rate), rule.rate / first, second**-0.5


@njit(**BODY)
def rule_of(values):
    """Return the `Rule` with the fields from `compiled`, each rounded once to float32."""
    kind, scale, eps, l2, weight_decay, beta1, rest1, beta2, rest2 = values
    return Rule(
        kind,
        np.float32(scale),
        np.float32(eps),
        np.float32(l2),
        np.float32(weight_decay),
        np.float32(beta1),
        np.float32(rest1),
        np.float32(beta2),
        np.float32(rest2),
    )


@njit(**BODY)
def step_numbers_of(values):
    """Return the `StepNumbers` of the fields from `step_numbers`, each rounded once to float32."""
    rate, step_size, inv_sqrt_bias2 = values
    return StepNumbers(np.float32(rate), np.float32(step_size), np.float32(inv_sqrt_bias2))


@njit(**BODY)
def direction(lanes, rule, weights, place, gradient, at):
    """Return a block of a row's scaled gradient, including the L2 term."""
    literally(lanes)
    block = multiply(broadcast(rule.scale, lanes), load(gradient, at, lanes))
    if rule.l2 != 0:
        block = add(block, multiply(broadcast(rule.l2, lanes), load(weights, place, lanes)))
    return block


@njit(**BODY)
def mean_square(lanes, rule, weights, first, D, gradient, start):
    """Return the mean square of a row's gradient, in the order of `vector.total`: the same bits on
    every machine.
    """
    literally(lanes)
    square_sum = np.float32(0.0)
    for block in range(U(0), D, U(lanes)):
        part = direction(lanes, rule, weights, first + block, gradient, start + block)
        square_sum += total(multiply(part, part))
    return square_sum / np.float32(D)


@njit(**BODY)
def move(lanes, rule, numbers, weights, place, change):
    """Apply decoupled decay, then subtract `change` from ``weights[place:][:lanes]``."""
    literally(lanes)
    block = load(weights, place, lanes)
    if rule.weight_decay != 0:
        block = multiply(broadcast(np.float32(1.0) - numbers.rate * rule.weight_decay, lanes), block)
    store(weights, place, subtract(block, change))


@njit(**BODY)
def blend(lanes, state, place, keep, share, value):
    """Set ``state[place:][:lanes] = keep * state + share * value`` and return the result."""
    literally(lanes)
    decayed = multiply(broadcast(keep, lanes), load(state, place, lanes))
    blended = add(decayed, multiply(broadcast(share, lanes), value))
    store(state, place, blended)
    return blended


@njit(**BODY)
def adagrad_block(lanes, rule, numbers, slots, place, block):
    """Update a block of weights by Adagrad, given the gradient of the block."""
    literally(lanes)
    sums = add(load(slots.full_state, place, lanes), multiply(block, block))
    store(slots.full_state, place, sums)
    scale = add(square_root(sums), broadcast(rule.eps, lanes))
    move(
        lanes,
        rule,
        numbers,
        slots.weights,
        place,
        divide(multiply(broadcast(numbers.rate, lanes), block), scale),
    )


@njit(**BODY)
def adam_block(lanes, rule, numbers, slots, place, state, D, block):
    """Update a block of weights by Adam, with moments at `state` and at `state` + D."""
    literally(lanes)
    first = blend(lanes, slots.full_state, state, rule.beta1, rule.rest1, block)
    second = blend(lanes, slots.full_state, state + D, rule.beta2, rule.rest2, multiply(block, block))
    scale = add(
        multiply(square_root(second), broadcast(numbers.inv_sqrt_bias2, lanes)), broadcast(rule.eps, lanes)
    )
    change = divide(multiply(broadcast(numbers.step_size, lanes), first), scale)
    move(lanes, rule, numbers, slots.weights, place, change)


@njit(**BODY)
def factor_of(lanes, rule, numbers, slots, row, D, gradient, start):
    """Update the state of the row; return the factor of its gradient or first moment."""
    literally(lanes)
    factor, row_state = numbers.rate, slots.row_state
    if rule.kind != SGD:
        square = mean_square(lanes, rule, slots.weights, row * D, D, gradient, start)
        if rule.kind == ROWWISE_ADAGRAD:
            row_state[row] += square
            factor = numbers.rate / (np.sqrt(row_state[row]) + rule.eps)
        else:
            row_state[row] = rule.beta2 * row_state[row] + rule.rest2 * square
            factor = numbers.step_size / (np.sqrt(row_state[row]) * numbers.inv_sqrt_bias2 + rule.eps)
    return factor


@njit(**BODY)
def update_row(lanes, rule, numbers, slots, row, D, gradient, start):
    """Apply the summed gradient ``gradient[start:start + D]`` to row `row` and its state."""
    literally(lanes)
    first, factor = row * D, np.float32(0.0)
    # The rule is constant within a step, so its branches are predicted, and one body serves all
    # five rules.
    if rule.kind == SGD or rule.kind == ROWWISE_ADAGRAD or rule.kind == ROWWISE_ADAM:
        factor = factor_of(lanes, rule, numbers, slots, row, D, gradient, start)
    for block in range(U(0), D, U(lanes)):
        place = first + block
        part = direction(lanes, rule, slots.weights, place, gradient, start + block)
        if rule.kind == ADAGRAD:
            adagrad_block(lanes, rule, numbers, slots, place, part)
        elif rule.kind == ADAM:
            adam_block(lanes, rule, numbers, slots, place, first + place, D, part)
        else:
            if rule.kind == ROWWISE_ADAM:
                part = blend(lanes, slots.full_state, place, rule.beta1, rule.rest1, part)
            move(lanes, rule, numbers, slots.weights, place, multiply(broadcast(factor, lanes), part))


def with_added(kinds, others):
    """Return a compiled `update_row` that also has the added kinds, pairs of number and function;
    `others` has none.
    """
    if not kinds:
        return others
    (code, function), *remaining = kinds
    first, others = njit(**BODY)(function), with_added(remaining, others)

    @njit(**BODY)
    def choose(lanes, rule, numbers, slots, row, D, gradient, start):
        literally(lanes)
        if rule.kind == code:
            first(rule, numbers, slots, row, D, gradient, start)
        else:
            others(lanes, rule, numbers, slots, row, D, gradient, start)

    return choose


update_row = with_added(
    [(KINDS[name], kind.update) for name, kind in ROW_OPTIMIZERS.items() if kind.update], update_row
)


@njit(**BODY)
def apply_missed_to_row(lanes, rule, missed, slots, row, D):
    """Apply the steps that row `row` has missed, one by one, as if they were applied in time."""
    literally(lanes)
    clock = slots.clock
    # One by one. For SGD, the missed decay has a closed form. But reading a row splits its missed
    # steps in two groups, and two products have other bits than one. Adagrad and Adam have no
    # closed form. A clock comes from a record, which is untrusted: a negative clock would read
    # before the first number.
    for step in range(U(max(clock[row], np.int32(0))), U(missed.steps)):
        numbers = StepNumbers(
            missed.numbers[step, U(0)], missed.numbers[step, U(1)], missed.numbers[step, U(2)]
        )
        update_row(lanes, rule, numbers, slots, row, D, missed.still, U(0))
    clock[row] = missed.steps


@njit(**BODY)
def train_row(lanes, step, slots, row, D, gradient, start):
    """Apply missed steps to a row, then the current step."""
    literally(lanes)
    if len(slots.clock):
        # Usually the lookup has applied the missed steps already, unless another batch was trained
        # in between.
        apply_missed_to_row(lanes, step.rule, step.missed, slots, row, D)
        slots.clock[row] += np.int32(1)
    update_row(lanes, step.rule, step.numbers, slots, row, D, gradient, start)


@njit(**BODY)
def prefetch_state(kind, slots, row, D):
    """Prefetch all memory that `train_row` will use."""
    prefetch_row(slots.weights, row * D, D)
    if len(slots.clock):
        prefetch(slots.clock, row)
    if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
        prefetch(slots.row_state, row)
    if kind == ADAGRAD or kind == ROWWISE_ADAM:
        prefetch_row(slots.full_state, row * D, D)
    if kind == ADAM:
        prefetch_row(slots.full_state, U(2) * row * D, U(2) * D)
