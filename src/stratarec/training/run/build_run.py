"""Build all parts of a run in one function, each from the parts before it.

A run has one phase, or two with `train.refit`: the second one continues the tested checkpoint on
the samples of validation and test, with its own parts. `Session` contains the shared parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader
from stratarec.distributed.mesh import Mesh
from stratarec.kernels.runtime.accelerator import device_errors
from stratarec.models import CTRModel
from stratarec.planning.bytes import Memory
from stratarec.planning.plan import Plan
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.build import hot_loader, identity, new_model, new_plan
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.distributed import GradientReducer, RankPipeline
from stratarec.training.gpu_memory import on_gpu
from stratarec.training.resolve import ResolvedRun
from stratarec.training.run.run_directory import read_plan
from stratarec.training.steps.cadence import Cadence, StopSignal
from stratarec.training.steps.graph_step import build_pipeline
from stratarec.training.steps.members import BestMembers, best_members
from stratarec.training.steps.state import TrainingState
from stratarec.training.steps.step import TrainPipeline, loader_config
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.steps.trees import TreeFit
from stratarec.training.steps.validation import Validation
from stratarec.training.torch_setup import build_optimizer, largest_fitting_batch


@dataclass(frozen=True, kw_only=True)
class Session:
    """Threads, signals and progress that the phases of a run share in one process."""

    threads: ThreadTuner
    stop: StopSignal
    progress: Progress
    saved: Callable[[], None]
    """Function that the first rank calls after each checkpoint."""
    wait_for_kernels: Callable[[], None] = lambda: None
    """Function that returns when the kernels which another process compiles are ready."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of one phase of a run."""

    session: Session
    config: TrainConfig
    dataset: Dataset
    """Data set whose training split this phase uses, and whose validation split evaluates it."""
    plan: Plan | None
    """Placement of the tables; None if all tables are simply float32 in DRAM."""
    model: CTRModel
    optimizer: Optimizer
    """Optimizer of the model's network."""
    loader: Loader
    pipeline: TrainPipeline
    members: BestMembers | None
    """Best members, if the model is an ensemble with members that can be separated."""
    checkpoints: CheckpointManager
    cadence: Cadence
    validation: Validation
    state: TrainingState
    """State that the loop updates and checkpoints contain; the object is never replaced."""
    rate_factor: float
    """Factor on all learning rates, in addition to that of `train.plateau`."""

    def restore(self, path: Path) -> None:
        """Load everything except `state` from the checkpoint `path`, whose state `state` is."""
        difference = self.checkpoints.restore(path)
        # The only evaluation was the closing one, which a run that is resumed beyond it discards.
        if self.members is not None and not self.state.evaluations:
            self.members.reset()
        self.session.progress.say(f"resuming from {path}")
        threads, before = self.session.threads.threads, self.state.threads
        changed = f"threads change from {before} to {threads}" if before not in (0, threads) else ""
        for reason in filter(None, (changed, difference)):
            self.report_difference(reason)

    def report_difference(self, reason: str) -> None:
        """Report and record why another run may differ in its last bits from this step on."""
        step = self.state.step
        self.state.may_differ.append((step, reason))
        self.session.progress.say(
            f"{reason}: from step {step:,} on another run may differ in its last bits"
        )

    def fit_trees(self, stack: ExitStack, dataset: Dataset, *, growth: float = 0.0) -> TreeFit | None:
        """Start to fit the trees of an ensemble to `dataset`. `TreeFit` describes `growth`.

        Returns the fit, which `store_trees` ends; None if there are no trees, or if they are stored
        already.
        """
        trees, average = self.model.network.trees, self.pipeline.average
        if trees is None:
            return None
        fit = TreeFit(trees, dataset, self.config, growth=growth)
        stack.callback(fit.close)
        if not average.enabled:
            return fit
        self.store_trees(fit)  # an average begins with all tensors of the network
        average.take_trees()
        return None

    def store_trees(self, fit: TreeFit) -> None:
        """Wait for the trees of `fit`, and store them in the model."""
        if difference := fit.finish(self.session.progress):
            self.report_difference(difference)

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context in which a device's error names the largest batch size that fits."""
        fitting = partial(
            largest_fitting_batch, self.model, self.dataset, self.loader.config, self.config.precision
        )
        return device_errors(self.model.device, self.config.batch_size, fitting)

    def close(self) -> None:
        """Release the tables."""
        self.model.embeddings.close()


