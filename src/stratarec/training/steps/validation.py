"""Evaluation of a run on the validation split, and the curves of training and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.models import CTRModel
from stratarec.models.metrics import METRICS, figures, headlines
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.curve_writers import CurveWriters
from stratarec.reporting.metric_texts import by_label, show_with_interval
from stratarec.training.evaluate import ScoredSamples, corrected_by, fit, measured, score_split
from stratarec.training.steps.cadence import Stopped
from stratarec.training.steps.members import BestMembers
from stratarec.training.steps.state import TrainingState, best, networks_are_unused, patience_exhausted
from stratarec.training.steps.step import WeightAverage


@dataclass(frozen=True)
class Curves:
    """Records the curves of training and validation."""

    writers: CurveWriters | None
    """Writers of the curves; None on ranks that do not write."""
    model: CTRModel
    """Model from which the learning rate of the rows is read."""
    optimizer: torch.optim.Optimizer
    """Optimizer from which the learning rate of the network is read."""
    every: int
    """Number of steps between two points of a training curve."""
    progress: Progress

    def is_due(self, state: TrainingState) -> bool:
        """Whether `add_step` adds a point to the curves."""
        return state.step % self.every == 0

    def add_step(self, state: TrainingState) -> None:
        """Show the progress of a trained step, and add a point to the curves at every multiple of
        `every` steps.
        """
        speed = f"  {state.speed:,.0f} samples/s" if state.speed else ""  # the first steps are not timed
        self.progress.advance(1, f"loss {state.smoothed_loss:.4f}{speed}")
        if not self.is_due(state):
            return
        state.losses.append((state.step, state.smoothed_loss))
        timed_samples = state.trained_samples - state.untimed_samples
        state.paces.append((state.step, state.train_seconds, timed_samples))
        values = {
            "loss": state.smoothed_loss,
            "samples_per_second": state.speed,
            "dense_learning_rate": self.optimizer.param_groups[0]["lr"],
            "row_learning_rate": self.model.embeddings.learning_rate,
        }
        self._add(state.step, {f"train/{name}": value for name, value in values.items()})

    def add_evaluation(self, entry: Mapping[str, Any]) -> None:
        """Add the metrics of an evaluation (of `TrainingState.evaluations`) to the curves."""
        values = {
            f"valid/{label}/{name}" if label else f"valid/{name}": metrics[name]
            for label, metrics in entry.get("labels", {"": entry}).items()
            for name, metric in METRICS.items()
            if metric.label and metrics[name] is not None
        }
        self._add(entry["step"], values)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        self.progress.figures(step, values)
        if self.writers is not None:
            self.writers.add(step, values)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluates the model of a run on the validation split."""

    model: CTRModel
    dataset: Dataset
    config: TrainConfig
    progress: Progress
    check: Callable[[], None]
    """Function that is called before each batch. It raises `Stopped` if the user asked to stop."""
    mesh: Mesh
    average: WeightAverage
    members: BestMembers | None

    def run(self, state: TrainingState, curves: Curves, *, closing: bool = False) -> bool:
        """Evaluate the model, record the metrics in `state`, and return whether they are the best
        so far.

        Also marks `state` as finished if early stopping ends the run. Nothing is recorded without a
        validation split, or if the user stops the evaluation.

        Parameters
        ----------
        closing : bool
            Whether this evaluation takes place only because the run ends.
        """
        stopping = self.config.early_stopping
        if not self.dataset.samples("valid"):
            return False
        try:
            samples, members = self._scored(state, closing)
        except Stopped:
            return False
        if not self.config.has_log_odds:
            samples = corrected_by(fit(("platt",), samples), samples)
        values = figures(measured(self.dataset.schema.label_columns, samples))
        entry = {"step": state.step, **values, **members, **({"closing": True} if closing else {})}
        state.record(entry, stopping)
        names = dict.fromkeys((*headlines(), *((stopping.metric,) if stopping.patience else ())))
        for label, of_label in by_label("validation", values):
            shown = (f"{METRICS[name].label} {show_with_interval(of_label, name, 5)}" for name in names)
            self.progress.say(f"step {state.step}: {label} {', '.join(shown)}")
        curves.add_evaluation(entry)
        state.finished = patience_exhausted(state.evaluations, stopping)
        if state.finished and networks_are_unused(state.evaluations, stopping):
            self.progress.say(
                f"step {state.step}: the trees have had all of the weight in {stopping.patience} "
                "evaluations, so training of the networks ends"
            )
        return best(state.evaluations, stopping) is state.evaluations[-1]

    def _scored(self, state: TrainingState, closing: bool) -> tuple[ScoredSamples, dict[str, Any]]:
        """Return the scored validation split, and ``members``: figures of an ensemble's members."""
        score = partial(
            score_split,
            self.model,
            self.dataset,
            "valid",
            precision=self.config.precision,
            progress=SilentProgress(),
            check=self.check,
            mesh=self.mesh,
        )
        with self.average.shown():
            if self.members is None:
                return score(), {}
            with self.members.separate():
                if self.members.is_unscored:
                    with self.members.shown():
                        self.members.rescore(score())
                samples, table = self.members.combine(score(), state.step, closing=closing)
                networks = [member for member in table if member["step"]]  # trees have step 0
                entry: dict[str, Any] = {"members": table}
                steps = sorted(int(member["step"]) for member in networks)
                # The last step at which half of the networks were better than before.
                improved = steps[len(steps) // 2] if steps else 0
                if networks and not self.members.apart:
                    median = sorted(member["log_loss"] for member in networks)[len(networks) // 2]
                    before = [
                        (evaluation["networks_log_loss"], evaluation["step"])
                        for evaluation in state.evaluations
                    ]
                    entry["networks_log_loss"], improved = median, min((*before, (median, state.step)))[1]
                return samples, {
                    **entry,
                    "networks_improved": improved,
                    "networks_weight": sum(member["weight"] for member in networks),
                }
