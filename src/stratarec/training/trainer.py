"""Train a model: resolve the recipe, claim the run's directory, build all parts, train, test once,
and save the result.

A run is determined by its recipe and data. If it is resumed from any checkpoint, it ends with the
same bits as without the interruption.

The model is evaluated every `eval_every` steps or at the end of each epoch, and always at the end
of the run. If this last evaluation takes place only because the run ends, it is marked as closing.
When the run is later resumed with more steps, the closing evaluation is removed, so the run
continues as if it had been longer from the start. The checkpoint of the earlier result is kept
until the longer run has a result. Resuming a finished run with another length is refused if it
needs no more steps.

SIGINT and SIGTERM end training, an evaluation or the final test at the next batch, with a
checkpoint. If an evaluation was interrupted, it is done when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding.compilation import compile_kernels
from stratarec.errors import TrainingError
from stratarec.io.owned_directory import named_directory
from stratarec.models.base import build_tables
from stratarec.planning.plan import Plan
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.curve_writers import CurvesOf, curve_writers
from stratarec.reporting.progress import progress_of_notebook
from stratarec.training import checkpoint
from stratarec.training.build import identity, set_quantiles
from stratarec.training.final_evaluation import FinalEvaluation, TrainResult
from stratarec.training.gpu_memory import check_rows_device
from stratarec.training.loop import EvaluationCallback, Loop
from stratarec.training.resolve import remarks, resolve, resume_state
from stratarec.training.run.build_run import Run, Session, build_run, find_plan
from stratarec.training.run.mirror import RunMirror
from stratarec.training.run.open_run import WarmStart, check_identity, open_warm_start
from stratarec.training.run.refit import refit, refit_plan
from stratarec.training.run.run_directory import (
    FILES,
    REFIT,
    RunDirectory,
    opened,
    read_result,
    write_hashes,
    write_plan,
    write_recipe,
    write_result,
)
from stratarec.training.steps.cadence import StopSignal
from stratarec.training.steps.members import describe
from stratarec.training.steps.state import TrainingState, best
from stratarec.training.steps.thread_tuner import ThreadTuner
from stratarec.training.steps.trace import Hook, tracing
from stratarec.training.steps.trees import TreeFit
from stratarec.training.torch_setup import torch_settings

T = TypeVar("T")


class Trainer:
    """One run of a recipe on its data set. A trainer can train only once.

    Parameters
    ----------
    recipe : Recipe
        Model, training and memory of the run.
    dataset : Dataset
        Prepared data set, opened and checked.
    progress : Progress
        Receives steps, evaluations and checkpoints. By default, a notebook shows them, and nothing
        is shown elsewhere.
    plan : Plan
        Placement of the tables. By default, the plan with which the run was started, or a new plan
        for the recipe's memory section.
    mesh : Mesh
        Processes that train together; by default only this one. Each process has a trainer with the
        same recipe and data.
    named : mapping
        Fields that the user set. All other fields get defaults that depend on the data. Without
        `named`, no field of the recipe is changed.
    earlier : Recipe
        Recipe of the run that this run resumes or from whose weights it starts. Some defaults are
        taken from it.

    Raises
    ------
    ConfigError
        If the data set was prepared with other settings than the recipe's, or does not have what
        the recipe needs, for example a validation split.

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
        self.recipe = self._resolved.recipe
        self._dataset = dataset
        self._mesh = self._resolved.mesh
        check_rows_device(self.recipe, self._resolved.device, plan)
        self.run = named_directory(self.recipe.run)
        self._given_plan = plan
        self._used = False
        self._directory = RunDirectory(self.run)
        self._copy_to_mirror: Callable[[], None] = lambda: None
        self._session = Session(
            threads=ThreadTuner(self.recipe.train.threads, self._mesh.ranks // self._mesh.hosts),
            stop=StopSignal(f"stopped at once; {self.run} is at its last checkpoint; resume with --resume"),
            progress=(progress or progress_of_notebook()) if mesh.is_first else SilentProgress(),
            saved=self._after_checkpoint,
        )
        self.state = TrainingState()
        """State of the run. If the run resumes, it is that of the checkpoint."""
        self.parts: Run
        """All parts of the run, from the beginning of `train` until they are released for a
        refit.
        """
        self.hooks: list[Hook] = []
        """Functions whose contexts surround every step."""

    def build(self) -> Run:
        """Build all parts of the run, with initial weights and rows. `train` does this itself."""
        device = self._resolved.device
        plan = find_plan(self.run, self.recipe, self._dataset, self._mesh, device, self._given_plan)
        if plan is not None:
            refit_plan(
                self.recipe,
                self._dataset,
                lambda joined: find_plan(self.run / REFIT, self.recipe, joined, self._mesh, device),
            )
        return build_run(self._resolved, self._session, self._directory.checkpoints, plan, self.state)

    def train(
        self, *, resume: bool = False, overwrite: bool = False, earlier: str | Path | None = None
    ) -> TrainResult:
        """Train to the end, test once, and write the result and the report.

        Parameters
        ----------
        resume : bool
            Whether to continue from the run's last checkpoint.
        overwrite : bool
            Whether to replace an earlier run in the same directory. It is removed when this run has
            a checkpoint.
        earlier : path
            Directory of a run from whose weights this run starts (`open_warm_start`), unless this
            run has a checkpoint from which it resumes.

        Returns
        -------
        TrainResult
            Content of ``result.json``.

        Raises
        ------
        CheckpointError
            If the run has checkpoints, and neither `resume` nor `overwrite` is set; if the
            checkpoint to start from does not fit the recipe or the data; or if a finished run is
            resumed with another length that needs no more steps.
        StorageError
            If the directory of the run cannot be written, contains something other than a run, or
            another process trains in it.
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
        with self._opened(resume=resume, overwrite=overwrite, earlier=earlier) as (last, trees):
            result = read_result(self.run)
            if (
                last is not None
                and self.state.finished
                and result is not None
                and result.steps == self.state.step
            ):
                content = result.model_dump(mode="json", exclude_unset=True, exclude={"format"})
                if "refit" in content or not self.recipe.train.refit:
                    self._session.progress.say(f"{self.run} is already complete; its result:")
                    return TrainResult(content)
            else:
                if last is not None:
                    self.parts.restore(last)
                self.parts.checkpoints.tested = "" if result is None else result.checkpoint
                content = self._train(trees, None, self._evaluate_finally)
            if self.recipe.train.refit:
                content = self._refit(content)
            return TrainResult(content)

    def _refit(self, result: dict[str, Any]) -> dict[str, Any]:
        """Train the tested model on the other samples, and add the served checkpoint to the
        result.
        """
        plan, epoch_steps = self.parts.plan, len(self.parts.loader)
        self._close()
        del self.parts  # the second phase can use their memory
        tested = self._directory.checkpoints / result["checkpoint"]
        calibrated = bool(result.get("refit_calibration"))
        served = refit(
            self._resolved,
            self._session,
            self.run,
            tested,
            plan,
            epoch_steps=epoch_steps,
            is_calibrated=calibrated,
        )
        result = {**result, "refit": served}
        self._mesh.first(lambda: write_result(self.run, result))
        return result

    def fit(self, callback: EvaluationCallback, *, resume: bool = False) -> TrainingState:
        """Train as `train` does, but without the final test. No file of the test split is read.

        Parameters
        ----------
        callback : callable
            Called with all evaluations of the run, first before training (with those of the
            checkpoint, if the run resumes) and then after each evaluation. If it raises an
            exception, the run ends.
        resume : bool
            Whether to continue from the run's last checkpoint.

        Returns
        -------
        TrainingState
            State at the end of the run. The checkpoints at the end and of the best evaluation are
            kept.

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
        with self._opened(resume=resume) as (last, trees):
            if last is not None:
                self.parts.restore(last)
            callback(self.state.evaluations)
            return self._train(trees, callback, lambda: self.state)

    @contextmanager
    def _opened(
        self, *, resume: bool, overwrite: bool = False, earlier: str | Path | None = None
    ) -> Iterator[tuple[Path | None, TreeFit | None]]:
        """Claim the run's directory, build all parts, and begin a new run.

        Yields the checkpoint to restore (None for a new run), and the trees of an ensemble that are
        being fitted.
        """
        if self._used:
            raise TrainingError("this trainer has trained already; make a new Trainer for each run")
        self._used = True
        config, dataset, mesh = self.recipe.train, self._dataset, self._mesh
        with ExitStack() as stack:
            if mesh.ranks == 1 and self._resolved.device.type == "cpu":
                tables = build_tables(self.recipe.model, dataset.schema, dataset.table_rows())
                # It forks: before kernels start threads, and before this process has locks, which a
                # child would share.
                compiled = compile_kernels({table.embedding_dim for table in tables}, config.embedding)
                stack.callback(compiled)
                self._session = replace(self._session, wait_for_kernels=compiled)
            stack.enter_context(dataset.locked())
            warm_start = None
            if earlier is not None and not (
                resume and checkpoint.list_checkpoints(self._directory.checkpoints)
            ):
                # The earlier run is checked before any file of this run is written.
                start = open_warm_start(earlier, self.run, identity(self.recipe, dataset), dataset, mesh)
                warm_start = stack.enter_context(start)
            mirror = self._open_mirror(resume=resume, overwrite=overwrite)
            last = stack.enter_context(opened(self._directory, mesh, resume=resume, overwrite=overwrite))
            if mirror is not None:
                self._copy_to_mirror = stack.enter_context(mirror.copying())
            if last is not None:
                check_identity(last, identity(self.recipe, dataset), dataset)
                self.state = TrainingState(**checkpoint.read_state(last)["training"])
            self.parts = self.build()
            stack.callback(self._close)
            if last is not None:
                resume_state(self.run, last, self.recipe, self.state, self.parts.cadence.total_steps)
            stack.enter_context(torch_settings(threads=self._session.threads.threads, seed=config.seed))
            if resume and last is None:
                self._session.progress.say(
                    f"{self.run} has no checkpoint to resume from; starting from the beginning"
                )
            yield last, self._begin(stack, warm_start) if last is None else None

    def _begin(self, stack: ExitStack, warm_start: WarmStart | None) -> TreeFit | None:
        """Prepare the first step of a run: compute quantiles, then load the weights of `warm_start`
        or fit trees.
        """
        parts = self.parts
        set_quantiles(parts.model.network, parts.dataset)
        if warm_start is not None:
            warm_start.load_into(parts.model, parts.optimizer)
            self._session.progress.say(f"starting from {warm_start.path}")
            parts.checkpoints.save(self.state)  # so resuming does not need the earlier run
            return None
        # Validation can choose the weights of members.
        return None if parts.members is None else parts.fit_trees(stack, parts.dataset)

    def _close(self) -> None:
        """Release the tables of the run, unless a refit has dropped all parts already."""
        if "parts" in vars(self):
            self.parts.close()

    def _open_mirror(self, *, resume: bool, overwrite: bool) -> RunMirror | None:
        """Open the mirror of the run on the first rank, and copy missing files of a resumed run.
        None without one.
        """
        mirrors: list[RunMirror] = []

        def claim() -> None:
            mirrors.append(RunMirror(self.recipe.train.mirror, self.run, self._session.progress))
            mirrors[0].claim(resume=resume, overwrite=overwrite)

        if self.recipe.train.mirror:
            self._mesh.first(claim)
        return mirrors[0] if mirrors else None

    def _after_checkpoint(self) -> None:
        self._directory.settle()
        self._copy_to_mirror()

    def _train(
        self, trees: TreeFit | None, callback: EvaluationCallback | None, then: Callable[[], T]
    ) -> T:
        """Train to the end, unless the run is finished already; then call `then` and return its
        result.
        """
        config = self.recipe.train
        mesh = self._mesh
        session = self._session
        parts = self.parts
        finished = self.state.finished
        mesh.first(lambda: (self.run / FILES).unlink(missing_ok=True))
        if not finished:
            mesh.first(lambda: write_recipe(self.run, self.recipe))
            mesh.first(lambda: write_plan(self.run, self.recipe, parts.plan))
            more = remarks(config, parts.plan, parts.dataset, parts.cadence.total_steps, mesh.ranks)
            for line in filter(
                None, (*self._resolved.remarks, *more, describe(parts.model, parts.members))
            ):
                session.progress.say(line)
            self.state.threads = session.threads.threads
        traced = tracing(config, mesh, self.run, session.progress)
        with (
            self._writers() as writers,
            session.stop.handled(),
            session.threads,
            traced as traces,
            parts.guarded(),
        ):
            if not finished:
                Loop(parts, writers, callback=callback, trees=trees, hooks=(*self.hooks, *traces)).train()
                if refusal := parts.model.embeddings.engine.transfers.refusal:
                    session.progress.say(refusal)
            result = then()
        mesh.first(lambda: write_hashes(self.run))
        return result

    def _writers(self) -> AbstractContextManager[Any]:
        if not self._mesh.is_first:
            return nullcontext()
        of = CurvesOf(name=self.recipe.name, run=self.run, recipe=self.recipe.chosen, step=self.state.step)
        return curve_writers(self.recipe.train.curves, of, self._session.progress.say)

    def _evaluate_finally(self) -> dict[str, Any]:
        """Test the checkpoint that is best on the validation split (or the last one), and write the
        result.
        """
        state, parts = self.state, self.parts
        entry = best(state.evaluations, self.recipe.train.early_stopping)
        path = parts.checkpoints.load_best(
            state.step if entry is None else entry["step"], current=state.step
        )
        evaluation = FinalEvaluation(
            run=self.run,
            recipe=self.recipe,
            dataset=parts.dataset,
            model=parts.model,
            plan=parts.plan,
            progress=self._session.progress,
            check=parts.cadence.check,
            mesh=self._mesh,
            figures=parts.pipeline.figures,
            sharing=self._session.threads.remark,
        )
        result = evaluation.write(state, path)
        parts.checkpoints.tested = path.name
        parts.checkpoints.prune(state)
        return result
