"""Evaluations of the validation split while a run trains, and the curves of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.models import CTRModel
from stratarec.models.metrics import HEADLINES, METRICS, figures
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.live.curve_writers import CurveWriters
from stratarec.reporting.metric_names import by_label, show
from stratarec.training.evaluation.evaluate import evaluate_split
from stratarec.training.steps.cadence import Stopped
from stratarec.training.steps.position import Evaluation, Position, best, is_over
from stratarec.training.steps.weight_average import Averaging


class Curves:
    """Curves of training and validation by step.

    Parameters
    ----------
    writers : CurveWriters or None
        None on ranks that only train.
    model, optimizer
        Whose learning rates are shown: those of the rows, and of the network.
    every : int
        Steps from one point of a training curve to the next.
    progress : Progress
        Told of every step and point.
    """

    def __init__(
        self,
        writers: CurveWriters | None,
        model: CTRModel,
        optimizer: torch.optim.Optimizer,
        every: int,
        progress: Progress,
    ) -> None:
        self._writers, self._model, self._optimizer, self._every = writers, model, optimizer, every
        self._progress = progress

    def stepped(self, position: Position) -> None:
        """A step was trained."""
        self._progress.advance(1, f"loss {position.smoothed_loss:.4f}  {position.speed:,.0f} samples/s")
        if position.step % self._every:
            return
        position.losses.append((position.step, position.smoothed_loss))
        timed_samples = position.trained_samples - position.untimed_samples
        position.paces.append((position.step, position.train_seconds, timed_samples))
        mixed, hot = position.smoothed_by_kind
        if mixed is not None or hot is not None:
            position.kind_losses.append((position.step, mixed, hot))
        figures = {
            "loss": position.smoothed_loss,
            "samples_per_second": position.speed,
            "dense_learning_rate": self._optimizer.param_groups[0]["lr"],
            "row_learning_rate": self._model.embeddings.learning_rate,
        }
        kinds = {"loss_of_mixed_batches": mixed, "loss_of_hot_batches": hot}
        figures |= {name: value for name, value in kinds.items() if value is not None}
        self._add(position.step, {f"train/{name}": value for name, value in figures.items()})

    def validation(self, entry: Mapping[str, Any]) -> None:
        """The metrics of an evaluation, as `Position.evaluations` has it."""
        found = {
            f"valid/{label}/{name}" if label else f"valid/{name}": found[name]
            for label, found in entry.get("labels", {"": entry}).items()
            for name in METRICS
            if found[name] is not None
        }
        self._add(entry["step"], found)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.figures(step, values)
        if self._writers is not None:
            self._writers.add(step, values)


Watch = Callable[[Sequence[Evaluation]], None]


def nobody(evaluations: Sequence[Evaluation]) -> None:
    """Watches nothing."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What is evaluated."""

    model: CTRModel
    dataset: Dataset
    config: TrainConfig
    progress: Progress
    check: Callable[[], None]
    """Called between batches; raises `Stopped` where the user asks for it."""
    mesh: Mesh
    """Who evaluates it together."""
    averaging: Averaging
    """Of the model's network."""
    evaluated: Callable[[], None]
    """Called when an evaluation is noted."""
    watch: Watch = nobody
    """Told of all evaluations after each; what it raises ends the run."""

    def run(self, position: Position, curves: Curves, *, closing: bool = False) -> bool:
        """Evaluate and note it in `position`, and whether training is over; whether it is the best one so far.

        Nothing happens where there is no such split, and where the user stops it.

        Parameters
        ----------
        closing : bool
            Whether only the end of the run asks for it.
        """
        stopping = self.config.early_stopping
        if not self.dataset.samples("valid"):
            return False
        try:
            with self.averaging.shown():
                metrics, _ = evaluate_split(
                    self.model,
                    self.dataset,
                    "valid",
                    precision=self.config.precision,
                    progress=SilentProgress(),
                    check=self.check,
                    mesh=self.mesh,
                )
        except Stopped:
            return False
        found = figures(metrics)
        entry = {"step": position.step, **found, **({"closing": True} if closing else {})}
        position.noted(entry, stopping)
        for label, each in by_label("validation", found):
            told = dict.fromkeys((*HEADLINES, *((stopping.metric,) if stopping.patience else ())))
            shown = (f"{METRICS[name].label} {show(each[name], 5)}" for name in told)
            self.progress.say(f"step {position.step}: {label} {', '.join(shown)}")
        curves.validation(entry)
        self.evaluated()
        position.finished = is_over(position.evaluations, stopping)
        self.watch(position.evaluations)
        return best(position.evaluations, stopping) is position.evaluations[-1]
