"""Second phase of a run (`train.refit`): train the tested model on the samples of validation and test, too.

The test is over, so nothing is left for which these samples would have to be unseen. The phase has the loop and the
checkpoints of the first one, in a folder of its own:

refit/
    recipe.json     recipe of the run with the schedules of this phase
    plan.json       placement of the tables, if there is one
    checkpoints/    checkpoints of this phase; the last one is the model that is used

Networks continue from the tested checkpoint for one pass. If that had seen the training samples more than once, the
pass has all samples, with a tenth of the learning rates, because it repeats them once more than validation has judged;
otherwise it has those of validation and test, which are then seen once, as the others were.

Values that are frequent enough only in all splits together get rows, with initial weights (`Dataset.complete`).
Boosted trees are fitted again, to all samples: as many as validation chose, times the growth of the number of samples.
The weights of an ensemble's members are chosen again by the samples of validation and test, as scored by the tested
model. If the tested model needs a calibration, the weights stay, and the calibration is fitted to these samples.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.splits import SPLITS
from stratarec.io.atomic import file_hash, remove_tree
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import EarlyStoppingConfig, PlateauConfig
from stratarec.training import checkpoint
from stratarec.training.build import identity
from stratarec.training.evaluate import ScoredSamples, score_split
from stratarec.training.loop import Curves
from stratarec.training.resolve import run_steps
from stratarec.training.run.phase import Phase
from stratarec.training.run.run_directory import REFIT, write_plan, write_recipe
from stratarec.training.steps.members import best_members
from stratarec.training.steps.state import TrainingState, rate_factor
from stratarec.training.torch_setup import torch_settings

# Factor on learning rates for samples that the tested model has seen. With 1, a log of a million rows lost 0.01 AUC.
_REPEATED = 0.1


def _recipe(recipe: Recipe, dataset: Dataset, factor: float) -> Recipe:
    """Return the recipe of one pass over the training split of `dataset`.

    `factor` is the factor on learning rates that `train.plateau` had reached.
    """
    train = replace(
        recipe.train, epochs=1, max_steps=0, eval_every=0, early_stopping=EarlyStoppingConfig(),
        plateau=PlateauConfig(),
        dense=replace(recipe.train.dense, learning_rate=factor * recipe.train.dense.learning_rate),
        embedding=replace(recipe.train.embedding, learning_rate=factor * recipe.train.embedding.learning_rate),
    )  # fmt: skip
    return replace(
        recipe, train=train.for_pass(run_steps(train, dataset)), hot=replace(recipe.hot, batches="none")
    )  # fmt: skip


class Refit(Phase):
    """Second phase of a run.

    Parameters
    ----------
    first : Phase
        First phase, whose settings, plan and processes this phase uses.
    run : Path
        Directory of the run.
    tested : Path
        Checkpoint from which this phase starts.
    is_calibrated : bool
        Whether a calibration for this phase was fitted to the scores of the tested model, with its weights.
    """

    members = None  # each sample has been seen, so nothing can choose the best step of a member

    def __init__(self, first: Phase, run: Path, tested: Path, *, is_calibrated: bool) -> None:
        self._everything = first.dataset.joined(SPLITS)
        self._first, self._is_calibrated = first.dataset, is_calibrated
        self._tested, self._content = tested, checkpoint.read_state(tested)
        self._growth = self._everything.samples("train") / first.dataset.samples("train")
        is_repeated = self._content["step"] > first.pipeline.epoch_steps
        dataset = self._everything if is_repeated else first.dataset.joined(SPLITS[1:])
        state = TrainingState(**self._content["training"])
        self._rows = first.config.embedding
        self._factor = _REPEATED if is_repeated else 1.0
        recipe = _recipe(first.recipe, dataset, rate_factor(state.regular, first.config.plateau))
        super().__init__(
            recipe=recipe, dataset=dataset, mesh=first.mesh, device=first.device,
            folder=run / REFIT / "checkpoints", identity=identity(recipe, dataset), saved=first.saved,
            find_plan=first.find_plan, threads=first.threads, stop=first.stop, progress=first.progress,
            state=TrainingState(phase="refit", base=file_hash(tested / checkpoint.STATE)),
        )  # fmt: skip
        self._kernels = first.loop.wait_for_kernels

    def run(self) -> dict[str, Any]:
        """Train to the end of the phase, and return the checkpoint and the numbers of steps and samples."""
        with ExitStack() as stack:
            stack.callback(self.close)
            last = self._last_checkpoint()
            self.loop.wait_for_kernels = self._kernels
            # Not in the recipe, because `continue` takes over its rates.
            self.loop.rate_factor = self.stages.rate_factor = self._factor
            stack.enter_context(torch_settings(threads=self.threads.threads, seed=self.config.seed))
            self.stages.earlier = self._content["tables"]["earlier"] + self._content["tables"]["step"]
            samples = self.dataset.samples("train")
            if last is None:
                self._begin(stack)
                self.progress.say(f"refit: one pass over {samples:,} samples, from {self._tested}")
            else:
                self.state = self.loop.state = TrainingState(**checkpoint.read_state(last)["training"])
                self.restore(last)
            curves = Curves(
                writers=None, model=self.model, optimizer=self.optimizer, every=self.config.log_every,
                progress=self.progress,
            )  # fmt: skip
            with self.stop.handled(), self.threads, self.guarded():
                if not self.state.finished:
                    self.loop.run(curves)
            path = checkpoint.step_path(self.folder, self.state.step)
            self.mesh.first(lambda: checkpoint.prune(self.folder, 1, {path}))
        return {"checkpoint": path.name, "steps": self.state.step, "samples": samples}

    def _last_checkpoint(self) -> Path | None:
        """Return the last checkpoint of this phase. Checkpoints of a refit of another tested model are removed."""

        def find() -> str | None:
            checkpoint.recover(self.folder)
            paths = checkpoint.list_checkpoints(self.folder)
            if paths and checkpoint.read_state(paths[-1])["training"].get("base") == self.state.base:
                return str(paths[-1])
            remove_tree(self.folder.parent)
            return None

        found = self.mesh.first(find)
        return None if found is None else Path(found)

    def _begin(self, stack: ExitStack) -> None:
        """Load the tested model, start to fit its trees again, and write the recipe and the plan of the phase."""
        self.checkpoints.continue_from(self._tested, self._rows)
        self._choose_weights()
        self.loop.set_rates()
        self.state.threads = self.threads.threads
        self.mesh.first(lambda: write_recipe(self.folder.parent, self.recipe))
        self.mesh.first(lambda: write_plan(self.folder.parent, self.recipe, self.plan))
        if (trees := self.model.network.trees) is not None and trees.counts.any():
            self.fit_trees(stack, self._everything, growth=self._growth)

    def _choose_weights(self) -> None:
        """Choose the weights of an ensemble's members by the samples of validation and test."""
        members = best_members(self.model, self.config, self.mesh.ranks)
        if members is None or self._is_calibrated:
            return
        # With the ids of the first phase: rows of values that are new in this one are not trained yet.
        average = self.stages.average
        with average.shown(), members.separate():
            samples = ScoredSamples.joined(
                score_split(
                    self.model, self._first, split, precision=self.config.precision, progress=SilentProgress()
                )
                for split in SPLITS[1:]
                if self._first.samples(split)
            )  # fmt: skip
        members.reweight(samples)
        if average.enabled:  # the average has weights of its own
            with average.shown():
                members.reweight(samples)
