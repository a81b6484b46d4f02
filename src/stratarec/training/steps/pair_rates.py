"""Choose pairs of columns whose click rates say more than the rates of both columns, and compute
the rates.

A pair is chosen by a score test (Rao 1948): how much the log likelihood of training samples would
improve if the logit of the pair's rate were added to a logistic regression on the rates of all
columns. The rate of a training sample's values is computed without the part of the samples that
contains the sample, so that no sample sees its own label.

Shapes: N samples, S categorical columns, C columns, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.trees import CODES
from stratarec.kernels.trees.pair_rates import PairRates, no_pairs, pair_codes

# To compute a value's click rate, _STRENGTH samples with the mean rate are added to its samples.
# Training samples are divided into _PARTS parts; the rate of a training sample is computed without
# the samples of its part.
_STRENGTH, _PARTS = 3.0, 10
# Maximum numbers of columns that are tried, of samples that the choice uses, and of pairs that are
# chosen.
_COLUMNS, _SAMPLES, PAIRS = 24, 50_000, 8
# A dense feature with more values has no codes. A pair of columns with more pairs of codes has no
# rates.
_VALUES, _CODE_PAIRS = 255, 1 << 18
# Improvement of the log likelihood, in nats, below which a pair is not chosen. The best of 276
# pairs without effect reaches about 6.
_LEAST_GAIN = 10.0
_STEPS = 8

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Codes = NDArray[np.int64]


class ClickRates(NamedTuple):
    """Click rates of codes: for new samples, and for the samples that they were computed from."""

    by_code: Doubles
    """``[codes]``."""
    by_sample: Doubles
    """``[N]`` rate of each sample's code in the other parts."""


class Labels:
    """Labels of training samples, and a random part of each.

    Parameters
    ----------
    label, weight : ndarray
        ``[N]``.
    seed : int
        Seed of the random parts.
    """

    def __init__(self, label: NDArray[Any], weight: NDArray[Any], seed: int) -> None:
        self.label = label.astype(np.float64)
        self.weight = weight.astype(np.float64)
        self.mean = float(np.average(self.label, weights=self.weight))
        """Share of positive samples, by weight."""
        self.part = np.random.default_rng(seed).integers(0, _PARTS, len(label))
        """``[N]`` part of each sample."""
        self._clicks = self.label * self.weight

    def rates(self, code: Codes, size: int) -> ClickRates:
        """Return the click rates of codes below `size`; `code` is ``[N]``, one per sample."""
        clicks, samples = (np.bincount(code, column, size) for column in (self._clicks, self.weight))
        positive, total = (
            sums_of_other_parts(code, self.part, column) for column in (self._clicks, self.weight)
        )
        prior = _STRENGTH * self.mean
        return ClickRates(
            (clicks + prior) / (samples + _STRENGTH), (positive + prior) / (total + _STRENGTH)
        )

    def sample(self, chosen: NDArray[np.int64]) -> Labels:
        """Return the labels of some samples, with their parts and the mean of all; all weights of
        them may be 0.
        """
        labels = copy(self)
        labels.label = self.label[chosen]
        labels.weight = self.weight[chosen]
        labels.part = self.part[chosen]
        labels._clicks = self._clicks[chosen]
        return labels


def sums_of_other_parts(code: NDArray[Any], part: NDArray[Any], column: NDArray[Any]) -> Doubles:
    """Return for each sample the column's sum over samples of its code in other parts."""
    part_code = part * (code.max(initial=0) + 1) + code
    sums: Doubles = np.bincount(code, column)[code] - np.bincount(part_code, column)[part_code]
    return sums


