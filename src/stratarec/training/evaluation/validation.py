"""Evaluations of the validation split while a run trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.models import CTRModel
from stratarec.models.metrics import METRICS, WATCHED, figures
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.metric_names import by_label, show
from stratarec.training.evaluation.curves import Curves
from stratarec.training.evaluation.evaluate import evaluate_split
from stratarec.training.steps.cadence import Stopped
from stratarec.training.steps.position import Evaluation, Position, best, is_over
from stratarec.training.steps.weight_average import Averaging

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
            shown = (f"{METRICS[name].label} {show(each[name], 5)}" for name in WATCHED)
            self.progress.say(f"step {position.step}: {label} {', '.join(shown)}")
        curves.validation(entry)
        self.evaluated()
        position.finished = is_over(position.evaluations, stopping)
        self.watch(position.evaluations)
        return best(position.evaluations, stopping) is position.evaluations[-1]
