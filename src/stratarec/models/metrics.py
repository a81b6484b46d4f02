"""How good scores are: AUC, log loss, normalized entropy, calibration, and the order within users. All of them over
whole splits.

A sample of weight w counts as w samples, but for ranks, where it is one sample, or none of weight 0. A group's weight
in the grouped AUC is that of its samples.

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

from stratarec.models.ranking import Doubles, Floats, RankedGroups, mean
from stratarec.models.reliability import Bin, Reliability


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
    def ranked(self) -> RankedGroups | None:
        """In the order of scores within groups; None where there are none."""
        if self.group is None or not self.scale.any():
            return None
        kept = self.scale > 0
        return RankedGroups(self.truth[kept], self.score[kept], self.group[kept], self.scale[kept])

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
    headline: bool = False
    """Whether a run tells it first."""
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
    return float(RankedGroups(label, score, group, weight).areas[0][0]) if len(label) else float("nan")


def _within_users(label: str, measure: Callable[[RankedGroups], tuple[Doubles, Doubles] | Doubles]) -> Metric:
    """The mean of a figure over the users that have it, alike or by their weights."""

    def measured(samples: Samples) -> float:
        if samples.ranked is None:
            return float("nan")
        found = measure(samples.ranked)
        return mean(*found) if isinstance(found, tuple) else mean(found, np.ones(len(found)))

    return Metric(label=label, measure=measured, better="higher", of_both_classes=True, of_users=True)


METRICS = {
    "auc": Metric(
        label="AUC",
        measure=lambda samples: auc(samples.truth, samples.score, samples.weight),
        better="higher",
        headline=True,
        of_both_classes=True,
    ),
    "log_loss": Metric(label="log loss", measure=lambda samples: samples.log_loss, better="lower", headline=True),
    "normalized_entropy": Metric(label="normalized entropy", measure=normalized_entropy, compared=False),
    "calibration": Metric(label="calibration", measure=calibration),
    # Averaged by the users' samples (Zhu et al. 2017), the others by users.
    "grouped_auc": _within_users("grouped AUC", lambda ranked: ranked.areas),
    "ndcg_at_10": _within_users("NDCG@10", lambda ranked: ranked.ndcg(10)),
    "recall_at_10": _within_users("recall@10", lambda ranked: ranked.recall(10)),
    "hit_rate_at_10": _within_users("hit rate@10", lambda ranked: ranked.hit_rate(10)),
    "mrr": _within_users("MRR", lambda ranked: ranked.reciprocal_rank()),
    # The ECE, and what a perfectly calibrated model would have for it, of so few samples.
    "calibration_error": Metric(label="calibration error", measure=lambda samples: samples.reliability.error()[0]),
    "calibration_noise": Metric(
        label="by chance alone", measure=lambda samples: samples.reliability.error()[1], compared=False
    ),
}
"""All metrics by name, in the order in which they are shown."""

WATCHED = tuple(name for name, metric in METRICS.items() if metric.better)
"""Metrics that a run can be told to go by."""
HEADLINES = tuple(name for name, metric in METRICS.items() if metric.headline)

if TYPE_CHECKING:
    MetricName: TypeAlias = str
else:
    MetricName = Literal[WATCHED]


def goodness(name: str, value: float) -> float:
    """A value of a metric such that more of it is better."""
    return value if METRICS[name].better == "higher" else -value
