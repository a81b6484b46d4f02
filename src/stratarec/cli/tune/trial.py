"""One trial: a run's training with other values, watched, and never tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.cli.tune.space import Values
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import TrainingError
from stratarec.io.atomic import remove_tree
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.steps.state import Evaluation, best
from stratarec.training.trainer import Trainer


class Pruned(Exception):
    """A trial that its watcher ended because others were better by then."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained."""

    content: Mapping[str, Any]
    """The recipe that is tuned."""
    values: Values
    """Its fields that are others here."""
    run: Path
    """Directory of the trial's run."""

    @property
    def overrides(self) -> dict[str, Any]:
        """All fields in which it differs from the recipe: with batches of another size, evaluations that count steps
        come after as many samples as before, so that trials can be compared while they train."""
        found = dict(self.values)
        own = Recipe.from_dict(dict(self.content)).train
        if own.eval_every and "train.batch_size" in found and "train.eval_every" not in found:
            found["train.eval_every"] = max(round(own.eval_every * own.batch_size / found["train.batch_size"]), 1)
        return found

    def train(self, dataset: Dataset, watch: Callable[[int, float], None]) -> float:
        """Train, and give what validation says of the checkpoint that a run would test.

        Parameters
        ----------
        watch : callable
            Told of each evaluation by its number and its metric; may raise `Pruned`.

        Raises
        ------
        Exception
            What `Trainer.fit` raises; `TrainingError` where validation gives no number.
        """
        recipe = Recipe.from_dict(with_values(self.content, {**self.overrides, "train.run": str(self.run)}))
        stopping, seen = recipe.train.early_stopping, 0

        def watched(evaluations: Sequence[Evaluation]) -> None:
            nonlocal seen
            for entry in evaluations[seen:]:
                seen += 1
                watch(seen, _metric(entry, stopping.metric))

        position = Trainer(recipe, dataset, SilentProgress()).fit(watched, resume=True)
        found = best(position.evaluations, stopping) or position.evaluations[-1]
        return _metric(found, stopping.metric)

    def remove_checkpoints(self) -> None:
        """Leave what the run says of itself, and none of its weights."""
        if not self.run.is_symlink():
            remove_tree(self.run / "checkpoints")


def _metric(entry: Evaluation, name: str) -> float:
    value = entry[name]
    if value is None or not math.isfinite(value):
        raise TrainingError(f"validation at step {entry['step']} gives no {name}")
    return float(value)
