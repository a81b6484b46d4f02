"""What a row optimizer does to one row and its state, for Numba kernels.

Every function works in blocks of `lanes`, a constant of each compiled kernel. Nothing is contracted or reassociated: a
row's bits follow from its own bits, its gradient and the step's numbers, wherever the row lies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import U, prefetch, prefetch_row
from stratarec.kernels.simd.vector import add, broadcast, divide, load, multiply, square_root, store, subtract, total

SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM, ADAM = range(5)
KINDS = {
    "sgd": SGD, "rowwise_adagrad": ROWWISE_ADAGRAD, "adagrad": ADAGRAD, "rowwise_adam": ROWWISE_ADAM, "adam": ADAM,
}  # fmt: skip


class Slots(NamedTuple):
    """Rows and their state.

    Parameters
    ----------
    weights : ndarray
        ``[R * D]``.
    row_state, full_state : ndarray
        ``[R]`` and ``[R * k * D]``, k floats a weight of which the first ones of all weights of a row come first; of
        any size where the rule keeps no such state. Both float32, as the weights are.
    clock : ndarray
        ``[R]`` int32, the steps that each row has taken; empty where a step changes the rows of its batch alone.
    """

    weights: NDArray[np.float32]
    row_state: NDArray[np.float32]
    full_state: NDArray[np.float32]
    clock: NDArray[np.int32]


class Rule(NamedTuple):
    """A row optimizer's numbers: those of every step.

    `l2` is weight decay added to the gradient, `weight_decay` the decoupled form; at least one of them is 0. `rest1` is
    1 - beta1, rounded once: 1 minus a rounded beta is off by 1e-5 of itself.
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
    """A step's own numbers.

    `step_size` is the rate divided by Adam's first bias correction 1 - beta1^t, `inv_sqrt_bias2` is
    (1 - beta2^t)^-0.5.
    """

    rate: np.float32
    step_size: np.float32
    inv_sqrt_bias2: np.float32


class MissedSteps(NamedTuple):
    """Steps that rows may have missed: how many there were, the numbers of each, and the gradient of a missed step."""

    steps: int
    paces: NDArray[np.float32]
    still: NDArray[np.float32]


class Step(NamedTuple):
    """All that a row's step takes but its gradient."""

    rule: Rule
    pace: StepNumbers
    missed: MissedSteps


def compiled(rule):
    """A `RowUpdate`, as `rule_of` and `pace_in` take it: Python's floats are made and unpacked faster than NumPy's."""
    l2, weight_decay = (0.0, rule.decay) if rule.decoupled else (rule.decay, 0.0)
    numbers = (rule.scale, rule.eps, l2, weight_decay, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2)
    return (KINDS[rule.kind], *map(float, numbers)), pace_of(rule)


def pace_of(rule):
    """The numbers of a `RowUpdate`'s step."""
    first, second = 1 - rule.beta1**rule.step, 1 - rule.beta2**rule.step
    return float(rule.rate), rule.rate / first, second**-0.5


@njit(**BODY)
def rule_of(given):
    """`Rule` of the floats that `compiled` gives, rounded once."""
    kind, scale, eps, l2, weight_decay, beta1, rest1, beta2, rest2 = given
    return Rule(
        kind, np.float32(scale), np.float32(eps), np.float32(l2), np.float32(weight_decay), np.float32(beta1),
        np.float32(rest1), np.float32(beta2), np.float32(rest2),
    )  # fmt: skip


@njit(**BODY)
def pace_in(given):
    """`StepNumbers`, likewise."""
    rate, step_size, inv_sqrt_bias2 = given
    return StepNumbers(np.float32(rate), np.float32(step_size), np.float32(inv_sqrt_bias2))


@njit(**BODY)
def direction(lanes, rule, weights, place, gradient, at):
    """A block of a row's gradient, the L2 term within."""
    literally(lanes)
    found = multiply(broadcast(rule.scale, lanes), load(gradient, at, lanes))
    if rule.l2 != 0:
        found = add(found, multiply(broadcast(rule.l2, lanes), load(weights, place, lanes)))
    return found


@njit(**BODY)
def mean_square(lanes, rule, weights, first, D, gradient, start):
    """Mean of squares, block after block, each in `vector.total`'s order: the same bits on every machine."""
    literally(lanes)
    found = np.float32(0.0)
    for block in range(U(0), D, U(lanes)):
        part = direction(lanes, rule, weights, first + block, gradient, start + block)
        found += total(multiply(part, part))
    return found / np.float32(D)


@njit(**BODY)
def move(lanes, rule, pace, weights, place, change):
    """``weights[place:][:lanes] -= change``, after decoupled decay."""
    literally(lanes)
    kept = load(weights, place, lanes)
    if rule.weight_decay != 0:
        kept = multiply(broadcast(np.float32(1.0) - pace.rate * rule.weight_decay, lanes), kept)
    store(weights, place, subtract(kept, change))


@njit(**BODY)
def blend(lanes, state, place, keep, rest, found):
    """``state[place:][:lanes] = keep * itself + rest * found``; returns it."""
    literally(lanes)
    kept = multiply(broadcast(keep, lanes), load(state, place, lanes))
    blended = add(kept, multiply(broadcast(rest, lanes), found))
    store(state, place, blended)
    return blended


