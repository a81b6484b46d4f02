"""How good scores are: AUC, log loss, normalized entropy, calibration, grouped AUC. All of them over whole splits.

A sample of weight w counts as w samples. A group's weight in the grouped AUC is that of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.training.evaluation.reliability import Bin, Reliability

Floats = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Figures of one evaluation; NaN where they are not defined."""

    samples: int
    positives: int
    auc: float
    """Chance that a positive scores above a negative, ties counting half."""
    log_loss: float
    """Mean negative log-likelihood, in nats."""
    normalized_entropy: float
    """Log loss over that of always predicting the split's own click rate (He et al. 2014); below 1 is better."""
    calibration: float
    """Mean prediction over click rate; 1 is right on average."""
    grouped_auc: float
    """AUC within each group (user), averaged by the group's samples, groups of one class left out (Zhu et al. 2017)."""
    calibration_error: float
    """ECE over the bins of `reliability`."""
    calibration_noise: float
    """What a perfectly calibrated model would have for it, of so few samples."""
    reliability: tuple[Bin, ...]
    """What is predicted and what happens, by rising prediction."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: None where a figure is not defined."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "reliability"}
        found = {name: None if math.isnan(value) else value for name, value in values.items()}
        return {**found, "reliability": [each._asdict() for each in self.reliability] or None}


def evaluate_logits(
    label: Floats, logit: Floats, group: NDArray[np.int64] | None = None, weight: Floats | None = None
) -> Metrics:
    """Metrics of ``[N]`` logits against ``[N]`` labels of 0 and 1; `weight` ``[N]``, 0 or more, by default 1 each."""
    truth, score = np.asarray(label, dtype=np.float64), np.asarray(logit, dtype=np.float64)
    scale = np.ones(len(truth)) if weight is None else np.asarray(weight, dtype=np.float64)
    total = float(scale.sum()) or float("nan")
    rate = float((scale * truth).sum()) / total
    loss = float((scale * (np.logaddexp(0, score) - truth * score)).sum()) / total
    mean = float((scale / (1 + np.exp(-np.clip(score, -80, 80)))).sum()) / total
    reliability = Reliability().add(truth, score, weight)
    error, noise = reliability.error()
    return Metrics(
        samples=len(truth),
        positives=int(truth.sum()),
        auc=auc(truth, score, weight),
        log_loss=loss,
        normalized_entropy=loss / _entropy(rate) if 0 < rate < 1 else float("nan"),
        calibration=mean / rate if rate > 0 else float("nan"),
        grouped_auc=float("nan") if group is None else grouped_auc(truth, score, group, weight),
        calibration_error=error,
        calibration_noise=noise,
        reliability=reliability.bins(),
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


def _entropy(rate: float) -> float:
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def auc(label: Floats, score: Floats, weight: Floats | None = None) -> float:
    """Area under the ROC curve, counted by pairs (Mann and Whitney); NaN with one class."""
    group = np.zeros(len(label), dtype=np.int64)
    return float(_group_auc(label, score, group, weight)[0][0]) if len(label) else float("nan")


def grouped_auc(label: Floats, score: Floats, group: NDArray[np.int64], weight: Floats | None = None) -> float:
    """Mean of the groups' AUCs, weighted by samples; NaN when no group has both classes."""
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
