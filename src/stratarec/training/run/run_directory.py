"""The directory of a run: claimed for it, held by one process, swapped for an earlier run; and what is written there.

stratarec.json    says that this is a run
recipe.json       what is trained
plan.json         where its tables live, if they were placed
checkpoints/      a directory each
tensorboard/      curves
result.json       of the final test, and report.html
trace.json        what threads did in some steps, where that was asked for
files.json        hashes of the report, the trace and the curves, once a session has come to its end

Files are sealed, and read through a model of their fields: a run may come from somebody else.
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
from stratarec.io.atomic import file_hash, remove_leftovers
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
RUN = DirectoryKind(
    name="run",
    field="train.run",
    content=(
        RECIPE, PLAN, "checkpoints", "tensorboard", RESULT, REPORT, TRACE, FILES, "predictions-*.parquet",
        "explanation.html", "export", "export.delta", "periods",
    ),
)  # fmt: skip


@contextmanager
def opened(directory: RunDirectory, mesh: Mesh, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """`RunDirectory.opened` by the first rank, for all of them: they come in, and leave, together."""
    with ExitStack() as stack:

        def enter() -> str | None:
            found = stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return None if found is None else str(found)

        if mesh.ranks == 1:
            yield stack.enter_context(directory.opened(resume=resume, overwrite=overwrite))
            return
        found = mesh.first(enter)
        yield None if found is None else Path(found)
        # The directory is given up when nobody works in it any more.
        mesh.files.agree(None)


def recover_run(path: Path) -> None:
    """Complete or undo a replacement of the run at `path` that was interrupted."""
    recover_replacement(path, RUN, lambda path: bool(checkpoint.list_checkpoints(path / "checkpoints")))


class RunDirectory:
    """Use `opened` once; `settle` when the run has something to go on from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._replaced = False

    @contextmanager
    def opened(self, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
        """Gives the checkpoint to go on from, None for a new run.

        An earlier run that is to be overwritten waits aside until this one has a checkpoint of its own, and comes back
        if it never has one.

        Raises
        ------
        CheckpointError
            When a run is there, and neither `resume` nor `overwrite` is set.
        StorageError
            When something else is there, or another process trains here.
        """
        if resume and overwrite:
            raise ConfigError("--resume goes on with a run and --overwrite removes it: pass one of them")
        recover_run(self.path)
        with ExitStack() as stack:
            earlier = directory_state(self.path, RUN) == "ours"
            for part in (self.checkpoints, self.path / "tensorboard"):
                if part.is_symlink():  # it may lead to another run's, which would be pruned as this one's
                    raise StorageError(f"{part} is a link, expected a directory: name the run's own place in train.run")
            if earlier:
                stack.enter_context(directory_lock(self.path))
            if earlier and overwrite:
                move_aside(self.path, RUN)
                self._replaced = True
            try:
                found = self._found(resume)
                claim(self.path, RUN)
                if self._replaced or not earlier:
                    stack.enter_context(directory_lock(self.path))
                remove_leftovers(self.path)
                yield found
            finally:
                if self._replaced:
                    restore_replaced(self.path, RUN)

    def _found(self, resume: bool) -> Path | None:
        checkpoint.recover(self.checkpoints)
        found = checkpoint.list_checkpoints(self.checkpoints)
        if resume and (self.path / "periods").exists():
            raise CheckpointError(
                f"{self.path} went on with other periods after it had ended, by `stratarec continue`: give that the "
                "next file, train another train.run, or pass --overwrite to start anew"
            )
        if found and not resume:
            raise CheckpointError(
                f"{self.path} holds a run up to {found[-1].name}: pass --resume to go on, --overwrite to start anew, "
                "or another train.run"
            )
        if not found and (self.path / RESULT).exists():
            raise CheckpointError(
                f"{self.path} holds the result of a run whose checkpoints are gone: pass --overwrite to start anew, or "
                "another train.run"
            )
        return found[-1] if found else None

    def settle(self) -> None:
        """The run can be gone on with: an earlier one that it replaces is removed."""
        if self._replaced:
            self._replaced = False
            remove_directory(replaced_path(self.path))


FORMAT: Literal[2] = 2

Json = dict[str, pydantic.JsonValue]
Test = dict[str, int | float | Bins | dict[str, Figures] | None]
Amount = Annotated[float, pydantic.Field(ge=0)]


class RunRecipe(Model):
    """``recipe.json``."""

    format: Literal[2] = FORMAT
    recipe: Json


class RunPlan(Model):
    """``plan.json``: where tables live, and the memory section that this was made for."""

    format: Literal[2] = FORMAT
    memory: Json
    plan: Json


class CacheFigures(Model):
    """What batches asked of a table under a cache: means over the later half of a run's last session."""

    table: str
    distinct: Amount
    """Rows of a batch, each counted once."""
    missed: Amount
    """Those of them that came in from their home."""


class RankFigures(Model):
    """What one of several processes did in a run's last session."""

    exposed_seconds: Amount
    """Time in which training waited for others: for rows, gradients, what is decided together, and ids."""
    hidden_seconds: Amount
    """Time in which only its other thread waited for others: for ids."""
    step_seconds: Amount
    """Time of steps in all, with exposed waits before them."""
    sent_bytes: Count
    """To other ranks."""
    table_bytes: Count
    peak_rss_bytes: Count


class Result(Model):
    """``result.json``: what the final test gave."""

    format: Literal[2] = FORMAT
    checkpoint: Annotated[str, pydantic.Field(pattern=r"^step-\d{8,12}$")]
    """Which was tested."""
    steps: Count
    """Of the run when it ended."""
    samples_per_second: Amount
    table_bytes: Count
    output_bytes: Count
    memory: tuple[dict[str, str | int | float | bool | None], ...]
    """What was planned and what is used, for each memory."""
    parts: dict[str, Count]
    """Bytes by what they are for; see `LookupEngine.bytes_by_part`."""
    caches: tuple[CacheFigures, ...]
    """Of each table that has one."""
    network_bytes: Count
    peak_rss_bytes: Count
    test: Test | None = None
    """Metrics, where there is a test split; of several labels also those of each, as ``labels``."""
    valid: Test | None = None
    """Likewise, where a correction was fitted to that split."""
    uncalibrated: dict[str, Test] | None = None
    """Split -> its metrics without the correction."""
    calibration: tuple[LogitMap, ...] = ()
    """The correction of each label; none by default."""
    ranks: tuple[RankFigures, ...] = ()
    """Of each process, where there were several."""
    exchange: str = ""
    """How they exchanged rows of a model with towers, and why."""
    sharing: str = ""
    """How it shared the machine's cores; empty where it had them for itself."""


class RunFiles(Model):
    """``files.json``: what people look at, which no other file has hashes of."""

    format: Literal[2] = FORMAT
    hashes: dict[Annotated[str, pydantic.Field(pattern=r"^(report\.html|trace\.json|tensorboard/[^/]+)$")], Hash]


def write_hashes(run: Path) -> None:
    """Write down what the report, the trace and the curves are, now that a session ends."""
    found = [path for path in (run / REPORT, run / TRACE, *sorted((run / "tensorboard").glob("*"))) if path.is_file()]
    write_sealed(
        run / FILES, {"format": FORMAT, "hashes": {str(path.relative_to(run)): file_hash(path) for path in found}}
    )


def check_hashes(run: Path) -> list[Path]:
    """The files that ``files.json`` names, each found to be what was written; none where it is not there."""
    if not (run / FILES).exists():
        return []
    advice = f"where that was meant, remove {run / FILES}"
    found = read_sealed(run / FILES, RunFiles, advice, CheckpointError)
    for name, expected in found.hashes.items():
        try:
            fits = file_hash(regular_file_below(run, name)) == expected
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{error}; {advice}") from error
        if not fits:
            raise CheckpointError(f"{run / name} was changed after it was written: its hash does not match; {advice}")
    return [run / FILES, *(run / name for name in found.hashes)]


def write_recipe(run: Path, recipe: Recipe) -> None:
    """Write down what is trained."""
    write_sealed(run / RECIPE, {"format": FORMAT, "recipe": recipe.to_dict()})


def read_recipe(run: Path) -> Recipe:
    """What a run trains; `DatasetError` or `ConfigError` where that is damaged."""
    found = read_sealed(run / RECIPE, RunRecipe, "name another run, or train it anew", CheckpointError)
    return Recipe.from_dict(found.recipe, str(run / RECIPE))


def write_result(run: Path, result: dict[str, Any]) -> None:
    """Write down the result of a run."""
    write_sealed(run / RESULT, {"format": FORMAT, **result})


def read_result(run: Path) -> Result | None:
    """The result of a run; None where it has none yet."""
    if not (run / RESULT).exists():
        return None
    return read_sealed(run / RESULT, Result, "remove it: `stratarec train --resume` makes it anew", CheckpointError)


def write_plan(run: Path, recipe: Recipe, plan: Plan | None) -> None:
    """Write the plan into the run, beside what it was made for."""
    if plan is not None:
        write_sealed(run / PLAN, {"format": FORMAT, "memory": _asked(recipe), "plan": plan.to_dict()})


def _asked(recipe: Recipe) -> Json:
    """What a plan is made for."""
    content = recipe.to_dict()
    hot = recipe.hot
    asked = {"hot": hot.budget, "copies": hot.copies}
    return {**content["memory"], **{name: size for name, size in asked.items() if size is not None}}


def read_plan(run: Path, recipe: Recipe, dataset: Dataset) -> Plan | None:
    """The plan that a run was started with, if it still is what `recipe` asks for and of the tables of `dataset`."""
    path = run / PLAN
    if not path.exists():
        return None
    found = read_sealed(path, RunPlan, "restore it, or start anew with --overwrite")
    if found.memory != _asked(recipe):
        return None
    plan = Plan.from_dict(found.plan, str(path))
    return plan if {placed.table: placed.rows for placed in plan.tables} == dataset.table_rows() else None