@njit(**BODY)
def adagrad_block(lanes, rule, pace, slots, place, found):
    """Adagrad's step of a block whose gradient is `found`."""
    literally(lanes)
    sums = add(load(slots.full_state, place, lanes), multiply(found, found))
    store(slots.full_state, place, sums)
    scale = add(square_root(sums), broadcast(rule.eps, lanes))
    move(lanes, rule, pace, slots.weights, place, divide(multiply(broadcast(pace.rate, lanes), found), scale))


@njit(**BODY)
def adam_block(lanes, rule, pace, slots, place, state, D, found):
    """Adam's step of a block: the moments of a slot lie one behind the other, the block's own from `state` on."""
    literally(lanes)
    first = blend(lanes, slots.full_state, state, rule.beta1, rule.rest1, found)
    second = blend(lanes, slots.full_state, state + D, rule.beta2, rule.rest2, multiply(found, found))
    scale = add(multiply(square_root(second), broadcast(pace.inv_sqrt_bias2, lanes)), broadcast(rule.eps, lanes))
    move(lanes, rule, pace, slots.weights, place, divide(multiply(broadcast(pace.step_size, lanes), first), scale))


@njit(**BODY)
def factor_of(lanes, rule, pace, slots, row, D, gradient, start):
    """What a whole row's gradient, or its first moment, is multiplied by; the row's state takes the gradient in."""
    literally(lanes)
    factor, row_state = pace.rate, slots.row_state
    if rule.kind != SGD:
        square = mean_square(lanes, rule, slots.weights, row * D, D, gradient, start)
        if rule.kind == ROWWISE_ADAGRAD:
            row_state[row] += square
            factor = pace.rate / (np.sqrt(row_state[row]) + rule.eps)
        else:
            row_state[row] = rule.beta2 * row_state[row] + rule.rest2 * square
            factor = pace.step_size / (np.sqrt(row_state[row]) * pace.inv_sqrt_bias2 + rule.eps)
    return factor


@njit(**BODY)
def update_row(lanes, rule, pace, slots, row, D, gradient, start):
    """Apply one summed gradient ``gradient[start:start + D]`` to row `row` and its state."""
    literally(lanes)
    first, factor = row * D, np.float32(0.0)
    # The rule is one of a few constants a step: the tests are predicted, and one body serves all five.
    if rule.kind == SGD or rule.kind == ROWWISE_ADAGRAD or rule.kind == ROWWISE_ADAM:
        factor = factor_of(lanes, rule, pace, slots, row, D, gradient, start)
    for block in range(U(0), D, U(lanes)):
        place = first + block
        found = direction(lanes, rule, slots.weights, place, gradient, start + block)
        if rule.kind == ADAGRAD:
            adagrad_block(lanes, rule, pace, slots, place, found)
        elif rule.kind == ADAM:
            adam_block(lanes, rule, pace, slots, place, first + place, D, found)
        else:
            if rule.kind == ROWWISE_ADAM:
                found = blend(lanes, slots.full_state, place, rule.beta1, rule.rest1, found)
            move(lanes, rule, pace, slots.weights, place, multiply(broadcast(factor, lanes), found))


@njit(**BODY)
def apply_missed_steps(lanes, rule, missed, slots, row, D):
    """Take the steps that row `row` has missed, one by one, as they would have been taken."""
    literally(lanes)
    clock = slots.clock
    # One by one: the missed decay of SGD has a closed form, but a row that is read in between has its gap cut in two,
    # and two products have other bits than one. Adagrad and Adam have no such form.
    # A clock comes from a record, which may be anybody's: below 0 it would read in front of the numbers.
    for step in range(U(max(clock[row], np.int32(0))), U(missed.steps)):
        pace = StepNumbers(missed.paces[step, U(0)], missed.paces[step, U(1)], missed.paces[step, U(2)])
        update_row(lanes, rule, pace, slots, row, D, missed.still, U(0))
    clock[row] = missed.steps


@njit(**BODY)
def train_row(lanes, step, slots, row, D, gradient, start):
    """`update_row` of a row that has taken every step before this one."""
    literally(lanes)
    if len(slots.clock):
        # As a rule it has them from when it was looked up; not where another batch was trained in between.
        apply_missed_steps(lanes, step.rule, step.missed, slots, row, D)
        slots.clock[row] += np.int32(1)
    update_row(lanes, step.rule, step.pace, slots, row, D, gradient, start)


@njit(**BODY)
def prefetch_state(kind, slots, row, D):
    """Ask for all that `train_row` will touch."""
    prefetch_row(slots.weights, row * D, D)
    if len(slots.clock):
        prefetch(slots.clock, row)
    if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
        prefetch(slots.row_state, row)
    if kind == ADAGRAD or kind == ROWWISE_ADAM:
        prefetch_row(slots.full_state, row * D, D)
    if kind == ADAM:
        prefetch_row(slots.full_state, U(2) * row * D, U(2) * D)
