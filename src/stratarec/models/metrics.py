"""Metrics of a complete split: AUC, log loss, normalized entropy, calibration, and ranking within
users.

A sample of weight w counts as w samples. In rankings it counts as one sample, or as none if its
weight is 0. In the grouped AUC, the weight of a group is the total weight of its samples.

A metric is a function of `Samples` and an entry of `METRICS` at the end of this module. Evaluation,
reports, comparisons and early stopping use this list.

Shapes: N samples in G groups; T *ties*, samples of equal score in one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratarec.config.choices import OneOf
from stratarec.registry import Registry

Floats = NDArray[np.float32] | NDArray[np.float64]
Doubles = NDArray[np.float64]
# Name of a metric -> ``[G]`` values, NaN for groups without a value, and ``[G]`` weights of the
# groups in the mean.
Figures: TypeAlias = Mapping[str, tuple[Doubles, Doubles]]

_DRAWS = 500


class RankedGroups:
    """Ranking metrics within groups (users, sessions or slates); the sample with the highest score
    is first.

    Samples with equal scores are in random order, and each metric is its expected value over these
    orders. NDCG (with gain 1 for a positive) is computed as in scikit-learn, the other metrics in
    closed form. Groups without a positive are left out, and for AUC also groups without a negative.

    Parameters
    ----------
    label, score : array
        ``[N]``, labels of 0 and 1; at least one sample.
    group : array
        ``[N]`` group number of each sample.
    weight : array or None
        ``[N]`` weight of each sample, by default 1. Only `areas` uses it; ranks do not depend on
        it.
    """

    def __init__(
        self, label: Floats, score: Floats, group: NDArray[np.int64], weight: Floats | None = None
    ) -> None:
        group = np.unique(group, return_inverse=True)[1]
        order = np.lexsort((score, group))
        group, ranked = group[order], np.asarray(score, dtype=np.float64)[order]
        self._truth = np.asarray(label, dtype=np.float64)[order]
        self._scale = np.ones(len(order)) if weight is None else np.asarray(weight, dtype=np.float64)[order]
        # Ties are in ascending order of group, then of score.
        self._tie = np.flatnonzero(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(ranked) != 0)]))
        self._group = group[self._tie]
        self._first = np.searchsorted(self._group, np.arange(int(group[-1]) + 1))
        self._size = np.diff(self._tie, append=len(order))
        self._positive = np.add.reduceat(self._truth, self._tie)
        self._positives = np.add.reduceat(self._positive, self._first)
        ends = np.cumsum(np.add.reduceat(self._size, self._first))
        # Number of samples of the group above the tie.
        self._above = ends[self._group] - self._tie - self._size

    @cached_property
    def areas(self) -> tuple[Doubles, Doubles]:
        """Return the ``[G]`` AUC of each group (Mann and Whitney), and the total weight of its
        samples.
        """
        positive, negative = (
            np.add.reduceat(part, self._tie)
            for part in (self._scale * self._truth, self._scale * (1 - self._truth))
        )
        below = negative.cumsum() - negative
        # In a tie, half of the pairs count as won.
        won = positive * (below - below[self._first][self._group] + negative / 2)
        totals = [np.add.reduceat(part, self._first) for part in (positive, negative, won)]
        return _ratio(totals[2], totals[0] * totals[1]), totals[0] + totals[1]

    def ndcg(self, at: int) -> Doubles:
        """Return ``[G]`` NDCG of the first `at` samples (Järvelin and Kekäläinen).

        It is their discounted gain, divided by the discounted gain of the best order.
        """
        at = min(at, int(self._size.sum()))
        discount = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, at + 2)))])
        first, last = np.minimum(self._above, at), np.minimum(self._above + self._size, at)
        gained = self._positive / self._size * (discount[last] - discount[first])
        best = discount[np.minimum(self._positives, at).astype(np.int64)]
        return _ratio(np.add.reduceat(gained, self._first), best)

    def recall(self, at: int) -> Doubles:
        """Return, for each group, the share of its positives that are among its first `at`
        samples.
        """
        recalled = self._positive / self._size * self._inside(at)
        return _ratio(np.add.reduceat(recalled, self._first), self._positives)

    def hit_rate(self, at: int) -> Doubles:
        """Return, for each group, the probability that at least one positive is among its first
        `at` samples.
        """
        inside, size, positive = self._inside(at), self._size, self._positive
        none = positive <= size - inside
        # A tie at the limit has only some samples inside. `missed` is the share of the tie's orders
        # in which all of its positives are outside.
        missed = np.exp(
            _log_ways(np.where(none, size - positive, inside), inside)
            - _log_ways(size.astype(np.float64), inside)
        )
        missed = np.where(none, missed, 0.0)
        return np.where(self._positives > 0, 1 - np.multiply.reduceat(missed, self._first), np.nan)

    def reciprocal_rank(self) -> Doubles:
        """Return, for each group, the reciprocal of the rank of its first positive; ranks start at
        1.
        """
        ranks = np.full(len(self._first), np.nan)
        places = np.where(self._positive > 0, np.arange(len(self._tie)), -1)
        best = np.maximum.reduceat(places, self._first)
        rankable = np.flatnonzero(self._positives > 0)
        tie = best[rankable]
        size, positive = self._size[tie], self._positive[tie]
        # The first of p positives among m is at place j in C(m - j, p - 1) of C(m, p) orders.
        choices = (size - positive + 1).astype(np.int64)
        ends = np.cumsum(choices)
        owner = np.repeat(np.arange(len(tie)), choices)
        place = 1 + np.arange(ends[-1] if len(ends) else 0) - (ends - choices)[owner]
        chance = np.exp(
            _log_ways(size[owner] - place, positive[owner] - 1) - _log_ways(size - 1, positive - 1)[owner]
        )
        of_each = np.bincount(owner, chance / (self._above[tie][owner] + place), minlength=len(tie))
        ranks[rankable] = of_each / np.bincount(owner, chance, minlength=len(tie))
        return ranks

    def figures(self, at: int) -> dict[str, tuple[Doubles, Doubles]]:
        """Return all metrics, each with the weights of the groups in its mean.

        For AUC, the weight of a group is the total weight of its samples (Zhu et al. 2017);
        otherwise it is 1.
        """
        equal = np.ones(len(self._first))
        return {
            f"NDCG@{at}": (self.ndcg(at), equal),
            f"recall@{at}": (self.recall(at), equal),
            f"hit rate@{at}": (self.hit_rate(at), equal),
            "MRR": (self.reciprocal_rank(), equal),
            "grouped AUC": self.areas,
        }

    def _inside(self, at: int) -> NDArray[np.int64]:
        """Return, for each tie, how many of its samples are among the first `at` samples of the
        group.
        """
        return np.clip(at - self._above, 0, self._size)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean of a metric over groups, with a 95 % interval from a bootstrap over groups.

    The value is NaN if no group has the metric, and the interval is NaN for a single group.
    """

    value: float
    low: float
    high: float
    groups: int
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Ranking metrics within the groups of one column. `ungrouped` is the number of samples without
    a group.
    """

    groups: int
    ungrouped: int
    figures: Mapping[str, Estimate]


def mean(values: Doubles, weights: Doubles) -> float:
    """Return the weighted mean over groups whose value is not NaN; NaN if there are none."""
    is_known = ~np.isnan(values)
    return (
        float(np.average(values[is_known], weights=weights[is_known]))
        if weights[is_known].sum() > 0
        else float("nan")
    )


def estimates(figures: Figures, seed: int = 0) -> dict[str, Estimate]:
    """Return the mean of each metric with its interval; `seed` makes the bootstrap reproducible."""
    is_known = np.stack([~np.isnan(values) for values, _ in figures.values()])
    weights = np.stack([weights for _, weights in figures.values()]) * is_known
    sums = np.concatenate(
        [np.nan_to_num(np.stack([values for values, _ in figures.values()])) * weights, weights]
    ).T
    draws, groups, drawn = np.random.default_rng(seed), len(sums), np.empty((_DRAWS, sums.shape[1]))
    for place in range(_DRAWS):
        drawn[place] = np.bincount(draws.integers(0, groups, groups), minlength=groups) @ sums
    means = _ratio(drawn[:, : len(figures)], drawn[:, len(figures) :])
    estimated = {}
    for place, (name, (values, weight)) in enumerate(figures.items()):
        count, column = int(is_known[place].sum()), means[:, place]
        column = column[~np.isnan(column)]
        low, high = np.percentile(column, [2.5, 97.5]) if count > 1 and len(column) else (np.nan, np.nan)
        estimated[name] = Estimate(
            value=mean(values, weight),
            low=float(low),
            high=float(high),
            groups=count,
            left_out=groups - count,
        )
    return estimated


def mean_and_error(
    values: Doubles, weight: Doubles, user: NDArray[np.int64] | None = None
) -> tuple[float, float]:
    """Return the weighted mean of values and its standard error, which is NaN for a single
    independent value.

    `user` has the number of the user of each value, from 0. Values of different users are
    independent; those of a user may be alike. Without it, all values are independent.
    """
    if user is not None:
        sums, mass = _sums(user, weight * values), _sums(user, weight)
        return mean_and_error(sums[mass > 0] / mass[mass > 0], mass[mass > 0])
    used = int((weight > 0).sum())
    if not used:
        return math.nan, math.nan
    center = float(np.average(values, weights=weight))
    spread = float(((weight * (values - center)) ** 2).sum()) * used / (used - 1) if used > 1 else math.nan
    return center, math.sqrt(spread) / float(weight.sum())


def _sums(user: NDArray[np.int64], column: Doubles) -> Doubles:
    """Return the sum of a column for each user."""
    return np.bincount(user, column).astype(np.float64)


def _log_ways(of: NDArray[Any], chosen: NDArray[Any]) -> Doubles:
    """Return the logarithm of the number of ways to choose `chosen` items from `of` items."""
    from scipy.special import gammaln  # importing it takes a tenth of a second

    ways: Doubles = gammaln(of + 1.0) - gammaln(chosen + 1.0) - gammaln(of - chosen + 1.0)
    return ways


def _ratio(part: Doubles, total: Doubles) -> Doubles:
    """Return ``part / total``, NaN where `total` is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, part / total, np.nan)


