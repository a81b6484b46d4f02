"""How far a period is from what came before: its numbers from the run's first log, its AUC from earlier periods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stratarec.data.dataset.dataset import Dataset

_PERIODS = 7
# Of a normal distribution: 95 % lie within.
_WITHIN = 1.96
# Deviations by which the mean of a feature has moved that are worth a line.
_MOVED = 0.5


def dense_drift(dataset: Dataset) -> dict[str, dict[str, float]]:
    """Of each dense feature, after its transform: how many deviations of the run's first log its mean has moved, its
    deviation over that one's, and the share of samples that have it."""
    samples, found = dataset.samples("train"), {}
    for name, first in dataset.about.moments.items():
        now = dataset.about.observed[name]
        found[name] = {
            "shift": (now.mean - first.mean) / first.deviation if now.count else 0.0,
            "spread": now.deviation / first.deviation,
            "known": now.count / max(samples, 1),
        }
    return found


def auc_drift(scores: Mapping[str, Any], earlier: Sequence[float | None]) -> dict[str, float | None]:
    """The interval that holds an AUC of these samples with a chance of 95 % (Hanley and McNeil 1982, as if samples were
    drawn independently), and the mean AUC of the last seven periods before; None where there is none."""
    area, positives = scores["auc"], scores["positives"]
    negatives, known = scores["samples"] - positives, [each for each in earlier[-_PERIODS:] if each is not None]
    if area is None:
        return {"low": None, "high": None, "before": None}
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (positives - 1) * (one - area**2) + (negatives - 1) * (two - area**2)
    half = _WITHIN * math.sqrt(max(spread, 0.0) / (positives * negatives))
    before = sum(known) / len(known) if known else None
    return {"low": max(area - half, 0.0), "high": min(area + half, 1.0), "before": before}


def alarms(period: Mapping[str, Any]) -> list[str]:
    """What is not as it was: an AUC below that of the periods before by more than chance gives, means that moved."""
    auc, found = period["auc"], []
    if auc["before"] is not None and auc["high"] is not None and auc["high"] < auc["before"]:
        area = period["scores"]["all"]["auc"]
        found.append(
            f"AUC is {area:.5f} and was {auc['before']:.5f} in the periods before; by chance it is {auc['low']:.5f} to "
            f"{auc['high']:.5f} here"
        )
    for name, drift in period["dense"].items():
        if abs(drift["shift"]) > _MOVED:
            found.append(f"{name}: its mean has moved by {drift['shift']:+.1f} deviations since the run's first log")
    return found
