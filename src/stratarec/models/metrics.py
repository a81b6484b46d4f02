"""How good scores are: AUC, log loss, normalized entropy, calibration, grouped AUC. All of them over whole splits.

A sample of weight w counts as w samples. A group's weight in the grouped AUC is that of its samples.

A metric is a function of `Samples` and an entry of `METRICS`, at the end: what evaluates, shows, compares and heeds
metrics goes by the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratarec.models.reliability import Bin, Reliability

Floats = NDArray[np.float32] | NDArray[np.float64]


class Samples:
    """What metrics are functions of, and the sums that several of them share.

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
        self, label: Floats, logit: Floats, group: NDArray[np.int64] | None = None, weight: Floats | None = None
    ) -> None:
        self.truth, self.score = np.asarray(label, dtype=np.float64), np.asarray(logit, dtype=np.float64)
        self.group, self.weight = group, weight
        self.scale = np.ones(len(self.truth)) if weight is None else np.asarray(weight, dtype=np.float64)
        self.total = float(self.scale.sum()) or float("nan")

    @cached_property
    def rate(self) -> float:
        """Share of positives."""
        return float((self.scale * self.truth).sum()) / self.total

    @cached_property
    def log_loss(self) -> float:
        """Mean negative log-likelihood, in nats."""
        return float((self.scale * (np.logaddexp(0, self.score) - self.truth * self.score)).sum()) / self.total

    @cached_property
    def reliability(self) -> Reliability:
        """What is predicted and what happens, in cells of logits."""
        return Reliability().add(self.truth, self.score, self.weight)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """An entry of `METRICS`."""

    label: str
    """What people call it."""
    measure: Callable[[Samples], float]
    """Gives NaN where it is not defined."""
    better: Literal["higher", "lower"] | None = None
    """For what early stopping, plateaus and studies may go by."""
    of_both_classes: bool = False
    """Whether it is not defined of positive, or of negative, samples alone."""
    of_users: bool = False
    """Whether it is defined of samples with users alone."""
    compared: bool = True
    """Whether runs are compared by it."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Figures of one evaluation; ``found["auc"]`` is NaN where it is not defined."""

    samples: int
    positives: int
    values: Mapping[str, float]
    """Of each of `METRICS`."""
    reliability: tuple[Bin, ...]
    """What is predicted and what happens, by rising prediction."""

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: None where a figure is not defined."""
        return {
            "samples": self.samples,
            "positives": self.positives,
            **{name: None if math.isnan(value) else value for name, value in self.values.items()},
            "reliability": [each._asdict() for each in self.reliability] or None,
        }


def evaluate_logits(
    label: Floats, logit: Floats, group: NDArray[np.int64] | None = None, weight: Floats | None = None
) -> Metrics:
    """All metrics of `Samples` with these arguments."""
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
    """Metrics of each label: of ``[N]`` where there is one, else of columns of ``[N, T]``, NaN where not known."""
    if label.ndim == 1:
        return {names[0]: evaluate_logits(label, logit, group, weight)}
    found = {}
    for place, name in enumerate(names):
        known = ~np.isnan(label[:, place])
        others = (None if column is None else column[known] for column in (group, weight))
        found[name] = evaluate_logits(label[known, place], logit[known, place], *others)  # type: ignore[arg-type]
    return found


def figures(found: Mapping[str, Metrics]) -> dict[str, Any]:
    """As JSON data: the figures of the first label; of several, those of all under ``labels``."""
    first = next(iter(found.values())).to_dict()
    return first if len(found) == 1 else {**first, "labels": {name: each.to_dict() for name, each in found.items()}}


def normalized_entropy(samples: Samples) -> float:
    """Log loss over that of always predicting the split's own click rate (He et al. 2014); below 1 is better."""
    rate = samples.rate
    if not 0 < rate < 1:
        return float("nan")
    return samples.log_loss / float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def calibration(samples: Samples) -> float:
    """Mean prediction over click rate; 1 is right on average."""
    predicted = samples.scale / (1 + np.exp(-np.clip(samples.score, -80, 80)))
    return float(predicted.sum()) / samples.total / samples.rate if samples.rate > 0 else float("nan")


def auc(label: Floats, score: Floats, weight: Floats | None = None) -> float:
    """Chance that a positive scores above a negative, ties counting half: the area under the ROC curve, counted by
    pairs (Mann and Whitney); NaN with one class."""
    group = np.zeros(len(label), dtype=np.int64)
    return float(_group_auc(label, score, group, weight)[0][0]) if len(label) else float("nan")


def grouped_auc(label: Floats, score: Floats, group: NDArray[np.int64], weight: Floats | None = None) -> float:
    """AUC within each group (user), averaged by the group's samples, groups of one class left out (Zhu et al. 2017);
    NaN when no group has both classes."""
    if not len(label):
        return float("nan")
    areas, sizes = _group_auc(label, score, np.unique(group, return_inverse=True)[1], weight)
    known = ~np.isnan(areas)
    return float(np.average(areas[known], weights=sizes[known])) if known.any() else float("nan")


def _group_auc(
    label: Floats, score: Floats, group: NDArray[np.int64], weight: Floats | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """AUC and weight of each group 0, 1, ..."""
    order = np.lexsort((score, group))
    group, ranked = group[order], np.asarray(score, dtype=np.float64)[order]
    truth = np.asarray(label, dtype=np.float64)[order]
    scale = np.ones(len(order)) if weight is None else np.asarray(weight, dtype=np.float64)[order]
    # Samples of equal score in a group are one tie; each half of it stands above the other.
    tie = np.flatnonzero(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(ranked) != 0)]))
    positive, negative = (np.add.reduceat(part, tie) for part in (scale * truth, scale * (1 - truth)))
    group = group[tie]
    first = np.searchsorted(group, np.arange(int(group[-1]) + 1))
    below = negative.cumsum() - negative
    won = positive * (below - below[first][group] + negative / 2)
    totals = [np.add.reduceat(part, first) for part in (positive, negative, won)]
    pairs = totals[0] * totals[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        areas = np.where(pairs > 0, totals[2] / pairs, np.nan)
    return areas, totals[0] + totals[1]


def _of_groups(samples: Samples) -> float:
    if samples.group is None:
        return float("nan")
    return grouped_auc(samples.truth, samples.score, samples.group, samples.weight)


METRICS = {
    "auc": Metric(
        label="AUC",
        measure=lambda samples: auc(samples.truth, samples.score, samples.weight),
        better="higher",
        of_both_classes=True,
    ),
    "log_loss": Metric(label="log loss", measure=lambda samples: samples.log_loss, better="lower"),
    "normalized_entropy": Metric(label="normalized entropy", measure=normalized_entropy, compared=False),
    "calibration": Metric(label="calibration", measure=calibration),
    "grouped_auc": Metric(label="grouped AUC", measure=_of_groups, of_users=True),
    # The ECE, and what a perfectly calibrated model would have for it, of so few samples.
    "calibration_error": Metric(label="calibration error", measure=lambda samples: samples.reliability.error()[0]),
    "calibration_noise": Metric(
        label="by chance alone", measure=lambda samples: samples.reliability.error()[1], compared=False
    ),
}
"""All metrics by name, in the order in which they are shown."""

WATCHED = tuple(name for name, metric in METRICS.items() if metric.better)
"""Metrics that a run can be told to go by, and that it tells first."""

if TYPE_CHECKING:
    MetricName: TypeAlias = str
else:
    MetricName = Literal[WATCHED]


def goodness(name: str, value: float) -> float:
    """A value of a metric such that more of it is better."""
    return value if METRICS[name].better == "higher" else -value
