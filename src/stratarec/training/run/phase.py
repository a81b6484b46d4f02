"""Parts of one phase of a run: model, optimizer, loader, stages, checkpoints and loop.

A run has one phase, or two with `train.refit`. The second phase continues the tested checkpoint on the samples of
validation and test, with the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader
from stratarec.distributed.mesh import Mesh
from stratarec.kernels.runtime.accelerator import device_errors
from stratarec.models import CTRModel
from stratarec.planning.plan import Plan
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.build import hot_loader, new_model
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.distributed import GradientReducer, RankStages
from stratarec.training.loop import Cadence, Loop, StopSignal, Validation
from stratarec.training.steps.graph_step import build_stages
from stratarec.training.steps.members import BestMembers, best_members
from stratarec.training.steps.state import TrainingState
from stratarec.training.steps.step import Pipeline, Stages, loader_config
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.steps.trees import TreeFit
from stratarec.training.torch_setup import build_optimizer, largest_fitting_batch


@dataclass(kw_only=True, eq=False)
class Phase:
    """One phase of a run. Each part is built when it is first used."""

    recipe: Recipe
    """Recipe with the settings of this phase."""
    dataset: Dataset
    """Data set whose training split this phase uses, and whose validation split evaluates it."""
    mesh: Mesh
    device: torch.device
    """Device of the network."""
    folder: Path
    """Directory of the checkpoints."""
    identity: dict[str, Any]
    """Identity of model and data, as `build.identity` returns it."""
    saved: Callable[[], None]
    """Function that the first rank calls after each checkpoint."""
    find_plan: Callable[[Dataset], Plan | None]
    """Function that returns the placement of the tables of a data set."""
    threads: ThreadTuner
    stop: StopSignal
    progress: Progress
    state: TrainingState

    @property
    def config(self) -> TrainConfig:
        """The ``train`` section of the recipe."""
        return self.recipe.train

    @cached_property
    def plan(self) -> Plan | None:
        """Placement of the tables; None if all tables are simply float32 in DRAM."""
        return self.find_plan(self.dataset)

    @cached_property
    def model(self) -> CTRModel:
        place = self.recipe.place if self.mesh.ranks == 1 else f"{self.recipe.place}-rank-{self.mesh.rank}"
        return new_model(self.recipe, self.dataset, self.plan, place, self.mesh, self.device)

    @cached_property
    def optimizer(self) -> Optimizer:
        return build_optimizer(self.config.dense, self.model.network)

    @cached_property
    def loader(self) -> Loader:
        config = loader_config(self.config)
        if self.mesh.ranks > 1 or not self.recipe.hot.separate_batches:
            share = BatchShare(rank=self.mesh.place, ranks=self.mesh.ranks)
            return Loader(self.dataset, "train", config, share)
        return hot_loader(self.dataset, config, self.plan, self.progress)

    @cached_property
    def members(self) -> BestMembers | None:
        """Best members, if the model is an ensemble with members that can be separated; otherwise None."""
        return best_members(self.model, self.config, self.mesh.ranks)

    @cached_property
    def _reducer(self) -> GradientReducer | None:
        if self.mesh.ranks == 1:
            return None
        return GradientReducer(self.mesh, self.model.network, self.recipe.distributed.dense_wire)

    @cached_property
    def stages(self) -> Stages:
        parts = (self.model, self.optimizer, self.config, self.loader)
        reducer = self._reducer
        return build_stages(*parts) if reducer is None else RankStages(self.mesh, *parts, reduction=reducer)

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.stages, self.loader.config.prefetch_batches)

    @cached_property
    def cadence(self) -> Cadence:
        agree = {} if self._reducer is None else {"agree": self._reducer.agree}
        stop = lambda: self.stop.received  # noqa: E731
        return Cadence(self.config, self.total_steps, ahead=self.pipeline.depth, stop=stop, **agree)

    @cached_property
    def checkpoints(self) -> CheckpointManager:
        return CheckpointManager(
            folder=self.folder, model=self.model, optimizer=self.optimizer, average=self.stages.average,
            members=self.members, config=self.config, identity=self.identity, mesh=self.mesh, saved=self.saved,
        )  # fmt: skip

    @cached_property
    def loop(self) -> Loop:
        """Training loop of the phase. `Loop.step` trains one batch."""
        validation = Validation(
            model=self.model, dataset=self.dataset, config=self.config, progress=self.progress,
            check=self.cadence.check, mesh=self.mesh, average=self.stages.average, members=self.members,
        )  # fmt: skip
        return Loop(
            self.pipeline, self.cadence, self.checkpoints, validation, self.state, self.threads,
            self.progress,
        )  # fmt: skip

    @property
    def total_steps(self) -> int:
        """Number of steps of the phase, unless it stops early."""
        return self.config.steps(self.pipeline.epoch_steps)

    def restore(self, path: Path) -> None:
        """Load the weights, rows and optimizer state of a checkpoint of this phase."""
        difference = self.checkpoints.restore(path)
        if self.members is not None and not self.state.evaluations:  # the run is resumed beyond its closing evaluation
            self.members.reset()
        self.loop.set_rates()
        self.progress.say(f"resuming from {path}")
        threads, before = self.threads.threads, self.state.threads
        changed = f"threads change from {before} to {threads}" if before not in (0, threads) else ""
        for reason in filter(None, (changed, difference)):
            self.may_differ(self.state.step, reason)

    def may_differ(self, step: int, reason: str) -> None:
        """Report and record that, from `step` on, another run of the recipe may differ in its last bits."""
        self.state.may_differ.append((step, reason))
        self.progress.say(f"{reason}: from step {step:,} on another run may differ in its last bits")

    def fit_trees(self, stack: ExitStack, dataset: Dataset, *, growth: float = 0.0) -> None:
        """Start to fit the trees of an ensemble to `dataset`, if it has trees. `TreeFit` describes `growth`."""
        if (trees := self.model.network.trees) is not None:
            fit = TreeFit(trees, dataset, self.config, growth=growth)
            stack.callback(fit.close)

            def finish() -> None:
                if difference := fit.finish(self.progress):
                    self.may_differ(self.state.step, difference)

            self.loop.finish_trees = finish
            if self.stages.average.enabled:  # an average begins with all tensors of the network
                self.loop.with_trees()
                self.stages.average.take_trees()

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context in which an error of the device names the largest batch size that fits."""
        fitting = partial(largest_fitting_batch, self.model, self.dataset, self.loader.config, self.config.precision)
        return device_errors(self.model.device, self.config.batch_size, fitting)

    def close(self) -> None:
        """Release the tables."""
        if "model" in vars(self):
            self.model.embeddings.close()

    def release(self) -> None:
        """Release the tables, and drop all parts, so that the next phase can use their memory."""
        self.close()
        for name in [name for name in vars(self) if isinstance(getattr(Phase, name, None), cached_property)]:
            del vars(self)[name]
