"""Evaluations of the validation split while a run trains, and its curves: the progress line, loss, TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.models import CTRModel
from stratarec.models.metrics import HEADLINES, METRICS, figures
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.metric_names import by_label, show
from stratarec.training.evaluation.evaluate import evaluate_split
from stratarec.training.steps.cadence import Stopped
from stratarec.training.steps.position import Evaluation, Position, best, is_over
from stratarec.training.steps.weight_average import Averaging

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Curves of training and validation by step.

    Parameters
    ----------
    board : SummaryWriter or None
        None on ranks that only train.
    model, optimizer
        Whose learning rates are shown: those of the rows, and of the network.
    every : int
        Steps from one point of a training curve to the next.
    """

    def __init__(
        self, board: SummaryWriter | None, model: CTRModel, optimizer: torch.optim.Optimizer, every: int
    ) -> None:
        self._board, self._model, self._optimizer, self._every = board, model, optimizer, every

    def stepped(self, position: Position, progress: Progress) -> None:
        """A step was trained."""
        progress.advance(1, f"loss {position.smoothed_loss:.4f}  {position.speed:,.0f} samples/s")
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
        for name, value in figures.items():
            self._add(f"train/{name}", value, position.step)

    def validation(self, entry: Mapping[str, Any]) -> None:
        """The metrics of an evaluation, as `Position.evaluations` has it."""
        for label, found in entry.get("labels", {"": entry}).items():
            for name in METRICS:
                if found[name] is not None:
                    self._add(f"valid/{label}/{name}" if label else f"valid/{name}", found[name], entry["step"])

    def _add(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


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
