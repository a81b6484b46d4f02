"""State of a training run: its position, curves and evaluations, and the decisions that follow from
evaluations.

Every checkpoint and every rank has the evaluations. Early stopping, the best checkpoint and the
factor on learning rates after plateaus are computed from them, so these decisions need no state of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stratarec.models.metrics import goodness
from stratarec.recipe.train_section import EarlyStoppingConfig, PlateauConfig

Evaluation = Mapping[str, Any]
Phase = Literal["train", "refit"]
_SMOOTHING = 0.98


@dataclass
class TrainingState:
    """Position, curves and evaluations of a run. Every checkpoint contains this state."""

    phase: Phase = "train"
    """``refit`` while a tested model is trained on validation and test samples, too."""
    base: str = ""
    """Hash of ``state.json`` of the tested checkpoint from which a refit starts."""
    step: int = 0
    """Number of steps of the phase so far."""
    epoch: int = 0
    batch: int = 0
    smoothed_loss: float = 0.0
    finished: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Step and validation metrics of each evaluation. An evaluation that takes place only because
    the run ends is marked ``closing``; it is removed if the run is later resumed beyond that
    end."""
    train_seconds: float = 0.0
    """Seconds of all timed steps in all sessions. A session's first step is not timed: it may
    compile kernels.
    """
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Part of a step -> seconds. Parts of the training thread, such as `wait` (for the next batch),
    are parts of `train_seconds`. The parts `read` and `bring in` (fetching rows into level 0) run
    on other threads at the same time."""
    paces: list[tuple[int, float, int]] = field(default_factory=list)
    """At several steps: the step, `train_seconds` until then, and the number of samples trained in
    these seconds.
    """
    trained_samples: int = 0
    untimed_samples: int = 0
    """Number of samples in steps that are not timed. Only this number, `train_seconds`,
    `stage_seconds`, `paces`, `threads` and `may_differ` may differ between two runs of a recipe."""
    threads: int = 0
    """Number of threads at the start of the last session; 0 before the first step."""
    may_differ: list[tuple[int, str]] = field(default_factory=list)
    """Steps after which another run may differ in its last bits, each with the reason."""

    @property
    def speed(self) -> float:
        """Samples per second in timed steps; 0 until a step is timed."""
        return (self.trained_samples - self.untimed_samples) / max(self.train_seconds, 1e-9)

    def count_step(self, samples: int) -> None:
        """Add a step with `samples` samples to the counts."""
        self.step += 1
        self.trained_samples += samples

    def add_loss(self, step: int, loss: float) -> None:
        """Add the loss of a step, counted from 0, to the smoothed loss."""
        self.smoothed_loss = loss if not step else _SMOOTHING * self.smoothed_loss + (1 - _SMOOTHING) * loss

    @property
    def evaluated(self) -> bool:
        """Whether the current step was evaluated."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.step

    def record(self, entry: dict[str, Any], config: EarlyStoppingConfig) -> None:
        """Add an evaluation. To keep checkpoints small, calibration bins and members are removed
        from all evaluations except this one and the best ones.
        """
        self.evaluations.append(entry)
        shown = (entry, best(self.evaluations, config), best(self.regular, config))
        self.evaluations = [
            evaluation if any(evaluation is one for one in shown) else _plain(evaluation)
            for evaluation in self.evaluations
        ]

    @property
    def regular(self) -> list[dict[str, Any]]:
        """All evaluations that are not marked ``closing``."""
        return [entry for entry in self.evaluations if not entry.get("closing")]

    def needed_steps(self, config: EarlyStoppingConfig) -> set[int]:
        """Return the steps with checkpoints that must be kept: the best one now, and the best one
        if the run is resumed.
        """
        chosen = (best(self.evaluations, config), best(self.regular, config))
        return {int(entry["step"]) for entry in chosen if entry is not None}

    def resume(self, total_steps: int, config: EarlyStoppingConfig) -> None:
        """Mark a finished run as unfinished if the recipe's length or patience now ask for more."""
        if self.finished and self.step < total_steps and not patience_exhausted(self.regular, config):
            self.finished = False
            self.evaluations = self.regular


def best(evaluations: Sequence[Evaluation], config: EarlyStoppingConfig) -> Evaluation | None:
    """Return the best evaluation, the first of equal ones; None if the metric is always NaN."""
    comparable = [entry for entry in evaluations if not math.isnan(_goodness(entry, config))]
    return max(comparable, key=lambda entry: _goodness(entry, config), default=None)


# Networks of an ensemble whose weights sum to less than this do not change its scores.
_NO_WEIGHT = 0.02


def patience_exhausted(evaluations: Sequence[Evaluation], config: EarlyStoppingConfig) -> bool:
    """Return whether at least `config.patience` evaluations followed the best one; false if
    patience is 0.

    In an ensemble, at least half of the networks must not have improved in these evaluations
    either: while trees have most of the weight, the ensemble does not improve although its networks
    do.
    """
    chosen = best(evaluations, config)
    if chosen is None or not config.patience:
        return False
    if networks_are_unused(evaluations, config):
        return True
    improved: int = max(chosen["step"], evaluations[-1].get("networks_improved", 0))
    return len([entry for entry in evaluations if entry["step"] > improved]) >= config.patience


def networks_are_unused(evaluations: Sequence[Evaluation], config: EarlyStoppingConfig) -> bool:
    """Return whether an ensemble's networks had no weight in the last `patience` evaluations."""
    last = evaluations[-config.patience :] if config.patience else ()
    return len(last) == config.patience > 0 and all(
        entry.get("networks_weight", 1.0) < _NO_WEIGHT for entry in last
    )


def _plain(entry: Evaluation) -> dict[str, Any]:
    """Return an evaluation without its calibration bins and members."""
    fields = {key: value for key, value in entry.items() if key not in ("reliability", "members")}
    labels = {
        name: {k: v for k, v in metrics.items() if k != "reliability"}
        for name, metrics in fields.get("labels", {}).items()
    }
    return {**fields, "labels": labels} if labels else fields


def rate_factor(evaluations: Sequence[Evaluation], config: PlateauConfig) -> float:
    """Return the factor on learning rates after these evaluations, by `ReduceLROnPlateau`."""
    factor, highest, worse = 1.0, -math.inf, 0
    for entry in evaluations if config.patience else ():
        goodness = _goodness(entry, config)
        highest, worse = (goodness, 0) if goodness > highest else (highest, worse + 1)
        if worse == config.patience:
            factor, worse = max(factor * config.factor, config.min_factor), 0
    return factor


def _goodness(entry: Evaluation, config: EarlyStoppingConfig | PlateauConfig) -> float:
    # With samples of a single class, the most extreme scores have the lowest log loss.
    value = None if entry.get("normalized_entropy", 0.0) is None else entry[config.metric]
    return math.nan if value is None else goodness(config.metric, float(value))
