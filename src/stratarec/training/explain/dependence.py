"""Partial dependence of numbers (Friedman 2001): the mean prediction where all samples have one value of a number, over
the quantiles of the number; and how its values are spread, since where there are few the curve says little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.models.base import probabilities
from stratarec.progress import Progress
from stratarec.training.explain.contributions import raw_number
from stratarec.training.explain.probe import Column, Probe, rows_of

_POINTS, _BINS = 21, 20
MOST_SAMPLES = 1024
"""Of a curve."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Of one number."""

    feature: str
    log_scale: bool
    """Whether the model takes its logarithm."""
    values: tuple[float, ...]
    """Rising, as in the log: its quantiles, each once."""
    predictions: dict[str, tuple[float, ...]]
    """Label -> mean probability at each of them."""
    edges: tuple[float, ...]
    """Of bins of values, as wide as each other where the model takes them."""
    shares: tuple[float, ...]
    """Of the samples in each bin."""


def dependence(probe: Probe, columns: Sequence[Column], progress: Progress) -> tuple[Curve, ...]:
    """The curve of each number among some columns."""
    numbers = [column for column in columns if column.dense is not None]
    few = rows_of(probe.batch, torch.arange(min(probe.batch.size, MOST_SAMPLES)))
    probe = probe.of(few)
    progress.start("bend", len(numbers), "numbers")
    try:
        found = []
        for column in numbers:
            found.append(_curve(probe, column))
            progress.advance(1)
        return tuple(found)
    finally:
        progress.finish()


def _curve(probe: Probe, column: Column) -> Curve:
    dataset, place = probe.dataset, column.dense
    assert place is not None
    known = probe.batch.dense[:, place].cpu().numpy()
    # Values that there are, so that none lies between whole numbers.
    points = np.unique(np.quantile(known, np.linspace(0, 1, _POINTS), method="nearest"))
    means = np.stack([_mean(probe, probe.scores(probe.with_numbers(column, float(point)))) for point in points])
    counts, edges = np.histogram(known.astype(np.float64), bins=_BINS if len(points) > 1 else 1)
    return Curve(
        feature=column.name,
        log_scale=dataset.schema.dense[place].transform == "log1p",
        values=tuple(raw_number(dataset, place, float(point)) for point in points),
        predictions={
            name: tuple(means[:, number].tolist()) for number, name in enumerate(dataset.schema.label_columns)
        },
        edges=tuple(raw_number(dataset, place, float(edge)) for edge in edges),
        shares=tuple((counts / counts.sum()).tolist()),
    )


def _mean(probe: Probe, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weight = None if probe.batch.weight is None else probe.batch.weight.cpu().numpy()
    if weight is not None and not weight.any():
        weight = None
    found: NDArray[np.float64] = np.average(probabilities(logits).astype(np.float64), axis=0, weights=weight)
    return found