def build_run(
    resolved: ResolvedRun,
    session: Session,
    folder: Path,
    plan: Plan | None,
    state: TrainingState,
    *,
    chooses_members: bool = True,
    earlier: int = 0,
    rate_factor: float = 1.0,
) -> Run:
    """Build all parts of one phase of a run.

    Parameters
    ----------
    resolved : ResolvedRun
        Recipe and data set of the phase, mesh and device.
    session : Session
        Parts that both phases of a run share.
    folder : Path
        Directory of the checkpoints.
    plan : Plan or None
        Placement of the tables, from `find_plan`.
    state : TrainingState
        State from which the phase starts. Weights and rows are those of a new model (see
        `Run.restore`).
    chooses_members : bool
        Whether validation chooses the best step of each member of an ensemble.
    earlier : int
        Number of steps before this phase.
    rate_factor : float
        Factor on all learning rates, in addition to that of `train.plateau`.
    """
    recipe = resolved.recipe
    dataset = resolved.dataset
    mesh = resolved.mesh
    config = resolved.recipe.train
    place = recipe.place if mesh.ranks == 1 else f"{recipe.place}-rank-{mesh.rank}"
    with ExitStack() as stack:
        model = new_model(recipe, dataset, plan, place, mesh, resolved.device)
        stack.callback(model.embeddings.close)
        optimizer = build_optimizer(config.dense, model.network)
        loader = build_loader(recipe, dataset, mesh, plan, session.progress)
        pipeline: TrainPipeline
        if mesh.ranks == 1:
            pipeline = build_pipeline(
                model, optimizer, config, loader, wait_for_kernels=session.wait_for_kernels
            )
        else:
            reducer = GradientReducer(mesh, model.network, recipe.distributed.dense_wire)
            pipeline = RankPipeline(mesh, model, optimizer, config, loader, reduction=reducer)
        pipeline.earlier = earlier
        pipeline.rate_factor = rate_factor
        pipeline.say = session.progress.say
        members = best_members(model, config, mesh.ranks) if chooses_members else None
        checkpoints = CheckpointManager(
            folder=folder,
            model=model,
            optimizer=optimizer,
            average=pipeline.average,
            members=members,
            config=config,
            identity=identity(recipe, dataset),
            mesh=mesh,
            saved=session.saved,
        )
        cadence = Cadence(
            config,
            config.steps(len(loader)),
            ahead=pipeline.engine.lookahead,
            stop=lambda: session.stop.received,
            agree=pipeline.agree,
        )
        validation = Validation(
            model=model,
            dataset=dataset,
            config=config,
            progress=session.progress,
            check=cadence.check,
            mesh=mesh,
            average=pipeline.average,
            members=members,
        )
        stack.pop_all()
    return Run(
        session=session,
        config=config,
        dataset=dataset,
        plan=plan,
        model=model,
        optimizer=optimizer,
        loader=loader,
        pipeline=pipeline,
        members=members,
        checkpoints=checkpoints,
        cadence=cadence,
        validation=validation,
        state=state,
        rate_factor=rate_factor,
    )


def find_plan(
    folder: Path,
    recipe: Recipe,
    dataset: Dataset,
    mesh: Mesh,
    device: torch.device,
    chosen: Plan | None = None,
) -> Plan | None:
    """Return the placement of the tables of `dataset`: `chosen`, the plan in `folder`, or a new
    plan.

    It is None if all tables are simply float32 in DRAM.
    """

    def find() -> Plan | None:
        level0: Memory = "hbm" if on_gpu(recipe, device) else "dram"
        return (
            chosen
            or read_plan(folder, recipe, dataset, level0)
            or new_plan(recipe, dataset, mesh.ranks, device)
        )

    if mesh.ranks == 1:
        return find()
    # One rank measures memories and reads files for all ranks.
    content = mesh.first(lambda: None if (plan := find()) is None else plan.to_dict())
    return None if content is None else Plan.from_dict(content)


def build_loader(
    recipe: Recipe, dataset: Dataset, mesh: Mesh, plan: Plan | None, progress: Progress
) -> Loader:
    """Build the loader of training batches; it separates hot inputs if the recipe asks for it."""
    config = loader_config(recipe.train)
    if mesh.ranks > 1 or not recipe.hot.separate_batches:
        return Loader(dataset, "train", config, BatchShare(rank=mesh.place, ranks=mesh.ranks))
    return hot_loader(dataset, config, plan, progress)