def choose_pairs(rows: Floats, labels: Labels, categorical: Sequence[bool]) -> PairRates:
    """Return the pairs of columns that improve the likelihood most, without rates.

    Parameters
    ----------
    rows : ndarray
        ``[N, C]``.
    labels : Labels
        Labels of the N samples.
    categorical : sequence of bool
        For each of the first S columns whether it is a code; the others of them are lengths of
        lists.
    """
    if len(rows) > _SAMPLES:
        chosen = np.random.default_rng(0).choice(len(rows), _SAMPLES, replace=False)
        rows, labels = rows[chosen], labels.sample(chosen)
    codes, edges = _codes_of(rows, categorical)
    if len(codes) < 2 or labels.mean in (0.0, 1.0):
        return no_pairs()
    sizes = {column: int(code.max()) + 1 for column, code in codes.items()}
    logits = {column: _logit(labels.rates(code, sizes[column]).by_sample) for column, code in codes.items()}
    base = np.stack([np.ones(len(rows)), *logits.values()], axis=1)
    probability = _fit_regression(base, labels)
    slope = labels.weight * probability * (1 - probability)
    residual = labels.weight * (labels.label - probability)
    gains = {}
    for first, second in combinations(codes, 2):
        key = codes[first] * sizes[second] + codes[second]
        _, key, counts = np.unique(key, return_inverse=True, return_counts=True)
        # A pair whose codes occur once has no rates; a column that the other one determines adds
        # nothing.
        if len(counts) > _CODE_PAIRS or len(counts) in (len(rows), sizes[first], sizes[second]):
            continue
        logit = _logit(labels.rates(key, len(counts)).by_sample)
        predictors = np.stack([base[:, 0], logits[first], logits[second]], axis=1)
        weighted = predictors.T * slope
        new = logit - predictors @ np.linalg.lstsq(weighted @ predictors, weighted @ logit, rcond=None)[0]
        if (variance := float(slope @ new**2)) > 0:
            gains[first, second] = float(residual @ new) ** 2 / (2 * variance)
    best = sorted(gains, key=lambda pair: -gains[pair])[:PAIRS]
    pairs = np.array(
        [(*pair, labels.mean) for pair in best if gains[pair] > _LEAST_GAIN], np.float32
    ).reshape(-1, 3)
    used = [
        np.stack([np.full(len(edges[column]), column), edges[column]], axis=1)
        for column in sorted(set(pairs[:, :2].ravel().astype(int).tolist()))
        if column in edges
    ]
    none = no_pairs()
    return PairRates(pairs, none.rates, np.concatenate([none.edges, *used]).astype(np.float32))


def fit_pairs(
    rows: Floats, labels: Labels, chosen: PairRates, categorical: int
) -> tuple[PairRates, Floats]:
    """Return the click rates of chosen pairs, and for each training sample the rates of its codes,
    ``[N, P]``.

    Parameters
    ----------
    rows : ndarray
        ``[N, C]``.
    labels : Labels
        Labels of the N samples.
    chosen : PairRates
        Rates that it has are not used.
    categorical : int
        S.
    """
    tables, columns = [chosen.rates[:0]], np.empty((len(rows), len(chosen.pairs)), np.float32)
    for place, (first, second) in enumerate(pair_codes(rows, chosen, categorical)):
        key, code, counts = np.unique(first * CODES + second, return_inverse=True, return_counts=True)
        rates = labels.rates(code, len(counts))
        columns[:, place] = rates.by_sample
        table = np.stack([np.full(len(key), place), key // CODES, key % CODES, rates.by_code], axis=1)
        tables.append(table.astype(np.float32))
    pairs = chosen.pairs.copy()
    pairs[:, 2] = labels.mean
    return PairRates(pairs, np.concatenate(tables), chosen.edges), columns


def _codes_of(rows: Floats, categorical: Sequence[bool]) -> tuple[dict[int, Codes], dict[int, Floats]]:
    """Return the codes of columns that pairs may use, and the edges of dense columns, by column."""
    codes, edges, sizes = {}, {}, {}
    for column, numbers in enumerate(rows.T):
        is_dense = column >= len(categorical)
        if not is_dense and not categorical[column]:
            continue
        values, code = np.unique(numbers, return_inverse=True)
        if len(values) > 1 and (not is_dense or len(values) <= _VALUES):
            codes[column], sizes[column] = code, (not is_dense, len(values))
            if is_dense:
                edges[column] = values[1:]
    # Categories with many values first: trees themselves find combinations of few values.
    most = sorted(sorted(sizes, key=lambda column: sizes[column], reverse=True)[:_COLUMNS])
    return {column: codes[column] for column in most}, edges


def _fit_regression(columns: Doubles, labels: Labels) -> Doubles:
    """Return the probabilities of a logistic regression, ``[N]``, fitted by Newton's method."""
    weights, ridge = np.zeros(columns.shape[1]), np.eye(columns.shape[1])
    for _ in range(_STEPS):
        probability = 1 / (1 + np.exp(-columns @ weights))
        slope = labels.weight * probability * (1 - probability)
        gradient = columns.T @ (labels.weight * (labels.label - probability)) - weights
        weights = weights + np.linalg.solve((columns.T * slope) @ columns + ridge, gradient)
    return 1 / (1 + np.exp(-columns @ weights))


def _logit(rate: Doubles) -> Doubles:
    return np.log(rate) - np.log1p(-rate)
