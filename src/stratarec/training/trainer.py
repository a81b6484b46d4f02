"""Train a model: resolve the recipe, claim the run's directory, build, train, test once, save.

A run is a function of its recipe and data: resumed from any checkpoint it ends with the same bits as without a stop.

A run is evaluated every `eval_every` steps or at the end of each epoch, and always at its end. That closing evaluation
is marked: a run that is resumed with more steps drops it, and continues as a run that had more steps from the start.
The earlier result keeps its checkpoint until the longer run has a result. A new length that asks for no more steps is
refused. SIGINT and SIGTERM end a step, an evaluation or the final test at the next batch, with a checkpoint; the next
start does the evaluation that was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from torch.optim import Optimizer

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.towers import DisaggregatedModel
from stratarec.errors import TrainingError
from stratarec.io.owned_directory import named_directory
from stratarec.kernels.runtime.accelerator import device_errors
from stratarec.models import CTRModel
from stratarec.planning.bytes import Memory
from stratarec.planning.plan import Plan
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.curve_writers import CurvesOf, curve_writers
from stratarec.reporting.progress import progress_of_notebook
from stratarec.training import checkpoint
from stratarec.training.build import hot_loader, identity, new_model, new_plan, set_quantiles
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.distributed import GradientReducer, RankStages
from stratarec.training.final_evaluation import FinalEvaluation, TrainResult
from stratarec.training.gpu_memory import check_rows_device, on_gpu
from stratarec.training.loop import Cadence, Curves, EvaluationCallback, Loop, StopSignal, Validation
from stratarec.training.resolve import load_training_state, remarks, resolve
from stratarec.training.run.open_run import check_identity, open_warm_start
from stratarec.training.run.run_directory import (
    FILES,
    RunDirectory,
    opened,
    read_plan,
    read_result,
    write_hashes,
    write_plan,
    write_recipe,
)
from stratarec.training.steps.members import BestMembers, best_members, describe
from stratarec.training.steps.state import TrainingState, best
from stratarec.training.steps.step import Pipeline, Stages, loader_config
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.steps.trace import tracing
from stratarec.training.torch_setup import build_optimizer, device_of, largest_fitting_batch, torch_settings

T = TypeVar("T")


class Trainer:
    """One run of a recipe on its data set; it trains once.

    Parameters
    ----------
    recipe : Recipe
    dataset : Dataset
        Prepared data, opened and checked.
    progress : Progress
        Receives steps, evaluations and checkpoints; by default a notebook shows them, and elsewhere nothing is shown.
    plan : Plan
        Placement of the tables; by default the plan that the run was started with, or a new plan by the recipe's memory
        section.
    mesh : Mesh
        Processes that train together; by default this one. Each has its own trainer of the same recipe and data.
    named : mapping
        Fields that the recipe names. Other fields get defaults by the size of the data; by default no field does.
    earlier : Recipe
        Recipe of the run that this one continues or starts from, which some defaults follow.

    Raises
    ------
    ConfigError
        When the data set was prepared by other settings than the recipe's, or lacks what the recipe needs, such as a
        validation split.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        progress: Progress | None = None,
        *,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        named: Mapping[str, Any] | None = None,
        earlier: Recipe | None = None,
    ) -> None:
        self.mesh = mesh or Mesh.alone()
        self.progress: Progress = (progress or progress_of_notebook()) if self.mesh.is_first else SilentProgress()
        self._resolved = resolve(recipe, dataset, self.mesh, named=named, earlier=earlier)
        self.recipe, self.dataset, self.config = self._resolved.recipe, dataset, self._resolved.recipe.train
        self._device, self._plan = device_of(self.config.device, self.mesh.ranks), plan
        check_rows_device(self.recipe, self._device, plan)
        self.run = named_directory(self.recipe.run)
        self._directory, self._identity = RunDirectory(self.run), identity(self.recipe, dataset)
        self._stop = StopSignal(f"stopped at once; {self.run} is as of its last checkpoint; resume with --resume")
        self.threads = ThreadTuner(self.config.threads, self.mesh.ranks // self.mesh.hosts, self._may_differ)
        self.state = TrainingState()
        self._used = False

    # The parts of the run, built at first use, when `train` has claimed the directory.

    @cached_property
    def plan(self) -> Plan | None:
        """Placement of the tables; None if all rows are float32 in DRAM."""

        def placed() -> Plan | None:
            level0: Memory = "hbm" if on_gpu(self.recipe, self._device) else "dram"
            read = self._plan or read_plan(self.run, self.recipe, self.dataset, level0)
            return read or new_plan(self.recipe, self.dataset, self.mesh.ranks, self._device)

        if self.mesh.ranks == 1:
            return placed()
        # One rank measures memories and reads files for all.
        content = self.mesh.first(lambda: None if (plan := placed()) is None else plan.to_dict())
        return None if content is None else Plan.from_dict(content)

    @cached_property
    def model(self) -> CTRModel:
        place = self.recipe.place if self.mesh.ranks == 1 else f"{self.recipe.place}-rank-{self.mesh.rank}"
        return new_model(self.recipe, self.dataset, self.plan, place, self.mesh, self._device)

    @cached_property
    def optimizer(self) -> Optimizer:
        return build_optimizer(self.config.dense, self.model.network)

    @cached_property
    def loader(self) -> Loader:
        config = loader_config(self.config, self._resolved.slate_key)
        if self.mesh.ranks > 1 or not self.recipe.hot.separate_batches:
            share = BatchShare(rank=self.mesh.place, ranks=self.mesh.ranks)
            return Loader(self.dataset, "train", config, share)
        return hot_loader(self.dataset, config, self.plan, self.progress)

    @cached_property
    def members(self) -> BestMembers | None:
        """Best members of an ensemble; None for other models, and where members cannot be told apart."""
        return best_members(self.model, self.config, self.mesh.ranks)

    @cached_property
    def _reducer(self) -> GradientReducer | None:
        if self.mesh.ranks == 1:
            return None
        return GradientReducer(self.mesh, self.model.network, self.recipe.distributed.dense_wire)

    @cached_property
    def stages(self) -> Stages:
        parts = (self.model, self.optimizer, self.config, self.loader)
        if self._reducer is None:
            return Stages(*parts)
        exchange = self.model if isinstance(self.model, DisaggregatedModel) else None
        return RankStages(self.mesh, *parts, exchange=exchange, reduction=self._reducer)

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.stages, self.loader.config.prefetch_batches)

    @cached_property
    def cadence(self) -> Cadence:
        agree = {} if self._reducer is None else {"agree": self._reducer.agree}
        stop = lambda: self._stop.received  # noqa: E731
        return Cadence(self.config, self.total_steps, ahead=self.pipeline.depth, stop=stop, **agree)

    @cached_property
    def _checkpoints(self) -> CheckpointManager:
        return CheckpointManager(
            folder=self._directory.checkpoints, model=self.model, optimizer=self.optimizer, average=self.stages.average,
            members=self.members, config=self.config, identity=self._identity, mesh=self.mesh,
            saved=self._directory.settle,
        )  # fmt: skip

    @cached_property
    def loop(self) -> Loop:
        """The training loop; `Loop.step` trains one batch."""
        validation = Validation(
            model=self.model, dataset=self.dataset, config=self.config, progress=self.progress,
            check=self.cadence.check, mesh=self.mesh, average=self.stages.average, members=self.members,
        )  # fmt: skip
        return Loop(
            self.pipeline, self.cadence, self._checkpoints, validation, self.state, self.threads,
            self.progress,
        )  # fmt: skip

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        return self.config.steps(self.pipeline.epoch_steps)

    def train(
        self, *, resume: bool = False, overwrite: bool = False, earlier: str | Path | None = None
    ) -> TrainResult:  # fmt: skip
        """Train to the end, test once, and write result and report.

        Parameters
        ----------
        resume : bool
            Continue from the run's last checkpoint.
        overwrite : bool
            Remove an earlier run of that name once this one has a checkpoint.
        earlier : path
            Run whose weights this run starts with, unless it has a checkpoint to resume from; see `open_warm_start`.

        Returns
        -------
        TrainResult
            Content of ``result.json``.

        Raises
        ------
        CheckpointError
            When the run has checkpoints and neither `resume` nor `overwrite` is set, when they or those of `earlier` do
            not fit, or when a finished run is resumed with another length that asks for no more steps.
        StorageError
            When the directory of the run cannot be written, holds anything but a run, or another process trains in it.
        TrainingError
            When the loss is not a number.
        Interrupted
            After SIGINT or SIGTERM, once a checkpoint is written.
        """
        with self._session(resume=resume, overwrite=overwrite, earlier=earlier) as last:
            result = read_result(self.run)
            if last is not None:
                self._load_state(last)
                if self.state.finished and result is not None and result.steps == self.state.step:
                    self.progress.say(f"{self.run} is already complete; its result:")
                    return TrainResult(result.model_dump(mode="json", exclude_unset=True, exclude={"format"}))
                self.restore(last)
            self._checkpoints.tested = "" if result is None else result.checkpoint
            return TrainResult(self._train(None, self._evaluate_finally))

    def fit(self, callback: EvaluationCallback, *, resume: bool = False) -> TrainingState:
        """Train as `train` does, but without the final test: no file of the test split is read.

        Parameters
        ----------
        callback : callable
            Receives all evaluations of the run after each evaluation, and first those of the checkpoint that the run
            resumes from. An exception of it ends the run.
        resume : bool
            Continue from the run's last checkpoint.

        Returns
        -------
        TrainingState
            State at the end of the run. The checkpoints of the end and of the best evaluation exist.

        Raises
        ------
        Exception
            As `train`, and what `callback` raises.
        """
        with self._session(resume=resume) as last:
            if last is not None:
                self._load_state(last)
                self.restore(last)
            callback(self.state.evaluations)
            return self._train(callback, lambda: self.state)

    @contextmanager
    def _session(
        self, *, resume: bool, overwrite: bool = False, earlier: str | Path | None = None
    ) -> Iterator[Path | None]:
        """Claim the run's directory, then build; yield the checkpoint to resume from."""
        if self._used:
            raise TrainingError("this trainer has trained already; make a new Trainer for each run")
        self._used = True
        with ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(self.dataset.locked())
            warm_start = None
            if earlier is not None and not (resume and checkpoint.list_checkpoints(self._directory.checkpoints)):
                # Checked before anything of this run is written.
                start = open_warm_start(earlier, self.run, self._identity, self.dataset, self.mesh)
                warm_start = stack.enter_context(start)
            last = stack.enter_context(opened(self._directory, self.mesh, resume=resume, overwrite=overwrite))
            assert self.loop is not None  # builds all parts, before torch's random state is set
            stack.enter_context(torch_settings(threads=self.threads.threads, seed=self.config.seed))
            if resume and last is None:
                self.progress.say(f"{self.run} has no checkpoint to resume from; starting from the beginning")
            if last is None:
                set_quantiles(self.model.network, self.dataset)
                if warm_start is not None:
                    warm_start.load_into(self.model, self.optimizer)
                    self.progress.say(f"starting from {warm_start.path}")
                    self._checkpoints.save(self.state)  # resuming needs the earlier run no more
            yield last

    def _close(self) -> None:
        if "model" in vars(self):
            self.model.embeddings.close()

    def _load_state(self, path: Path) -> None:
        check_identity(path, self._identity, self.dataset)
        self.state = self.loop.state = load_training_state(self.run, path, self.recipe, self.total_steps)

    def restore(self, path: Path) -> None:
        """Load weights, rows and optimizer state of a checkpoint."""
        difference = self._checkpoints.restore(path)
        if self.members is not None and not self.state.evaluations:  # the run is resumed beyond its closing evaluation
            self.members.reset()
        self.loop.set_rates()
        self.progress.say(f"resuming from {path}")
        threads, before = self.threads.threads, self.state.threads
        changed = f"threads change from {before} to {threads}" if before not in (0, threads) else ""
        for reason in filter(None, (changed, difference)):
            self._may_differ(self.state.step, reason)

    def _may_differ(self, step: int, reason: str) -> None:
        """Report and record that another run of the recipe may differ in its last bits from `step` on."""
        self.state.may_differ.append((step, reason))
        self.progress.say(f"{reason}: from step {step:,} on another run may differ in its last bits")

    def _train(self, callback: EvaluationCallback | None, then: Callable[[], T]) -> T:
        """Train to the end unless the run is finished, then call `then`."""
        finished = self.state.finished
        self.mesh.first(lambda: (self.run / FILES).unlink(missing_ok=True))
        if not finished:
            self.mesh.first(lambda: write_recipe(self.run, self.recipe))
            self.mesh.first(lambda: write_plan(self.run, self.recipe, self.plan))
            more = remarks(self.config, self.plan, self.dataset, self.total_steps, self.mesh.ranks)
            for line in filter(None, (*self._resolved.remarks, *more, describe(self.model, self.members))):
                self.progress.say(line)
            self.state.threads = self.threads.threads
        fitting = partial(largest_fitting_batch, self.model, self.dataset, self.loader.config, self.config.precision)
        guarded = device_errors(self.model.device, self.config.batch_size, fitting)
        with self._writers() as writers, self._stop.handled(), self.threads, tracing(self), guarded:
            if not finished:
                curves = Curves(
                    writers=writers, model=self.model, optimizer=self.optimizer, every=self.config.log_every,
                    progress=self.progress,
                )  # fmt: skip
                self.loop.run(curves, callback)
                if refusal := self.model.embeddings.engine.transfers.refusal:
                    self.progress.say(refusal)
            result = then()
        self.mesh.first(lambda: write_hashes(self.run))
        return result

    def _writers(self) -> AbstractContextManager[Any]:
        if not self.mesh.is_first:
            return nullcontext()
        of = CurvesOf(name=self.recipe.name, run=self.run, recipe=self.recipe.chosen, step=self.state.step)
        return curve_writers(self.config.curves, of, self.progress.say)

    def _evaluate_finally(self) -> dict[str, Any]:
        """Test the best checkpoint by validation, or the last one without validation, and write the result."""
        state = self.state
        entry = best(state.evaluations, self.config.early_stopping)
        path = self._checkpoints.load_best(state.step if entry is None else entry["step"], current=state.step)
        evaluation = FinalEvaluation(
            run=self.run, recipe=self.recipe, dataset=self.dataset, model=self.model, plan=self.plan,
            progress=self.progress, check=self.cadence.check, mesh=self.mesh, figures=self.stages.figures,
            sharing=self.threads.remark,
        )  # fmt: skip
        result = evaluation.write(state, path)
        self._checkpoints.tested = path.name
        self._checkpoints.prune(state)
        return result
