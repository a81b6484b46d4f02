"""Train a model: resolve the recipe, claim the run's directory, build all parts, train, test once, and save the result.

A run is determined by its recipe and data. If it is resumed from any checkpoint, it ends with the same bits as without
the interruption.

The model is evaluated every `eval_every` steps or at the end of each epoch, and always at the end of the run. If this
last evaluation takes place only because the run ends, it is marked as closing. When the run is later resumed with more
steps, the closing evaluation is removed, so the run continues as if it had been longer from the start. The checkpoint
of the earlier result is kept until the longer run has a result. Resuming a finished run with another length is refused
if it needs no more steps.

SIGINT and SIGTERM end training, an evaluation or the final test at the next batch, with a checkpoint. If an evaluation
was interrupted, it is done when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding.compilation import compile_update
from stratarec.errors import TrainingError
from stratarec.io.owned_directory import named_directory
from stratarec.models.base import build_tables
from stratarec.planning.bytes import Memory
from stratarec.planning.plan import Plan
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.curve_writers import CurvesOf, curve_writers
from stratarec.reporting.progress import progress_of_notebook
from stratarec.training import checkpoint
from stratarec.training.build import identity, new_plan, set_quantiles
from stratarec.training.final_evaluation import FinalEvaluation, TrainResult
from stratarec.training.gpu_memory import check_rows_device, on_gpu
from stratarec.training.loop import Curves, EvaluationCallback, StopSignal
from stratarec.training.resolve import load_training_state, remarks, resolve
from stratarec.training.run.mirror import RunMirror
from stratarec.training.run.open_run import check_identity, open_warm_start
from stratarec.training.run.phase import Phase
from stratarec.training.run.refit import Refit
from stratarec.training.run.run_directory import (
    FILES,
    REFIT,
    RunDirectory,
    opened,
    read_plan,
    read_result,
    write_hashes,
    write_plan,
    write_recipe,
    write_result,
)
from stratarec.training.steps.members import describe
from stratarec.training.steps.state import TrainingState, best
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.steps.trace import tracing
from stratarec.training.torch_setup import device_of, torch_settings

T = TypeVar("T")


class Trainer(Phase):
    """One run of a recipe on its data set. A trainer can train only once.

    Parameters
    ----------
    recipe : Recipe
        Model, training and memory of the run.
    dataset : Dataset
        Prepared data set, opened and checked.
    progress : Progress
        Receives steps, evaluations and checkpoints. By default, a notebook shows them, and nothing is shown elsewhere.
    plan : Plan
        Placement of the tables. By default, the plan with which the run was started, or a new plan for the recipe's
        memory section.
    mesh : Mesh
        Processes that train together; by default only this one. Each process has a trainer with the same recipe and
        data.
    named : mapping
        Fields that the user set. All other fields get defaults that depend on the data. Without `named`, no field of
        the recipe is changed.
    earlier : Recipe
        Recipe of the run that this run resumes or from whose weights it starts. Some defaults are taken from it.

    Raises
    ------
    ConfigError
        If the data set was prepared with other settings than the recipe's, or does not have what the recipe needs, for
        example a validation split.

    Examples
    --------
    >>> from stratarec import Dataset, Recipe, Trainer
    >>> recipe = Recipe.load("clicks.yaml", ["train.run=runs/short", "train.max_steps=10"])
    >>> trainer = Trainer(recipe, Dataset.open(recipe.data.path))
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
        mesh = mesh or Mesh.alone()
        self._resolved = resolve(recipe, dataset, mesh, named=named, earlier=earlier)
        recipe, ranks, hosts = self._resolved.recipe, self._resolved.mesh.ranks, self._resolved.mesh.hosts
        device = device_of(recipe.train.device, ranks)
        check_rows_device(recipe, device, plan)
        self.run = named_directory(recipe.run)
        self._given_plan = plan
        self._used = False
        self._directory = RunDirectory(self.run)
        self._copy_to_mirror: Callable[[], None] = lambda: None
        super().__init__(
            recipe=recipe, dataset=dataset, mesh=self._resolved.mesh, device=device, folder=self._directory.checkpoints,
            identity=identity(recipe, dataset), saved=self._after_checkpoint, find_plan=self._find_plan,
            threads=ThreadTuner(recipe.train.threads, ranks // hosts),
            stop=StopSignal(f"stopped at once; {self.run} is at its last checkpoint; resume with --resume"),
            progress=(progress or progress_of_notebook()) if mesh.is_first else SilentProgress(),
            state=TrainingState(),
        )  # fmt: skip

    def _find_plan(self, dataset: Dataset) -> Plan | None:
        def placed() -> Plan | None:
            level0: Memory = "hbm" if on_gpu(self.recipe, self.device) else "dram"
            has_grown = dataset.table_rows() != self.dataset.table_rows()  # in a refit
            folder, given = (self.run / REFIT, None) if has_grown else (self.run, self._given_plan)
            read = given or read_plan(folder, self.recipe, dataset, level0)
            return read or new_plan(self.recipe, dataset, self.mesh.ranks, self.device)

        if self.mesh.ranks == 1:
            return placed()
        # One rank measures memories and reads files for all ranks.
        content = self.mesh.first(lambda: None if (plan := placed()) is None else plan.to_dict())
        return None if content is None else Plan.from_dict(content)

    def train(
        self, *, resume: bool = False, overwrite: bool = False, earlier: str | Path | None = None
    ) -> TrainResult:  # fmt: skip
        """Train to the end, test once, and write the result and the report.

        Parameters
        ----------
        resume : bool
            Whether to continue from the run's last checkpoint.
        overwrite : bool
            Whether to replace an earlier run in the same directory. It is removed when this run has a checkpoint.
        earlier : path
            Directory of a run from whose weights this run starts (`open_warm_start`), unless this run has a checkpoint
            from which it resumes.

        Returns
        -------
        TrainResult
            Content of ``result.json``.

        Raises
        ------
        CheckpointError
            If the run has checkpoints, and neither `resume` nor `overwrite` is set; if the checkpoint to start from
            does not fit the recipe or the data; or if a finished run is resumed with another length that needs no more
            steps.
        StorageError
            If the directory of the run cannot be written, contains something other than a run, or another process
            trains in it.
        TrainingError
            If the loss is not finite.
        Interrupted
            After SIGINT or SIGTERM, when a checkpoint has been written.

        Examples
        --------
        >>> result = trainer.train()
        >>> result["steps"], result["test"]["samples"]
        (10, 206)
        """
        with self._session(resume=resume, overwrite=overwrite, earlier=earlier) as last:
            result = read_result(self.run)
            content = None
            if last is not None:
                self._load_state(last)
                if self.state.finished and result is not None and result.steps == self.state.step:
                    content = result.model_dump(mode="json", exclude_unset=True, exclude={"format"})
                    if "refit" in content or not self.config.refit:
                        self.progress.say(f"{self.run} is already complete; its result:")
                        return TrainResult(content)
                else:
                    self.restore(last)
            if content is None:
                self.checkpoints.tested = "" if result is None else result.checkpoint
                content = self._train(None, self._evaluate_finally)
            if self.config.refit:
                content = self._refit(content)
            return TrainResult(content)

    def _refit(self, result: dict[str, Any]) -> dict[str, Any]:
        """Train the tested model on the other samples, and add the served checkpoint to the result."""
        tested = self.folder / result["checkpoint"]
        refit = Refit(self, self.run, tested, is_calibrated=bool(result.get("refit_calibration")))
        self.release()
        result = {**result, "refit": refit.run()}
        self.mesh.first(lambda: write_result(self.run, result))
        return result

    def fit(self, callback: EvaluationCallback, *, resume: bool = False) -> TrainingState:
        """Train as `train` does, but without the final test. No file of the test split is read.

        Parameters
        ----------
        callback : callable
            Called with all evaluations of the run, first before training (with those of the checkpoint, if the run
            resumes) and then after each evaluation. If it raises an exception, the run ends.
        resume : bool
            Whether to continue from the run's last checkpoint.

        Returns
        -------
        TrainingState
            State at the end of the run. The checkpoints at the end and of the best evaluation are kept.

        Raises
        ------
        Exception
            The errors of `train`, and any exception that `callback` raises.

        Examples
        --------
        >>> def report(evaluations):
        ...     print([each["step"] for each in evaluations])
        >>> another = recipe.with_fields({"train.run": "runs/another", "train.eval_every": 5})
        >>> Trainer(another, Dataset.open(recipe.data.path)).fit(report).step
        []
        [5]
        [5, 10]
        10
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
        """Claim the run's directory, build all parts, and yield the checkpoint to resume from (None for a new run)."""
        if self._used:
            raise TrainingError("this trainer has trained already; make a new Trainer for each run")
        self._used = True
        with ExitStack() as stack:
            compiled: Callable[[], None] = lambda: None  # noqa: E731
            if self.mesh.ranks == 1 and self.device.type == "cpu":
                tables = build_tables(self.recipe.model, self.dataset.schema, self.dataset.table_rows())
                # It forks: before kernels start threads, and before this process has locks, which a child would share.
                compiled = compile_update({table.embedding_dim for table in tables}, self.config.embedding)
                stack.callback(compiled)
            stack.callback(self.close)
            stack.enter_context(self.dataset.locked())
            warm_start = None
            if earlier is not None and not (resume and checkpoint.list_checkpoints(self.folder)):
                # The earlier run is checked before any file of this run is written.
                start = open_warm_start(earlier, self.run, self.identity, self.dataset, self.mesh)
                warm_start = stack.enter_context(start)
            mirror = self._open_mirror(resume=resume, overwrite=overwrite)
            last = stack.enter_context(opened(self._directory, self.mesh, resume=resume, overwrite=overwrite))
            if mirror is not None:
                self._copy_to_mirror = stack.enter_context(mirror.copying())
            # The first use of `loop` builds all parts, before torch's random state is set.
            self.loop.wait_for_kernels = compiled
            stack.enter_context(torch_settings(threads=self.threads.threads, seed=self.config.seed))
            if resume and last is None:
                self.progress.say(f"{self.run} has no checkpoint to resume from; starting from the beginning")
            if last is None:
                set_quantiles(self.model.network, self.dataset)
                if warm_start is None and self.members is not None:  # validation can choose the weights of members
                    self.fit_trees(stack, self.dataset)
                if warm_start is not None:
                    warm_start.load_into(self.model, self.optimizer)
                    self.progress.say(f"starting from {warm_start.path}")
                    self.checkpoints.save(self.state)  # so resuming does not need the earlier run
            yield last

    def _open_mirror(self, *, resume: bool, overwrite: bool) -> RunMirror | None:
        """Open the mirror of the run, on the first rank, and copy what a resumed run lacks. None without a mirror."""
        mirrors: list[RunMirror] = []

        def prepare() -> None:
            mirrors.append(RunMirror(self.config.mirror, self.run, self.progress))
            mirrors[0].prepare(resume=resume, overwrite=overwrite)

        if self.config.mirror:
            self.mesh.first(prepare)
        return mirrors[0] if mirrors else None

    def _after_checkpoint(self) -> None:
        self._directory.settle()
        self._copy_to_mirror()

    def _load_state(self, path: Path) -> None:
        check_identity(path, self.identity, self.dataset)
        self.state = self.loop.state = load_training_state(self.run, path, self.recipe, self.total_steps)

    def _train(self, callback: EvaluationCallback | None, then: Callable[[], T]) -> T:
        """Train to the end, unless the run is finished already; then call `then` and return its result."""
        finished = self.state.finished
        self.mesh.first(lambda: (self.run / FILES).unlink(missing_ok=True))
        if not finished:
            self.mesh.first(lambda: write_recipe(self.run, self.recipe))
            self.mesh.first(lambda: write_plan(self.run, self.recipe, self.plan))
            more = remarks(self.config, self.plan, self.dataset, self.total_steps, self.mesh.ranks)
            for line in filter(None, (*self._resolved.remarks, *more, describe(self.model, self.members))):
                self.progress.say(line)
            self.state.threads = self.threads.threads
        traced = tracing(self, self.run)
        with self._writers() as writers, self.stop.handled(), self.threads, traced, self.guarded():
            if not finished:
                curves = Curves(
                    writers=writers, model=self.model, optimizer=self.optimizer, every=self.config.log_every,
                    progress=self.progress,
                )  # fmt: skip
                self.loop.run(curves, callback)
                for refusal in filter(None, (self.model.embeddings.engine.transfers.refusal, self.stages.refusal)):
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
        """Test the checkpoint that is best on the validation split (or the last one), and write the result."""
        state = self.state
        entry = best(state.evaluations, self.config.early_stopping)
        path = self.checkpoints.load_best(state.step if entry is None else entry["step"], current=state.step)
        evaluation = FinalEvaluation(
            run=self.run, recipe=self.recipe, dataset=self.dataset, model=self.model, plan=self.plan,
            progress=self.progress, check=self.cadence.check, mesh=self.mesh, figures=self.stages.figures,
            sharing=self.threads.remark,
        )  # fmt: skip
        result = evaluation.write(state, path)
        self.checkpoints.tested = path.name
        self.checkpoints.prune(state)
        return result