# Number of bins, unless there are too few samples.
MOST_BINS = 20
_LEAST_SAMPLES = 50
_CELLS_PER_LOGIT, _HIGHEST = 256, 16
_CELLS = 2 * _HIGHEST * _CELLS_PER_LOGIT
# Number of samples that are added at a time, which limits memory.
_AT_ONCE = 1 << 18
Z95 = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""


class Bin(NamedTuple):
    """Bin of samples with similar logits: its share of the total weight, mean prediction, and rate
    of positives.

    `low` and `high` are the 95 % interval of the rate (Wilson 1927) for the effective number of
    samples (Kish 1965).
    """

    samples: int
    share: float
    predicted: float
    observed: float
    low: float
    high: float


class Reliability:
    """Predictions and observed rates in bins of equal weight, and the expected calibration error
    (ECE).

        ECE = sum_b m_b |p_b - y_b|

    The sum is over bins b of samples with similar logits: m_b is the bin's share of the total
    weight, p_b its mean prediction and y_b its rate of positives (Naeini et al. 2015; bins of equal
    weight as in Nguyen and O'Connor 2015).

    Samples are summed in cells that are 1/256 of a logit wide. Only these sums are stored, so
    memory does not depend on the number of samples. A bin consists of whole cells: the means of a
    bin are exact, and only its limits are rounded.

    *Bias.* Labels scatter around their probabilities, so even a perfectly calibrated model has an
    expected ECE of

        sum_b sqrt(2 / pi) sqrt(sum_i w_i^2 p_i (1 - p_i)) / sum_i w_i

    (the mean absolute value of a normal variable). The inner sum is over the samples of a bin, the
    denominator over all samples. This value is reported next to the ECE, which is only meaningful
    if it is clearly larger.
    """

    def __init__(self) -> None:
        # Sums of a cell: samples, weights, weights of positives, weighted probabilities, squares of
        # weights, and variances of the labels if the probabilities were right.
        self.sums = np.zeros((6, _CELLS))

    def add(self, label: Floats, logit: Floats, weight: Floats | None = None) -> Reliability:
        """Add ``[N]`` samples with labels 0 or 1 and weights, by default 1; return this object."""
        for first in range(0, len(label), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self._add(
                label[part], np.asarray(logit[part], np.float64), None if weight is None else weight[part]
            )
        return self

    def _add(self, label: Floats, logit: NDArray[np.float64], weight: Floats | None) -> None:
        cell = np.clip(np.floor(logit * _CELLS_PER_LOGIT) + _CELLS // 2, 0, _CELLS - 1).astype(np.int64)
        probability = 1 / (1 + np.exp(-np.clip(logit, -80, 80)))
        scale = np.ones(len(logit)) if weight is None else np.asarray(weight, dtype=np.float64)
        squares = scale * scale
        variance = squares * probability * (1 - probability)
        columns = (scale > 0, scale, scale * label, scale * probability, squares, variance)
        for sums, column in zip(self.sums, columns, strict=True):
            sums += np.bincount(cell, weights=column, minlength=_CELLS)

    def bins(self, most: int = MOST_BINS) -> tuple[Bin, ...]:
        """Return at most `most` bins of about equal weight; fewer if a bin would have less than 50
        samples.
        """
        return tuple(_bin(sums, self.sums[1].sum()) for sums in self._by_bin(most).T)

    def error(self) -> tuple[float, float]:
        """Return the ECE, and the expected ECE of a perfectly calibrated model; NaN if there are no
        samples.
        """
        bins = self._by_bin(MOST_BINS)
        total = bins[1].sum()
        if not total:
            return math.nan, math.nan
        chance = math.sqrt(2 / math.pi) * np.sqrt(bins[5]).sum()
        return float(np.abs(bins[3] - bins[2]).sum() / total), float(chance / total)

    def _by_bin(self, most: int) -> NDArray[np.float64]:
        """Return the ``[6, bins]`` sums of all bins with samples."""
        samples, mass = self.sums[:2]
        total = mass.sum()
        if not total:
            return np.zeros((6, 0))
        bins = max(min(int(samples.sum()) // _LEAST_SAMPLES, most), 1)
        # The middle of a cell decides its bin, so a cell with more than the weight of a bin becomes
        # a separate bin.
        middle = (mass.cumsum() - mass / 2) / total
        place = np.minimum((middle * bins).astype(np.int64), bins - 1)
        totals = np.stack(
            [np.bincount(place, weights=sums, minlength=bins).astype(np.float64) for sums in self.sums]
        )
        filled: NDArray[np.float64] = totals[:, totals[1] > 0]
        return filled


def _bin(sums: NDArray[np.float64], total: float) -> Bin:
    samples, mass, positive, probability, squares, _ = map(float, sums)
    rate = min(positive / mass, 1.0)
    worth = mass * mass / squares
    center = (rate + Z95**2 / (2 * worth)) / (1 + Z95**2 / worth)
    half = Z95 / (1 + Z95**2 / worth) * math.sqrt(rate * (1 - rate) / worth + (Z95 / (2 * worth)) ** 2)
    return Bin(
        samples=int(samples),
        share=mass / float(total),
        predicted=probability / mass,
        observed=rate,
        low=max(center - half, 0.0),
        high=min(center + half, 1.0),
    )


class Samples:
    """Samples of a split, which metrics take as their argument. Sums that several metrics use are
    cached.

    Parameters
    ----------
    label, logit : array
        ``[N]``, labels of 0 and 1.
    group : array or None
        ``[N]`` user of each sample.
    weight : array or None
        ``[N]``, 0 or more, by default 1 each.
    """

    def __init__(
        self,
        label: Floats,
        logit: Floats,
        group: NDArray[np.int64] | None = None,
        weight: Floats | None = None,
    ) -> None:
        self.truth = np.asarray(label, dtype=np.float64)
        self.score = np.asarray(logit, dtype=np.float64)
        self.group = group
        self.weight = weight
        self.scale = np.ones(len(self.truth)) if weight is None else np.asarray(weight, dtype=np.float64)
        self.total = float(self.scale.sum()) or float("nan")

    @cached_property
    def user(self) -> NDArray[np.int64] | None:
        """``[N]`` number of each sample's user, from 0; None without users."""
        return None if self.group is None else np.unique(self.group, return_inverse=True)[1]

    @cached_property
    def rate(self) -> float:
        """Share of positives."""
        return float((self.scale * self.truth).sum()) / self.total

    @cached_property
    def losses(self) -> Doubles:
        """``[N]`` negative log-likelihood of each sample, in nats."""
        return np.logaddexp(0, self.score) - self.truth * self.score

    @cached_property
    def log_loss(self) -> float:
        """Mean negative log-likelihood."""
        return float((self.scale * self.losses).sum()) / self.total

    @cached_property
    def placements(self) -> Doubles:
        """``[N]`` share of the other class's samples that are in the right order with a sample;
        ties count half.

        The mean over the positives is the AUC, and so is the mean over the negatives. NaN if a
        class has no samples.
        """
        tie = np.unique(self.score, return_inverse=True)[1]
        positive, negative = (np.bincount(tie, self.scale * part) for part in (self.truth, 1 - self.truth))
        below = _ratio(negative.cumsum() - negative / 2, negative.sum())
        above = 1 - _ratio(positive.cumsum() - positive / 2, positive.sum())
        return np.where(self.truth > 0, below[tie], above[tie])

    @cached_property
    def auc(self) -> float:
        """Area under the ROC curve by pairs (Mann and Whitney); ties count half. NaN if a class has
        no samples.
        """
        positive = self.truth > 0
        return mean_and_error(self.placements[positive], self.scale[positive])[0]

    def auc_error(self, placements: Doubles) -> float:
        """Return the standard error of an AUC, given the `placements` of its samples.

        For the standard error of the difference of two AUCs, pass the difference of their
        placements. The placements of the two classes are independent, so their variances add up
        (DeLong et al. 1988). With users, the parts of each user in both classes are added first
        (Obuchowski 1997).
        """
        parts = np.zeros(len(placements))
        for chosen in (self.truth > 0, self.truth <= 0):
            share = self.scale[chosen] / (self.scale[chosen].sum() or math.nan)
            parts[chosen] = share * (placements[chosen] - share @ placements[chosen])
        sums, mass = parts, self.scale
        if self.user is not None:
            sums, mass = _sums(self.user, parts), _sums(self.user, mass)
        used = np.count_nonzero(mass > 0)
        return math.sqrt(float(sums @ sums) * used / (used - 1)) if used > 1 else math.nan

    @cached_property
    def ranked(self) -> RankedGroups | None:
        """Ranking within groups; None without groups."""
        if self.group is None or not self.scale.any():
            return None
        used = self.scale > 0
        return RankedGroups(self.truth[used], self.score[used], self.group[used], self.scale[used])

    @cached_property
    def reliability(self) -> Reliability:
        """Sums of predictions and labels in cells of logits."""
        return Reliability().add(self.truth, self.score, self.weight)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """An entry of `METRICS`.

    Parameters
    ----------
    about : str
        What the metric is, for the reference page.
    label : str
        Name in reports; empty if reports do not list the metric.
    measure : callable
        Returns the value, or NaN if the metric is not defined for the samples.
    better : str or None
        Whether higher or lower values are better. None for metrics that early stopping and studies
        cannot use.
    headline : bool
        Whether a run shows the metric among its main results.
    of_both_classes : bool
        Whether the metric needs positive and negative samples.
    of_users : bool
        Whether the metric needs samples with users.
    compared : bool
        Whether ``compare`` shows the metric.
    error : str
        Name of the metric that is the standard error of this one. Reports show both together.
    """

    about: str
    label: str
    measure: Callable[[Samples], float]
    better: Literal["higher", "lower"] | None = None
    headline: bool = False
    of_both_classes: bool = False
    of_users: bool = False
    compared: bool = True
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Results of one evaluation: values of all `METRICS`, NaN if undefined, and calibration bins in
    ascending order.
    """

    samples: int
    positives: int
    values: Mapping[str, float]
    reliability: tuple[Bin, ...]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with None for undefined values."""
        return {
            "samples": self.samples,
            "positives": self.positives,
            **{name: None if math.isnan(value) else value for name, value in self.values.items()},
            "reliability": [part._asdict() for part in self.reliability] or None,
        }


def evaluate_logits(
    label: Floats, logit: Floats, group: NDArray[np.int64] | None = None, weight: Floats | None = None
) -> Metrics:
    """Return all metrics; the arguments are those of `Samples`."""
    samples = Samples(label, logit, group, weight)
    return Metrics(
        samples=len(samples.truth),
        positives=int(samples.truth.sum()),
        values={name: metric.measure(samples) for name, metric in METRICS.items()},
        reliability=samples.reliability.bins(),
    )


def evaluate_labels(
    names: Sequence[str],
    label: Floats,
    logit: Floats,
    group: NDArray[np.int64] | None = None,
    weight: Floats | None = None,
) -> dict[str, Metrics]:
    """Return the metrics of each label. Arrays are ``[N]`` for one label, else ``[N, T]``; an
    unknown label is NaN.
    """
    if label.ndim == 1:
        return {names[0]: evaluate_logits(label, logit, group, weight)}
    metrics = {}
    for place, name in enumerate(names):
        is_known = ~np.isnan(label[:, place])
        others = (None if column is None else column[is_known] for column in (group, weight))
        metrics[name] = evaluate_logits(label[is_known, place], logit[is_known, place], *others)  # type: ignore[arg-type]
    return metrics


def figures(metrics: Mapping[str, Metrics]) -> dict[str, Any]:
    """Return the metrics of the first label as JSON data; with several labels, ``labels`` has the
    metrics of each.
    """
    first = next(iter(metrics.values())).to_dict()
    return (
        first
        if len(metrics) == 1
        else {**first, "labels": {name: m.to_dict() for name, m in metrics.items()}}
    )


def normalized_entropy(samples: Samples) -> float:
    """Return the log loss divided by the log loss of predicting the split's click rate (He et al.
    2014).
    """
    rate = samples.rate
    if not 0 < rate < 1:
        return float("nan")
    return samples.log_loss / float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def entropy_error(samples: Samples) -> float:
    """Return the standard error of the normalized entropy, from each sample's loss minus that of
    the base rate.
    """
    rate = samples.rate
    if not 0 < rate < 1:
        return float("nan")
    constant: Doubles = np.where(samples.truth > 0, -np.log(rate), -np.log1p(-rate))
    error = mean_and_error(samples.losses - constant, samples.scale, samples.user)[1]
    return error / float(np.average(constant, weights=samples.scale))


def calibration(samples: Samples) -> float:
    """Return the mean prediction divided by the click rate; 1 means that predictions are right on
    average.
    """
    predicted = samples.scale / (1 + np.exp(-np.clip(samples.score, -80, 80)))
    return float(predicted.sum()) / samples.total / samples.rate if samples.rate > 0 else float("nan")


def _within_users(
    about: str, label: str, measure: Callable[[RankedGroups], tuple[Doubles, Doubles] | Doubles]
) -> Metric:
    """Return a metric that is a mean over users; `measure` returns a value per user, and weights
    unless all are 1.
    """

    def measured(samples: Samples) -> float:
        if samples.ranked is None:
            return float("nan")
        values = measure(samples.ranked)
        return mean(*values) if isinstance(values, tuple) else mean(values, np.ones(len(values)))

    return Metric(
        about=about, label=label, measure=measured, better="higher", of_both_classes=True, of_users=True
    )


METRICS = Registry(
    "metric",
    {
        "auc": Metric(
            about="Probability that a positive sample has a higher score than a "
            "negative one; 0.5 is chance.",
            label="AUC",
            measure=lambda samples: samples.auc,
            better="higher",
            headline=True,
            of_both_classes=True,
            error="auc_error",
        ),
        "auc_error": Metric(
            about="Standard error of the AUC.",
            label="",
            measure=lambda samples: samples.auc_error(samples.placements),
            compared=False,
        ),
        "log_loss": Metric(
            about="Mean of -log of the probability that was predicted for the observed label.",
            label="log loss",
            measure=lambda samples: samples.log_loss,
            better="lower",
            headline=True,
        ),
        "normalized_entropy": Metric(
            about="Log loss divided by that of always predicting the rate of positives; below 1 is better.",
            label="normalized entropy",
            measure=normalized_entropy,
            compared=False,
            error="entropy_error",
        ),
        "entropy_error": Metric(
            about="Standard error of the normalized entropy.",
            label="",
            measure=entropy_error,
            compared=False,
        ),
        "calibration": Metric(
            about="Sum of predictions divided by the number of positives; at 1.1 the model "
            "predicts a tenth too many.",
            label="calibration",
            measure=calibration,
        ),
        # A mean weighted by the users' samples (Zhu et al. 2017). In the other metrics, all users
        # have the same weight.
        "grouped_auc": _within_users(
            "AUC within each user, weighted by the user's samples; users of one class are left out.",
            "grouped AUC",
            lambda ranked: ranked.areas,
        ),
        "ndcg_at_10": _within_users(
            "Order of each user's first ten; 1 if all positives come first.",
            "NDCG@10",
            lambda ranked: ranked.ndcg(10),
        ),
        "recall_at_10": _within_users(
            "Share of a user's positives that are among the first ten.",
            "recall@10",
            lambda ranked: ranked.recall(10),
        ),
        "hit_rate_at_10": _within_users(
            "Share of users with a positive among the first ten.",
            "hit rate@10",
            lambda ranked: ranked.hit_rate(10),
        ),
        "mrr": _within_users(
            "Mean over users of 1 / place of the first positive.",
            "MRR",
            lambda ranked: ranked.reciprocal_rank(),
        ),
        "calibration_error": Metric(
            about="Mean distance of predicted from observed rates over bins of equal weight (ECE).",
            label="calibration error",
            measure=lambda samples: samples.reliability.error()[0],
        ),
        "calibration_noise": Metric(
            about="Calibration error that a perfect model would have with so few samples.",
            label="by chance alone",
            measure=lambda samples: samples.reliability.error()[1],
            compared=False,
        ),
    },
)
"""All metrics by name, in the order of reports."""


def watched() -> tuple[str, ...]:
    """Return the metrics that early stopping may use."""
    return tuple(name for name, metric in METRICS.items() if metric.better)


def headlines() -> tuple[str, ...]:
    """Return the metrics that a run shows among its main results."""
    return tuple(name for name, metric in METRICS.items() if metric.headline)


MetricName: TypeAlias = Annotated[str, OneOf(watched)]
"""Name of a metric that early stopping may use."""


def goodness(name: str, value: float) -> float:
    """Return the value of a metric, negated if lower is better, so that higher is always better."""
    return value if METRICS[name].better == "higher" else -value
