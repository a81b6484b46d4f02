"""Trains a model: steps, evaluations, checkpoints, early stopping, one final test.

A run is a function of its recipe and data: resumed from any checkpoint it ends with the same bits as uninterrupted.

It is validated every `eval_every` steps or at the end of each epoch, and always when it ends; that closing evaluation
is marked, and a run that is resumed with a greater length goes on without it, as one that had that length from the
beginning. Until the longer run has a result, the earlier one keeps its checkpoint. A length that asks for nothing more
is refused, and the run's recipe stays as it was. SIGINT and SIGTERM end a step, an evaluation or the final test at the
next batch, with a checkpoint; what was not evaluated is evaluated by the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stratarec.batch.batch import Batch
from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import BatchShare, Loader
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import SharedEngine
from stratarec.distributed.towers import DisaggregatedModel
from stratarec.embedding import Handle
from stratarec.errors import TrainingError
from stratarec.hot.hot_loader import HotLoader
from stratarec.io.owned_directory import directory_state as directory_state
from stratarec.io.owned_directory import named_directory
from stratarec.kernels.runtime.accelerator import device_errors
from stratarec.models.request import Request
from stratarec.planning.plan import Plan
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.curve_writers import CurvesOf, CurveWriters, check_installed, curve_writers
from stratarec.reporting.progress import progress_of_notebook
from stratarec.training import checkpoint
from stratarec.training.build import hot_loader, identity, new_model, new_plan, of_data, set_quantiles
from stratarec.training.checkpoint import CheckpointManager
from stratarec.training.distributed import GradientReducer, RankStages
from stratarec.training.final_evaluation import FinalEvaluation, TrainResult
from stratarec.training.loop import (
    Cadence,
    Curves,
    EvaluationCallback,
    Loop,
    StopSignal,
    Validation,
    ignore_evaluations,
)
from stratarec.training.resolve import (
    check_average,
    check_validation,
    exchange_remark,
    find_slates,
    load_training_state,
    remarks,
)
from stratarec.training.run.open_run import WarmStart, check_identity, open_warm_start
from stratarec.training.run.run_directory import (
    FILES,
    RUN,
    Result,
    RunDirectory,
    opened,
    read_plan,
    read_result,
    write_hashes,
    write_plan,
    write_recipe,
)
from stratarec.training.steps.state import TrainingState, best, rate_factor
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
        What to do.
    dataset : Dataset
        Prepared data, opened and checked.
    progress : Progress
        Receives steps, evaluations and checkpoints; by default a notebook shows them, with curves, and nobody else.
    mesh : Mesh
        The processes that train it together; by default this one. Each has a trainer of its own, of the same recipe and
        data.
    plan : Plan
        Where tables live; by default what the run was started with, or what the recipe's memory section asks for.
    remark : str
        Told when it begins to train.

    Raises
    ------
    ConfigError
        When the data set was prepared by other settings than the recipe's, or cannot give what the recipe asks of its
        validation split.
    StorageError
        When the directory of the run holds anything but a run.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        progress: Progress | None = None,
        *,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        remark: str = "",
    ) -> None:
        self._remark = remark
        recipe = of_data(recipe, dataset)
        self.recipe, self.dataset, self.config = recipe, dataset, recipe.train
        self.mesh = mesh or Mesh.alone()
        self.progress: Progress = (progress or progress_of_notebook()) if self.mesh.is_first else SilentProgress()
        self.mesh.check_same({"recipe": recipe.to_dict(), "data": dataset.fingerprint})
        self._uncompared = check_prepared(recipe.data, dataset)
        device = device_of(self.config.device, self.mesh.ranks)
        check_validation(self.config, dataset)
        check_installed(self.config.curves)
        check_average(self.config, self.mesh)
        self._slates = find_slates(recipe, dataset, self.mesh.ranks)
        self.state = TrainingState()
        self.threads = ThreadTuner(self.config.threads, self.mesh.ranks // self.mesh.hosts, self._may_differ)
        self.run = named_directory(recipe.run)
        directory_state(self.run, RUN)  # what it cannot be written into is refused before anything is built
        self._directory = RunDirectory(self.run)
        self.plan = self._one_plan(plan)
        place = recipe.place if self.mesh.ranks == 1 else f"{recipe.place}-rank-{self.mesh.rank}"
        self.model = new_model(recipe, dataset, self.plan, place, self.mesh)
        self.model.place(device)
        self.optimizer = build_optimizer(self.config.dense, self.model.network)
        self._identity = identity(recipe, dataset)
        self._stop = StopSignal(f"stopped at once; {self.run} is as of its last checkpoint; go on with --resume")
        self._began = False
        self.loader = self._new_loader(BatchShare(rank=self.mesh.place, ranks=self.mesh.ranks))
        self._gradient_reducer: GradientReducer | None = None
        if self.mesh.ranks > 1:
            engine = self.model.embeddings.engine
            assert isinstance(engine, SharedEngine)
            self._gradient_reducer = GradientReducer(
                self.mesh, self.model.network, recipe.distributed.dense_wire, engine
            )
        self.stages = self._new_stages()
        self._keeper = CheckpointManager(
            self._directory.checkpoints,
            self.model,
            self.optimizer,
            self.config,
            self._identity,
            self.mesh,
            self.stages.average,
            self._directory.settle,
        )
        self.pipeline = Pipeline(self.stages, self.loader.config.prefetch_batches)
        self.cadence = Cadence(
            self.config,
            self.total_steps,
            ahead=self.pipeline.depth,
            stop=lambda: self._stop.made,
            **({} if self._gradient_reducer is None else {"agree": self._gradient_reducer.agree}),
        )

    def _one_plan(self, plan: Plan | None) -> Plan | None:
        """The plan of all ranks: memories are measured, and files read, by one."""
        mesh, recipe, dataset = self.mesh, self.recipe, self.dataset

        def made() -> Plan | None:
            return plan or read_plan(self.run, recipe, dataset) or new_plan(recipe, dataset, mesh.ranks)

        if mesh.ranks == 1:
            return made()
        content = mesh.first(lambda: None if (found := made()) is None else found.to_dict())
        return None if content is None else Plan.from_dict(content)

    def _new_loader(self, share: BatchShare) -> Loader:
        config = loader_config(self.config, self._slates.by if self._slates else None)
        if share.ranks > 1 or not self.recipe.hot.separate_batches:
            return Loader(self.dataset, "train", config, share)
        return hot_loader(self.recipe, self.dataset, config, self.plan, lambda: self.state.evaluations, self.progress)

    def _new_stages(self) -> Stages:
        given = (self.model, self.optimizer, self.config, self.loader)
        if self._gradient_reducer is None:
            return Stages(*given)
        exchange = self.model if isinstance(self.model, DisaggregatedModel) else None
        return RankStages(self.mesh, *given, exchange=exchange, reduction=self._gradient_reducer)

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
            Go on from the run's last checkpoint.
        overwrite : bool
            Remove an earlier run of that name once this one has a checkpoint.
        earlier : path
            Run whose weights this run starts with, unless it has a checkpoint to resume from; see `open_warm_start`.

        Returns
        -------
        TrainResult
            A dict of what ``result.json`` holds.

        Raises
        ------
        CheckpointError
            When the run has checkpoints and neither `resume` nor `overwrite` is set, when they or those of `earlier` do
            not fit, or when a finished run is resumed with another length that asks for no more steps.
        StorageError
            When the directory of the run cannot be written, or somebody else trains in it.
        TrainingError
            When the loss is no longer a number.
        Interrupted
            After SIGINT or SIGTERM, once a checkpoint is written.
        """
        with self._session(resume=resume, overwrite=overwrite, earlier=earlier) as found:
            return TrainResult(self._train_and_test(found))

    def fit(self, watch: EvaluationCallback, *, resume: bool = False) -> TrainingState:
        """Train as `train` does, and end before the test: no file of the test split is read.

        Parameters
        ----------
        watch : callable
            Receives all evaluations of the run after each, and at first of those that it goes on from; what it raises
            ends the run.
        resume : bool
            Go on from the run's last checkpoint.

        Returns
        -------
        TrainingState
            At the end of the run, with its evaluations. Its checkpoint is the last, and the best one is there, too.

        Raises
        ------
        Exception
            What `train` raises but for its test, and what `watch` does.
        """
        with self._session(resume=resume) as found:
            ended = found is not None and self._take_up(found, None)
            watch(self.state.evaluations)
            return self._train(ended, watch, lambda: self.state)

    @contextmanager
    def _session(
        self, *, resume: bool, overwrite: bool = False, earlier: str | Path | None = None
    ) -> Iterator[Path | None]:
        """The run's directory, data and settings; gives the checkpoint to go on from."""
        if self._began:
            raise TrainingError("this trainer has been used: make another one, its tables are not as they began")
        self._began = True
        try:
            with (
                torch_settings(threads=self.threads.threads, seed=self.config.seed),
                self.dataset.locked(),
                self._beginning(earlier, resume=resume) as first,
                opened(self._directory, self.mesh, resume=resume, overwrite=overwrite) as found,
            ):
                if resume and found is None:
                    self.progress.say(f"{self.run} has no checkpoint to go on from; starting from the beginning")
                if found is None:
                    set_quantiles(self.model.network, self.dataset)
                    if first is not None:
                        self._begin(first)
                yield found
        finally:
            self.model.embeddings.close()

    def _beginning(self, earlier: str | Path | None, *, resume: bool) -> AbstractContextManager[WarmStart | None]:
        """What the run begins with: found before anything of it is written."""
        if earlier is None or (resume and checkpoint.list_checkpoints(self._directory.checkpoints)):
            return nullcontext()
        return open_warm_start(earlier, self.run, self._identity, self.dataset, self.mesh)

    def _begin(self, first: WarmStart) -> None:
        """Take weights and optimizer state, and keep them at once: what is resumed needs the earlier run no more."""
        first.load_into(self.model, self.optimizer)
        self.progress.say(f"beginning with {first.path}")
        self._keeper.save(self.state)

    def _train_and_test(self, found: Path | None) -> dict[str, Any]:
        earlier = read_result(self.run)
        ended = found is not None and self._take_up(found, earlier)
        self._keeper.tested = "" if earlier is None else earlier.checkpoint
        if ended and earlier is not None and earlier.steps == self.state.step:
            self.progress.say(f"{self.run} has ended; this is its result")
            return earlier.model_dump(mode="json", exclude_unset=True, exclude={"format"})
        return self._train(ended, ignore_evaluations, self._finish)

    def _train(self, ended: bool, watch: EvaluationCallback, then: Callable[[], T]) -> T:
        """Train to the end, unless the run has `ended`, and do what follows; stops where the user asks for it."""
        self.mesh.first(lambda: (self.run / FILES).unlink(missing_ok=True))
        if not ended:
            self._introduce()
            self.state.threads = self.threads.threads
        fitting = partial(largest_fitting_batch, self.model, self.dataset, self.loader.config, self.config.precision)
        guarded = device_errors(self.model.device, self.config.batch_size, fitting)
        with self._writers() as writers, self._stop.listening(), self.threads, tracing(self), guarded:
            if not ended:
                curves = Curves(writers, self.model, self.optimizer, self.config.log_every, self.progress)
                self._loop(curves, watch).run()
            found = then()
        self.mesh.first(lambda: write_hashes(self.run))
        return found

    def _writers(self) -> AbstractContextManager[CurveWriters | None]:
        """Of curves, which one rank writes."""
        if not self.mesh.is_first:
            return nullcontext()
        of = CurvesOf(name=self.recipe.name, run=self.run, recipe=self.recipe.chosen, step=self.state.step)
        return curve_writers(self.config.curves, of, self.progress.say)

    def _introduce(self) -> None:
        """Write down and tell what is going to be trained."""
        self.mesh.first(lambda: write_recipe(self.run, self.recipe))
        self.mesh.first(lambda: write_plan(self.run, self.recipe, self.plan))
        slates, exchange = self._slates.description if self._slates else "", exchange_remark(self.recipe, self.mesh)
        for line in filter(None, (self._remark, self._uncompared, slates, exchange)):
            self.progress.say(line)
        for line in remarks(self.config, self.plan, self.dataset, self.total_steps, self.mesh.ranks):
            self.progress.say(line)

    def _take_up(self, path: Path, result: Result | None) -> bool:
        """Go on from a checkpoint of a run with that result; whether no step is left to train."""
        check_identity(path, self._identity, self.dataset)
        self.state = load_training_state(self.run, path, self.recipe, self.total_steps)
        if not (self.state.finished and result is not None and result.steps == self.state.step):
            self.restore(path)
        return self.state.finished

    def restore(self, path: Path) -> None:
        """Take weights and state from a checkpoint."""
        difference = self._keeper.restore(path)
        self._pace()
        self.progress.say(f"going on from {path}")
        threads, before = self.threads.threads, self.state.threads
        changed = f"threads change from {before} to {threads}" if before not in (0, threads) else ""
        for reason in filter(None, (changed, difference)):
            self._may_differ(self.state.step, reason)

    def _may_differ(self, step: int, reason: str) -> None:
        """Report and record that another run of the recipe may differ in its last bits from `step` on."""
        self.state.may_differ.append((step, reason))
        self.progress.say(f"{reason}: from step {step:,} on another run may differ in its last bits")

    def _loop(self, curves: Curves, watch: EvaluationCallback) -> Loop:
        validation = Validation(
            model=self.model, dataset=self.dataset, config=self.config, progress=self.progress, watch=watch,
            check=self.cadence.check, mesh=self.mesh, average=self.stages.average, evaluated=self._pace,
        )  # fmt: skip
        return Loop(
            self.step, self.pipeline, self.cadence, self._keeper, validation, curves, self.progress, self.state,
            self.threads,
        )  # fmt: skip

    def step(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> None:
        """One optimizer step; `request` and `prepared` are the batch's, where they were made ahead."""
        position, loader = self.state, self.loader
        hot = loader.is_hot(position.epoch, position.batch) if isinstance(loader, HotLoader) else None
        position.trained(*self.stages.train(position.step, batch, request, prepared), hot=hot)

    def _pace(self) -> None:
        """Train at the rates that the evaluations so far ask for."""
        factor = rate_factor(self.state.regular, self.config.plateau)
        if factor != self.stages.rate_factor:
            self.progress.say(f"learning rates are {factor:g} of what they would be without a plateau")
        self.stages.rate_factor = factor

    def _finish(self) -> dict[str, Any]:
        """Test the checkpoint that was best by validation, or the last one without validation, and write the result."""
        position = self.state
        found = best(position.evaluations, self.config.early_stopping)
        path = self._keeper.load_best(position.step if found is None else found["step"], current=position.step)
        ending = FinalEvaluation(
            run=self.run, recipe=self.recipe, dataset=self.dataset, model=self.model, plan=self.plan,
            progress=self.progress, check=self.cadence.check, mesh=self.mesh, figures=self.stages.figures,
            sharing=self.threads.remark,
        )  # fmt: skip
        result = ending.write(position, path)
        self._keeper.tested = path.name
        self._keeper.prune(position)
        return result
