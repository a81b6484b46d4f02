"""An online logistic model of values and pairs of values, which tests each pair of features while
it learns.

The logit of a sample is the sum of numbers times their weights, of a weight of each feature's
value, and, for each pair of features, of the weight of their two values (a *cell*). Each weight has
a Gaussian belief. A sample moves its mean and raises its precision (assumed-density filtering with
a diagonal covariance, as in AdPredictor, Graepel et al. 2010), so there is no learning rate, no
second pass, and weak pairs are learned as fast as strong ones. The products of a factorization
machine start near zero and needed several times as many samples.

A cell's weight counts without the means of its row and its column, which are effects of one value.
The term of a pair is multiplied by a *gate* in [0, 1]: the slope of recent labels on the term. So
pairs without interaction add no noise.

A pair is tested on each sample before it learns from the sample. With residual r, including the
pair's own term t, and w = p (1 - p), the sum of r t has mean 0 and variance sum of w t^2 if the
features do not interact and all other terms are right.

Shapes: B samples, F features, P = F (F - 1) / 2 pairs (0, 1), (0, 2), ..., K codes of a feature's
values, Q numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Number of samples after which a gate forgets, and the means of rows and columns.
_GATE_SAMPLES, _MEAN_SAMPLES = 20_000.0, 500.0
# Prior precisions of weights of values and numbers, and the variance of the logit that all pairs
# share a priori.
_VALUE_PRECISION, _NUMBER_PRECISION, _PAIR_VARIANCE = 4.0, 1.0, 4.0


class ProbeState(NamedTuple):
    """Beliefs of the model, and sums of its tests."""

    numbers: Floats
    """``[2, Q]`` means and precisions."""
    values: Floats
    """``[3, F, K]`` means, precisions and numbers of samples."""
    cells: NDArray[np.float32]
    """``[2, P, K, K]`` means and precisions."""
    margins: NDArray[np.float32]
    """``[2, P, K]`` means of cells by the first and by the second value."""
    centers: Floats
    """``[P]`` means of all cells."""
    gates: Floats
    """``[3, P]`` gates, and decaying sums of r t and of w t^2."""
    tests: Floats
    """``[2, 2, P]`` sums of r t and of w t^2 in each half of the samples."""


def new_state(features: int, codes: int, numbers: int) -> ProbeState:
    """Return the beliefs before the first sample.

    Parameters
    ----------
    features, codes, numbers : int
        Number of features F, of codes of a feature's values K, and of numbers Q.
    """
    pairs = features * (features - 1) // 2
    state = ProbeState(
        numbers=np.zeros((2, numbers)), values=np.zeros((3, features, codes)),
        cells=np.zeros((2, pairs, codes, codes), np.float32), margins=np.zeros((2, pairs, codes), np.float32),
        centers=np.zeros(pairs), gates=np.zeros((3, pairs)), tests=np.zeros((2, 2, pairs)),
    )  # fmt: skip
    state.numbers[1], state.values[1] = _NUMBER_PRECISION, _VALUE_PRECISION
    state.cells[1], state.gates[2] = max(pairs, 1) / _PAIR_VARIANCE, 1.0
    return state


def observe(
    state: ProbeState, codes: NDArray[np.int64], numbers: Floats, labels: Floats, *, pairs: bool = True
) -> tuple[float, float]:
    """Test and then learn from samples, one after the other. Even and odd samples are the two
    halves of the tests.

    Parameters
    ----------
    state : ProbeState
        Beliefs and tests, which change.
    codes : ndarray
        ``[B, F]`` int64 codes of values, from 0 to K - 1.
    numbers : ndarray
        ``[B, Q]``; a column of ones has the bias as its weight.
    labels : ndarray
        ``[B]``, 0 or 1.
    pairs : bool
        Whether pairs take part. Weights of values should be learned first.

    Returns
    -------
    tuple of float
        Sums of the log losses before learning, and of w.
    """
    if codes.size and not 0 <= codes.min() <= codes.max() < state.values.shape[2]:
        raise ValueError(
            f"codes are {codes.min()} to {codes.max()}, expected 0 to {state.values.shape[2] - 1}"
        )
    count = len(state.centers) if pairs else 0
    return _observe(state, codes, numbers, labels, count, np.zeros(count), np.zeros(count))


@njit(nogil=True, cache=True)
def _observe(state, codes, inputs, labels, pairs, terms, spreads):
    """Test and learn; `terms` and `spreads` are buffers ``[pairs]`` for the terms of a sample and
    their variances.
    """
    numbers, values, cells, margins, centers, gates, tests = state
    features, loss, total = codes.shape[1], 0.0, 0.0
    for sample in range(len(labels)):
        logit, variance, k = 0.0, 0.0, 0
        for q in range(inputs.shape[1]):
            logit += numbers[0, q] * inputs[sample, q]
            variance += inputs[sample, q] ** 2 / numbers[1, q]
        for f in range(features):
            logit += values[0, f, codes[sample, f]]
            variance += 1 / values[1, f, codes[sample, f]]
        for i in range(features if pairs else 0):
            a = codes[sample, i]
            for j in range(i + 1, features):
                b = codes[sample, j]
                terms[k] = cells[0, k, a, b] - margins[0, k, a] - margins[1, k, b] + centers[k]
                spreads[k] = 1 / cells[1, k, a, b]
                logit += gates[0, k] * terms[k]
                variance += gates[0, k] * spreads[k]
                k += 1
        p = 1 / (1 + math.exp(-logit))
        residual, w = labels[sample] - p, p * (1 - p)
        loss += math.log1p(math.exp(-abs(logit))) + max(logit, 0.0) - labels[sample] * logit
        total += w
        gain = residual / (1 + w * variance)
        for q in range(inputs.shape[1]):
            numbers[0, q] += gain * inputs[sample, q] / numbers[1, q]
            numbers[1, q] += w * inputs[sample, q] ** 2
        for f in range(features):
            a = codes[sample, f]
            values[0, f, a] += gain / values[1, f, a]
            values[1, f, a] += w
            values[2, f, a] += 1
        k = 0
        for i in range(features if pairs else 0):
            a = codes[sample, i]
            for j in range(i + 1, features):
                b = codes[sample, j]
                t = terms[k]
                gate = gates[0, k]
                spread = spreads[k]
                score, information = (residual + w * gate * t) * t, w * t * t
                tests[sample % 2, 0, k] += score
                tests[sample % 2, 1, k] += information
                gates[1, k] += score - gates[1, k] / _GATE_SAMPLES
                gates[2, k] += information - (gates[2, k] - 1) / _GATE_SAMPLES
                gates[0, k] = min(max(gates[1, k] / gates[2, k], 0.0), 1.0)
                # The part of the term that the gate keeps from the logit still counts as known to
                # the cell.
                cell = cells[0, k, a, b] + spread * (gain - w * (1 - gate) * t / (1 + w * spread))
                cells[0, k, a, b] = cell
                cells[1, k, a, b] += w
                margins[0, k, a] += (cell - margins[0, k, a]) / min(values[2, i, a], _MEAN_SAMPLES)
                margins[1, k, b] += (cell - margins[1, k, b]) / min(values[2, j, b], _MEAN_SAMPLES)
                centers[k] += (cell - centers[k]) / _MEAN_SAMPLES
                k += 1
    return loss, total


def reference_observe(
    state: ProbeState, codes: NDArray[np.int64], numbers: Floats, labels: Floats
) -> tuple[float, float]:
    """Do the same as `observe` with pairs, all pairs of a sample at once."""
    first, second = np.triu_indices(codes.shape[1], 1)
    features = np.arange(codes.shape[1])
    pair = np.arange(len(first))
    loss = 0.0
    total = 0.0
    for place, (code, x, label) in enumerate(zip(codes, numbers, labels, strict=True)):
        a, b = code[first], code[second]
        gate, spread = state.gates[0].copy(), 1.0 / state.cells[1, pair, a, b]
        t = (
            state.cells[0, pair, a, b]
            - state.margins[0, pair, a]
            - state.margins[1, pair, b]
            + state.centers
        )
        logit = x @ state.numbers[0] + state.values[0, features, code].sum() + gate @ t
        variance = (
            (x**2 / state.numbers[1]).sum() + (1 / state.values[1, features, code]).sum() + gate @ spread
        )
        p = 1 / (1 + np.exp(-logit))
        residual, w = label - p, p * (1 - p)
        loss, total = loss - np.log(p if label else 1 - p), total + w
        gain = residual / (1 + w * variance)
        state.numbers[0] += gain * x / state.numbers[1]
        state.numbers[1] += w * x**2
        state.values[0, features, code] += gain / state.values[1, features, code]
        state.values[1, features, code] += w
        state.values[2, features, code] += 1
        step = np.stack([(residual + w * gate * t) * t, w * t**2])
        state.tests[place % 2] += step
        state.gates[1:] += step - (state.gates[1:] - [[0], [1]]) / _GATE_SAMPLES
        state.gates[0] = np.clip(state.gates[1] / state.gates[2], 0, 1)
        state.cells[0, pair, a, b] += spread * (gain - w * (1 - gate) * t / (1 + w * spread))
        state.cells[1, pair, a, b] += w
        cell = state.cells[0, pair, a, b]
        for side, (feature, value) in enumerate(((first, a), (second, b))):
            counts = np.minimum(state.values[2, feature, value], _MEAN_SAMPLES)
            state.margins[side, pair, value] += (cell - state.margins[side, pair, value]) / counts
        state.centers[:] += (cell - state.centers) / _MEAN_SAMPLES
    return float(loss), float(total)
