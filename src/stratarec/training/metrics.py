"""How good scores are: AUC, log loss, normalized entropy, calibration, grouped AUC. All exact, over whole splits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

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

    def to_dict(self) -> dict[str, float | None]:
        """Plain JSON data: None where a figure is not defined."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def evaluate_logits(label: Floats, logit: Floats, group: NDArray[np.int64] | None = None) -> Metrics:
    """Metrics of ``[N]`` logits against ``[N]`` labels of 0 and 1."""
    truth, score = np.asarray(label, dtype=np.float64), np.asarray(logit, dtype=np.float64)
    positives = int(truth.sum())
    rate = positives / len(truth) if len(truth) else float("nan")
    loss = float(np.mean(np.logaddexp(0, score) - truth * score)) if len(truth) else float("nan")
    mean = float(np.mean(1 / (1 + np.exp(-np.clip(score, -80, 80))))) if len(truth) else float("nan")
    return Metrics(
        samples=len(truth),
        positives=positives,
        auc=auc(truth, score),
        log_loss=loss,
        normalized_entropy=loss / _entropy(rate) if 0 < rate < 1 else float("nan"),
        calibration=mean / rate if rate > 0 else float("nan"),
        grouped_auc=float("nan") if group is None else grouped_auc(truth, score, group),
    )


def _entropy(rate: float) -> float:
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def auc(label: Floats, score: Floats) -> float:
    """Area under the ROC curve by mean ranks (Mann and Whitney); NaN with one class."""
    return float(_group_auc(label, score, np.zeros(len(label), dtype=np.int64))[0][0]) if len(label) else float("nan")


def grouped_auc(label: Floats, score: Floats, group: NDArray[np.int64]) -> float:
    """Mean of the groups' AUCs, weighted by samples; NaN when no group has both classes."""
    if not len(label):
        return float("nan")
    areas, sizes = _group_auc(label, score, np.unique(group, return_inverse=True)[1])
    known = ~np.isnan(areas)
    return float(np.average(areas[known], weights=sizes[known])) if known.any() else float("nan")


def _group_auc(label: Floats, score: Floats, group: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """AUC and size of each group 0, 1, ..."""
    order = np.lexsort((score, group))
    group, ranked = group[order], np.asarray(score, dtype=np.float64)[order]
    truth = np.asarray(label, dtype=np.float64)[order]
    groups = int(group[-1]) + 1
    sizes = np.bincount(group, minlength=groups)
    first = np.concatenate([[0], sizes.cumsum()[:-1]])
    # Samples of equal score in a group share the mean of their ranks.
    tie = np.flatnonzero(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(ranked) != 0)]))
    ends = np.concatenate([tie[1:], [len(ranked)]])
    rank = np.repeat((tie + ends + 1) / 2, ends - tie) - first[group]
    positive = np.bincount(group, weights=truth, minlength=groups)
    rank_sum = np.bincount(group, weights=rank * truth, minlength=groups)
    pairs = positive * (sizes - positive)
    with np.errstate(invalid="ignore", divide="ignore"):
        areas = np.where(pairs > 0, (rank_sum - positive * (positive + 1) / 2) / pairs, np.nan)
    return areas, sizes
