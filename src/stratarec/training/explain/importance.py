"""Permutation importance (Breiman 2001; Fisher, Rudin and Dominici 2019): how much worse the
metrics become if the values of one feature are permuted among the samples.

For each sample, the loss is averaged over the repeats, and so is the sample's part of the AUC,
which is the share of samples of the other class that are ranked correctly relative to this sample.
The change of a metric is the mean of the differences per sample. Its 95 % interval covers the
choice of samples, or of users, and permutations; for the AUC it is computed as in DeLong et al.
(1988). Features with the same information share their importance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.models.metrics import Z95, Samples, mean_and_error
from stratarec.progress import Progress
from stratarec.training.explain.probe import Column, Probe

Doubles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Mean change of a metric. Its 95 % interval is `value - margin` to `value + margin`. NaN if it
    is undefined.
    """

    value: float
    margin: float


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
    """Labels, weights and users of the samples in which one label is known."""

    def __init__(
        self, label: NDArray[np.float32], weight: NDArray[np.float32] | None, user: NDArray[np.int64] | None
    ) -> None:
        is_known = ~np.isnan(label) & (True if weight is None else weight > 0)
        self.rows = np.flatnonzero(is_known)
        self.label = (label[self.rows] > 0).astype(np.float64)
        self.weight = np.ones(len(self.rows)) if weight is None else weight[self.rows].astype(np.float64)
        self.user = None if user is None else user[self.rows]

    def scored(self, logit: NDArray[np.float32]) -> Samples:
        """Return the samples, scored by ``[N]`` logits of all samples."""
        return Samples(self.label, logit[self.rows], self.user, self.weight)


def importance(
    probe: Probe,
    columns: Sequence[Column],
    *,
    repeats: int,
    seed: int,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> dict[str, LabelImportance]:
    """Return, for each label, the importance of each column, from `repeats` permutations per
    column.

    Equal seeds give equal results. `check` is called before each permutation and may raise to stop
    the computation.
    """
    batch, names = probe.batch, probe.dataset.schema.label_columns
    labels = batch.label.cpu().numpy().reshape(batch.size, -1).T
    weight = None if batch.weight is None else batch.weight.cpu().numpy()
    user = None if batch.user is None else batch.user.cpu().numpy()
    truths = [_Truth(label, weight, user) for label in labels]
    before = _scored(truths, probe.scores())
    importances: list[list[Importance]] = [[] for _ in names]
    progress.start("permute", len(columns) * repeats, "times")
    try:
        for place, column in enumerate(columns):
            totals = [(np.zeros(len(truth.rows)), np.zeros(len(truth.rows))) for truth in truths]
            for repeat in range(repeats):
                check()
                order = np.random.default_rng([seed, place, repeat]).permutation(batch.size)
                after = _scored(truths, probe.scores(probe.permuted(column, order)))
                for (losses, placements), samples in zip(totals, after, strict=True):
                    losses += samples.losses / repeats
                    placements += samples.placements / repeats
                progress.advance(1)
            for entries, samples, (more, fewer) in zip(importances, before, totals, strict=True):
                entries.append(
                    Importance(
                        feature=column.name,
                        auc_drop=_auc_drop(samples, fewer),
                        log_loss_rise=_log_loss_rise(samples, more),
                    )
                )
    finally:
        progress.finish()
    return {
        name: LabelImportance(
            samples=len(truth.rows),
            auc=samples.auc,
            log_loss=samples.log_loss,
            columns=tuple(sorted(entries, key=_worth)),
        )
        for name, truth, samples, entries in zip(names, truths, before, importances, strict=True)
    }


def _worth(item: Importance) -> tuple[float, str]:
    value = item.log_loss_rise.value if math.isnan(item.auc_drop.value) else item.auc_drop.value
    return -value, item.feature


def _scored(truths: Sequence[_Truth], logits: NDArray[np.float32]) -> list[Samples]:
    return [truth.scored(logit) for truth, logit in zip(truths, logits.T, strict=True)]


def _auc_drop(samples: Samples, placements: Doubles) -> Change:
    """Return the AUC of `samples` minus the AUC with other `placements`."""
    drop, positive = samples.placements - placements, samples.truth > 0
    value = mean_and_error(drop[positive], samples.scale[positive])[0]
    return Change(value=value, margin=Z95 * samples.auc_error(drop))


def _log_loss_rise(samples: Samples, losses: Doubles) -> Change:
    """Return the log loss with other `losses` minus the log loss of `samples`."""
    value, error = mean_and_error(losses - samples.losses, samples.scale, samples.user)
    return Change(value=value, margin=Z95 * error)
