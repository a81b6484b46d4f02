"""How far a run has come, and what its evaluations say about going on.

Whether early stopping is over, which checkpoint is best, and how far learning rates have fallen on a plateau are
functions of the evaluations alone, which every checkpoint and every rank has: there is no other state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratarec.models.metrics import goodness
from stratarec.recipe.train_section import EarlyStoppingConfig, PlateauConfig

Evaluation = Mapping[str, Any]
_SMOOTHING = 0.98
KindLosses = tuple[float | None, float | None]
"""Smoothed losses of mixed batches and of hot ones; None before the first of a kind."""


@dataclass
class TrainingState:
    """How far a run has come; all of it is in every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    smoothed_loss: float = 0.0
    finished: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Step and validation metrics of each. The one that only the end of the run was due to is marked ``closing``: a run
    that goes on beyond that end goes on without it."""
    kind_losses: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    """As `losses`, of mixed and of hot batches apart; empty where batches are of no kind."""
    smoothed_by_kind: KindLosses = (None, None)
    train_seconds: float = 0.0
    """Spent in steps, by all sessions of the run, but in the first of each: it may compile kernels."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> its part of `train_seconds`; `wait`, for the next batch; and what other threads did for batches to come:
    `read`, and `bring in`, of rows into level 0."""
    paces: list[tuple[int, float, int]] = field(default_factory=list)
    """As `losses`: step, `train_seconds`, and samples trained in them."""
    trained_samples: int = 0
    untimed_samples: int = 0
    """Of `trained_samples`, those of first steps. Only this, `train_seconds`, `stage_seconds`, `paces`, `threads` and
    `may_differ` differ from run to run."""
    threads: int = 0
    """Threads of the last session; 0 before the first step."""
    may_differ: list[tuple[int, str]] = field(default_factory=list)
    """Steps from which another run of the recipe may differ in its last bits, each with the reason."""

    @property
    def speed(self) -> float:
        """Samples a second; 0 until a step was timed."""
        return (self.trained_samples - self.untimed_samples) / max(self.train_seconds, 1e-9)

    def trained(self, loss: float, samples: int, *, hot: bool | None = None) -> None:
        """Count a step on so many samples, of a `hot` batch or of a mixed one where there are kinds."""
        self.smoothed_loss = _smoothed(self.smoothed_loss if self.step else None, loss)
        mixed, others = self.smoothed_by_kind
        if hot is not None:
            self.smoothed_by_kind = (mixed, _smoothed(others, loss)) if hot else (_smoothed(mixed, loss), others)
        self.step += 1
        self.trained_samples += samples

    @property
    def evaluated(self) -> bool:
        """Whether the last evaluation was of this step."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.step

    def record(self, entry: dict[str, Any], config: EarlyStoppingConfig) -> None:
        """Add an evaluation; of earlier ones only the best keeps its bins, or checkpoints would grow with each."""
        self.evaluations.append(entry)
        shown = (entry, best(self.evaluations, config), best(self.regular, config))
        self.evaluations = [each if any(each is one for one in shown) else _plain(each) for each in self.evaluations]

    @property
    def regular(self) -> list[dict[str, Any]]:
        """Evaluations that do not depend on where the run ended."""
        return [entry for entry in self.evaluations if not entry.get("closing")]

    def needed_steps(self, config: EarlyStoppingConfig) -> set[int]:
        """Steps whose checkpoints are still needed: the best, and the best were the run to go on."""
        chosen = (best(self.evaluations, config), best(self.regular, config))
        return {int(entry["step"]) for entry in chosen if entry is not None}

    def resume(self, total_steps: int, config: EarlyStoppingConfig) -> None:
        """Take up a run that had finished, where its length or its patience now ask for more."""
        if self.finished and self.step < total_steps and not patience_exhausted(self.regular, config):
            self.finished = False
            self.evaluations = self.regular


def _smoothed(before: float | None, loss: float) -> float:
    return loss if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * loss


def best(evaluations: Sequence[Evaluation], config: EarlyStoppingConfig) -> Evaluation | None:
    """The first of the best evaluations; None where the metric is never a number."""
    known = [entry for entry in evaluations if not math.isnan(_goodness(entry, config))]
    return max(known, key=lambda entry: _goodness(entry, config), default=None)


def patience_exhausted(evaluations: Sequence[Evaluation], config: EarlyStoppingConfig) -> bool:
    """Whether as many evaluations as the patience came after the best one; never without patience."""
    found = best(evaluations, config)
    if found is None or not config.patience:
        return False
    later = [entry for entry in evaluations if entry["step"] > found["step"]]
    return len(later) >= config.patience


def _plain(entry: Evaluation) -> dict[str, Any]:
    """An evaluation without the bins of its calibration."""
    found = {key: value for key, value in entry.items() if key != "reliability"}
    labels = {
        name: {k: v for k, v in each.items() if k != "reliability"} for name, each in found.get("labels", {}).items()
    }
    return {**found, "labels": labels} if labels else found


def rate_factor(evaluations: Sequence[Evaluation], config: PlateauConfig) -> float:
    """What learning rates are multiplied by after these evaluations, by the rule of torch's `ReduceLROnPlateau`.

    The evaluations are all that it depends on, and every checkpoint and every rank has them.
    """
    found, highest, worse = 1.0, -math.inf, 0
    for entry in evaluations if config.patience else ():
        goodness = _goodness(entry, config)
        highest, worse = (goodness, 0) if goodness > highest else (highest, worse + 1)
        if worse == config.patience:
            found, worse = max(found * config.factor, config.min_factor), 0
    return found


def _goodness(entry: Evaluation, config: EarlyStoppingConfig | PlateauConfig) -> float:
    value = entry[config.metric]
    return math.nan if value is None else goodness(config.metric, float(value))
