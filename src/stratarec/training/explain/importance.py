"""Permutation importance (Breiman 2001; Fisher, Rudin and Dominici 2019): how much worse the metrics become if the
values of one feature are permuted among the samples.

For each sample, the loss is averaged over the repeats, and so is the sample's part of the AUC, which is the share of
samples of the other class that are ranked correctly relative to this sample. The change of a metric is the mean of the
differences per sample. Its 95 % interval covers the choice of samples and permutations; for the AUC it is computed as
in DeLong et al. (1988). Features with the same information share their importance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.models.metrics import Samples
from stratarec.progress import Progress
from stratarec.training.explain.probe import Column, Probe

Doubles = NDArray[np.float64]
_QUANTILE = 1.959964


@dataclass(frozen=True, kw_only=True)
class Change:
    """Mean change of a metric. Its 95 % interval is `value - margin` to `value + margin`. NaN if it is undefined."""

    value: float
    margin: float

    @classmethod
    def of(cls, parts: Sequence[tuple[Doubles, Doubles]]) -> Change:
        """Return a change from pairs of values and weights.

        All parts must have the same weighted mean. The variance of the change is the sum of the parts' variances.
        """
        if not parts or any(weight.sum() <= 0 for _, weight in parts):
            return cls(value=math.nan, margin=math.nan)
        means = [float(np.average(values, weights=weight)) for values, weight in parts]
        shares = [weight / weight.sum() for _, weight in parts]
        variance = sum(
            float((share**2 * (values - mean) ** 2).sum())
            for share, mean, (values, _) in zip(shares, means, parts, strict=True)
        )
        return cls(value=means[0], margin=_QUANTILE * math.sqrt(variance))


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Importance of one feature for one label."""

    feature: str
    auc_drop: Change
    log_loss_rise: Change


@dataclass(frozen=True, kw_only=True)
class LabelImportance:
    """Importance of all features for one label, with the most important feature first."""

    samples: int
    auc: float
    log_loss: float
    columns: tuple[Importance, ...]


class _Truth:
    """Labels and weights of the samples in which one label is known."""

    def __init__(self, label: NDArray[np.float32], weight: NDArray[np.float32] | None) -> None:
        is_known = ~np.isnan(label) & (True if weight is None else weight > 0)
        self.rows = np.flatnonzero(is_known)
        self.label = (label[self.rows] > 0).astype(np.float64)
        self.weight = np.ones(len(self.rows)) if weight is None else weight[self.rows].astype(np.float64)

    def split(self, values: Doubles) -> list[tuple[Doubles, Doubles]]:
        """Return the values and weights of the samples of each class; an empty list if there is only one class."""
        parts = [(values[self.label == item], self.weight[self.label == item]) for item in (True, False)]
        return parts if all(len(part) for part, _ in parts) else []


def importance(
    probe: Probe,
    columns: Sequence[Column],
    *,
    repeats: int,
    seed: int,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> dict[str, LabelImportance]:
    """Return, for each label, the importance of each column, from `repeats` permutations per column.

    Equal seeds give equal results. `check` is called before each permutation and may raise to stop the computation.
    """
    batch, names = probe.batch, probe.dataset.schema.label_columns
    labels = batch.label.cpu().numpy().reshape(batch.size, -1).T
    weight = None if batch.weight is None else batch.weight.cpu().numpy()
    truths = [_Truth(label, weight) for label in labels]
    before = _figures(truths, probe.scores())
    importances: list[list[Importance]] = [[] for _ in names]
    progress.start("permute", len(columns) * repeats, "times")
    try:
        for place, column in enumerate(columns):
            totals = [(np.zeros_like(losses), np.zeros_like(sides)) for losses, sides in before]
            for repeat in range(repeats):
                check()
                order = np.random.default_rng([seed, place, repeat]).permutation(batch.size)
                for total, after in zip(
                    totals, _figures(truths, probe.scores(probe.permuted(column, order))), strict=True
                ):
                    for sums, values in zip(total, after, strict=True):
                        sums += values / repeats
                progress.advance(1)
            for truth, entries, (losses, sides), (more, fewer) in zip(truths, importances, before, totals, strict=True):
                entries.append(
                    Importance(
                        feature=column.name,
                        auc_drop=Change.of(truth.split(sides - fewer)),
                        log_loss_rise=Change.of([(more - losses, truth.weight)]),
                    )
                )
    finally:
        progress.finish()
    return {
        name: LabelImportance(
            samples=len(truth.rows),
            auc=Change.of(truth.split(sides)).value,
            log_loss=Change.of([(losses, truth.weight)]).value,
            columns=tuple(sorted(entries, key=_worth)),
        )
        for name, truth, (losses, sides), entries in zip(names, truths, before, importances, strict=True)
    }


def _worth(item: Importance) -> tuple[float, str]:
    value = item.log_loss_rise.value if math.isnan(item.auc_drop.value) else item.auc_drop.value
    return -value, item.feature


def _figures(truths: Sequence[_Truth], logits: NDArray[np.float32]) -> list[tuple[Doubles, Doubles]]:
    """Return, for each label, the losses of the samples and their parts of the AUC."""
    columns = zip(truths, logits.T, strict=True)
    samples = (Samples(truth.label, logit[truth.rows], weight=truth.weight) for truth, logit in columns)
    return [(of_label.losses, of_label.placements) for of_label in samples]
