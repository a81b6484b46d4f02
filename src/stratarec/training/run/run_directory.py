"""Directory of a run: claim and lock it, replace an earlier run in it, and read and write its
files.

stratarec.json    marker of a run
recipe.json       recipe with all defaults filled in
plan.json         placement of the tables, if there is one
checkpoints/      one directory per checkpoint
refit/            checkpoints, recipe and plan of the second phase, if `train.refit` asks for it
tensorboard/      curves
result.json       result of the final test; report.html shows it
trace.json        trace of some steps, if `train.trace` asks for it
files.json        hashes of report, trace and curves, written at the end of a session
mirror.json       identity of the run in its mirror, if `train.mirror` names one

The JSON files are sealed, and their fields are checked when they are read, because a run may come
from another user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.errors import CheckpointError, ConfigError, StorageError
from stratarec.io.atomic import file_hash, remove_leftovers, remove_tree
from stratarec.io.names import STEP_NAME
from stratarec.io.owned_directory import (
    DirectoryKind,
    claim,
    directory_lock,
    directory_state,
    move_aside,
    recover_replacement,
    remove_directory,
    replaced_path,
    restore_replaced,
)
from stratarec.io.sealed import Count, Hash, Model, read_sealed, regular_file_below, write_sealed
from stratarec.models.calibration import LogitMap
from stratarec.planning.bytes import Memory
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.checkpoint import Bins, Figures

RESULT = "result.json"
RECIPE = "recipe.json"
PLAN = "plan.json"
REPORT = "report.html"
TRACE = "trace.json"
FILES = "files.json"
MIRROR = "mirror.json"
REFIT = "refit"
OUTPUTS = ("explanation.html", "predictions-*.parquet")
"""Names or patterns of files that `explain` and `predict` write into a run, without a hash."""
RUN = DirectoryKind(
    name="run",
    field="train.run",
    content=(
        RECIPE, PLAN, "checkpoints", REFIT, "tensorboard", RESULT, REPORT, TRACE, FILES, MIRROR,
        *OUTPUTS, "export", "export.delta", "periods",
    ),
)  # fmt: skip


@contextmanager
def opened(directory: RunDirectory, mesh: Mesh, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """Open the run directory on the first rank, for all ranks. All ranks enter the context together
    and leave it together.
    """
    with ExitStack() as stack:

        def enter() -> str | None:
            path = stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return None if path is None else str(path)

        if mesh.ranks == 1:
            yield stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return
        name = mesh.first(enter)
        yield None if name is None else Path(name)
        # All ranks have finished before the first one unlocks the directory.
        mesh.files.agree(None)


def recover_run(path: Path) -> None:
    """Complete or undo an interrupted replacement of the run at `path`."""
    recover_replacement(path, RUN, lambda path: bool(checkpoint.list_checkpoints(path / "checkpoints")))


class RunDirectory:
    """Directory of one run. Use `opened` once, and call `settle` after the first checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._replaced = False

    @contextmanager
    def opened(self, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
        """Claim and lock the directory, and yield the checkpoint to resume from, or None for a new
        run.

        With `overwrite`, an earlier run is moved aside. It is removed when the new run has a
        checkpoint (`settle`), and restored if the new run ends without one.

        Raises
        ------
        CheckpointError
            If the directory has a run, and neither `resume` nor `overwrite` is set.
        StorageError
            If the directory is not the directory of a run, or another process trains in it.
        """
        if resume and overwrite:
            raise ConfigError("--resume continues a run and --overwrite removes it: pass one of them")
        recover_run(self.path)
        is_new = not self.path.exists()
        with ExitStack() as stack:
            earlier = directory_state(self.path, RUN) == "ours"
            for part in (self.checkpoints, self.path / REFIT, self.path / "tensorboard"):
                # The link may lead to another run, whose files pruning would then remove.
                if part.is_symlink():
                    raise StorageError(
                        f"{part} is a link, expected a directory: name the run's own place in train.run"
                    )
            if earlier:
                stack.enter_context(directory_lock(self.path))
            if earlier and overwrite:
                move_aside(self.path, RUN)
                self._replaced = True
            try:
                last = self._last_checkpoint(resume)
                claim(self.path, RUN)
                if self._replaced or not earlier:
                    stack.enter_context(directory_lock(self.path))
                remove_leftovers(self.path)
                yield last
            except BaseException:
                if is_new and not (self.path / RECIPE).exists() and not self.checkpoints.exists():
                    remove_tree(self.path)  # the run could not be built
                raise
            finally:
                if self._replaced:
                    restore_replaced(self.path, RUN)

    def _last_checkpoint(self, resume: bool) -> Path | None:
        checkpoint.recover(self.checkpoints)
        checkpoints = checkpoint.list_checkpoints(self.checkpoints)
        if resume and any((self.path / "periods").glob("*")):
            raise CheckpointError(
                f"{self.path} was continued by `stratarec continue` and cannot be resumed: pass the next "
                "file to that command, choose another train.run, or pass --overwrite to start again"
            )
        if checkpoints and not resume:
            raise CheckpointError(
                f"{self.path} holds a run up to {checkpoints[-1].name}: pass --resume to continue, "
                "--overwrite to start again, or choose another train.run"
            )
        if not checkpoints and (self.path / RESULT).exists():
            raise CheckpointError(
                f"{self.path} holds the result of a run without checkpoints: pass --overwrite to start "
                "again, or choose another train.run"
            )
        return checkpoints[-1] if checkpoints else None

    def settle(self) -> None:
        """Remove the earlier run that was set aside, because this run can be resumed now."""
        if self._replaced:
            self._replaced = False
            remove_directory(replaced_path(self.path))


FORMAT: Literal[2] = 2

Json = dict[str, pydantic.JsonValue]
Test = dict[str, int | float | Bins | dict[str, Figures] | None]
Amount = Annotated[float, pydantic.Field(ge=0)]


class RunRecipe(Model):
    """Content of ``recipe.json`` without its seal."""

    format: Literal[2] = FORMAT
    recipe: Json


class RunPlan(Model):
    """Content of ``plan.json``: placement of the tables, and memory section of the recipe."""

    format: Literal[2] = FORMAT
    memory: Json
    plan: Json


class CacheFigures(Model):
    """Lookups in a cached table: means per batch over the later half of a run's last session."""

    table: str
    distinct: Amount
    """Number of distinct rows per batch."""
    missed: Amount
    """Number of distinct rows per batch that were not in the cache."""


class RankFigures(Model):
    """Times and bytes of one rank in a run's last session, if the run has several ranks."""

    exposed_seconds: Amount
    """Seconds that training waited for other ranks."""
    hidden_seconds: Amount
    """Seconds in which the thread that exchanges ids waited for others during training."""
    step_seconds: Amount
    """Seconds of all steps, including `exposed_seconds`."""
    sent_bytes: Count
    """Number of bytes sent to other ranks."""
    table_bytes: Count
    peak_rss_bytes: Count


class RefitResult(Model):
    """The second phase of a run, if `train.refit` asked for it."""

    checkpoint: Annotated[str, pydantic.Field(pattern=f"^{STEP_NAME}$")]
    """Name of the checkpoint that is used, in ``refit/checkpoints``."""
    steps: Count
    samples: Count
    """Number of samples in the pass of this phase."""


class Result(Model):
    """Content of ``result.json``: metrics of the final test, speed and memory."""

    format: Literal[2] = FORMAT
    checkpoint: Annotated[str, pydantic.Field(pattern=f"^{STEP_NAME}$")]
    """Name of the tested checkpoint."""
    steps: Count
    """Number of steps at the end of the run."""
    samples_per_second: Amount
    table_bytes: Count
    output_bytes: Count
    memory: tuple[dict[str, str | int | float | bool | None], ...]
    """Planned and used bytes of each memory."""
    parts: dict[str, Count]
    """Bytes by purpose, as `LookupEngine.bytes_by_part` returns them."""
    caches: tuple[CacheFigures, ...]
    """Figures of each cached table."""
    network_bytes: Count
    peak_rss_bytes: Count
    test: Test | None = None
    """Metrics of the test split, if there is one. With several labels, ``labels`` has the metrics
    of each label.
    """
    valid: Test | None = None
    """Metrics of the validation split, if a calibration was fitted on it."""
    uncalibrated: dict[str, Test] | None = None
    """Split -> metrics of the scores without the calibration."""
    calibration: tuple[LogitMap, ...] = ()
    """Calibration of each label."""
    refit_calibration: tuple[LogitMap, ...] | None = None
    """Calibration of each label for the model after the refit. None: that of the tested model."""
    baselines: tuple[str, ...] = ()
    """Comparison with other methods on the same samples, if there are any."""
    ranks: tuple[RankFigures, ...] = ()
    """Figures of each rank, if there were several."""
    exchange: str = ""
    """Text that describes how rows were exchanged, for a model with towers."""
    sharing: str = ""
    """How the run shared its cores with other processes, as text; empty if it did not."""
    refit: RefitResult | None = None
    """Training on validation and test samples after the test; None if there was none. All metrics
    are of the model before."""

    def tested(self, run: Path) -> Path:
        """Return the checkpoint that was tested."""
        return run / "checkpoints" / self.checkpoint

    def served(self, run: Path) -> Path:
        """Return the checkpoint that is used: the tested one, or that of the refit."""
        return (
            self.tested(run) if self.refit is None else run / REFIT / "checkpoints" / self.refit.checkpoint
        )


class RunFiles(Model):
    """Content of ``files.json``: hashes of the report, the trace and the curves."""

    format: Literal[2] = FORMAT
    hashes: dict[
        Annotated[str, pydantic.Field(pattern=r"^(report\.html|trace\.json|tensorboard/[^/]+)$")], Hash
    ]


def write_hashes(run: Path) -> None:
    """Write the hashes of report, trace and curves at the end of a session."""
    files = [
        path
        for path in (run / REPORT, run / TRACE, *sorted((run / "tensorboard").glob("*")))
        if path.is_file()
    ]
    write_sealed(
        run / FILES,
        {"format": FORMAT, "hashes": {str(path.relative_to(run)): file_hash(path) for path in files}},
    )


def check_hashes(run: Path) -> list[Path]:
    """Check the hashes in ``files.json``; return the checked files, none without that file."""
    if not (run / FILES).exists():
        return []
    advice = f"if that was intended, remove {run / FILES}"
    content = read_sealed(run / FILES, RunFiles, advice, CheckpointError)
    for name, expected in content.hashes.items():
        try:
            fits = file_hash(regular_file_below(run, name)) == expected
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{error}; {advice}") from error
        if not fits:
            raise CheckpointError(
                f"{run / name} was changed after it was written: its hash does not match; {advice}"
            )
    return [run / FILES, *(run / name for name in content.hashes)]


def write_recipe(run: Path, recipe: Recipe) -> None:
    """Write the recipe of a run."""
    write_sealed(run / RECIPE, {"format": FORMAT, "recipe": recipe.to_dict()})


def read_recipe(run: Path) -> Recipe:
    """Read the recipe of a run; `CheckpointError` or `ConfigError` if it is missing or damaged."""
    content = read_sealed(run / RECIPE, RunRecipe, "name another run, or train it again", CheckpointError)
    try:
        return Recipe.from_dict(content.recipe, str(run / RECIPE))
    except ConfigError as error:  # the recipe was valid when it was written
        advice = "install or import the package that provides it, or upgrade StrataRec"
        raise ConfigError(f"{error} (it was valid when it was written: {advice})") from error


def write_result(run: Path, result: dict[str, Any]) -> None:
    """Write the result of a run."""
    write_sealed(run / RESULT, {"format": FORMAT, **result})


def read_result(run: Path) -> Result | None:
    """Read the result of a run; None if it has none yet."""
    if not (run / RESULT).exists():
        return None
    return read_sealed(
        run / RESULT, Result, "remove it: `stratarec train --resume` writes it again", CheckpointError
    )


def write_plan(run: Path, recipe: Recipe, plan: Plan | None) -> None:
    """Write the plan of a run, and the settings for which it was computed, unless it is None."""
    if plan is not None:
        write_sealed(run / PLAN, {"format": FORMAT, "memory": _asked(recipe), "plan": plan.to_dict()})


def _asked(recipe: Recipe) -> Json:
    """Return the settings in a recipe that determine its plan."""
    memory: Json = recipe.to_dict()["memory"]
    return memory if recipe.hot.budget is None else {**memory, "hot": recipe.hot.budget}


def plan_notes(run: Path) -> tuple[str, ...]:
    """Return remarks of a run's plan, such as tables that stay float32; empty without a plan."""
    path = run / PLAN
    if not path.exists():
        return ()
    content = read_sealed(path, RunPlan, "train the run again with --overwrite", CheckpointError)
    return Plan.from_dict(content.plan, str(path)).notes


def read_plan(run: Path, recipe: Recipe, dataset: Dataset, level0: Memory | None = None) -> Plan | None:
    """Read the plan of a run; None if there is none, or if it cannot be used.

    It cannot be used if `recipe` has other memory settings, if `dataset` has other tables, or if
    `level0` names a memory other than the plan's level 0.
    """
    path = run / PLAN
    if not path.exists():
        return None
    content = read_sealed(path, RunPlan, "restore it, or start again with --overwrite")
    if content.memory != _asked(recipe):
        return None
    plan = Plan.from_dict(content.plan, str(path))
    same_tables = {placed.table: placed.rows for placed in plan.tables} == dataset.table_rows()
    return plan if same_tables and level0 in (None, plan.level0) else None
