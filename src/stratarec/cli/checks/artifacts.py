"""Verify everything that StrataRec wrote, file by file. Opening a data set or a run checks less,
and is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stratarec.cli.checks.dataset import check_dataset, is_dataset, unknown_files
from stratarec.cli.tune.study_record import FILE, STUDY, read_study, run_name
from stratarec.config.validate import first_difference
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.embedding.checkpoint import saved_files, saved_rows
from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.atomic import file_hash
from stratarec.io.owned_directory import MARKER, check_marker, kind_of
from stratarec.io.sealed import read_sealed
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.serving.export_files import check_files, map_tensors
from stratarec.serving.export_manifest import DELTA, DELTA_ROWS, DeltaManifest
from stratarec.serving.export_manifest import MANIFEST as EXPORT
from stratarec.serving.exported_model import read_network
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.checkpoint import NETWORK, OPTIMIZER, STATE
from stratarec.training.run import periods
from stratarec.training.run.mirror import local_identity
from stratarec.training.run.periods import DATA, PERIOD
from stratarec.training.run.run_directory import (
    FILES,
    MIRROR,
    OUTPUTS,
    PLAN,
    RECIPE,
    REFIT,
    RESULT,
    RUN,
    RunPlan,
    check_hashes,
    read_recipe,
    read_result,
)


def check(path: Path) -> Iterator[str]:
    """Verify a data set, run, export, delta, plan or study; yield one line for each part that is
    valid.

    All known files are read. The last line names files that are not known, if there are any.

    Raises
    ------
    StrataError
        At the first invalid part.
    ConfigError
        If `path` is none of these.
    """
    read: set[Path] = set()
    if is_dataset(path):
        yield from check_dataset(path, read)
    elif kind_of(path) == RUN.name or (path / RECIPE).exists():
        yield from _check_run(path, read)
    elif kind_of(path / STUDY.name) == STUDY.name:
        yield from _check_study(path, read)
    elif (path / EXPORT).exists():
        yield from _check_export(path, read)
    elif (path / DELTA).exists():
        yield from _check_delta(path, read)
    elif path.is_file():
        Plan.load(path)
        yield "plan: every field is valid"
    else:
        raise ConfigError(f"{path} is not a data set, run, export, delta, plan or study of StrataRec")
    yield from unknown_files(path, read)


def _check_export(path: Path, read: set[Path]) -> Iterator[str]:
    scorer = Scorer.open(path)
    manifest = scorer.manifest
    check_files(path, manifest.files)
    read |= {path / EXPORT, *(path / name for name in manifest.files)}
    rows = sum(table.rows for table in manifest.tables.values())
    yield f"export: {len(manifest.tables)} tables, {rows:,} rows, every hash matches; {scorer.runtime} computes scores"


def _check_delta(path: Path, read: set[Path]) -> Iterator[str]:
    manifest = DeltaManifest.read(path)
    check_files(path, manifest.files)
    read_network(path, manifest.manifest)
    map_tensors(path, DELTA_ROWS, manifest.files[DELTA_ROWS], manifest.tensors())
    read |= {path / DELTA, *(path / name for name in manifest.files)}
    yield f"delta: {sum(manifest.changed.values()):,} rows, every hash matches; its base export is not read"


def _check_study(path: Path, read: set[Path]) -> Iterator[str]:
    folder = path / STUDY.name
    study = read_study(folder)
    check_marker(folder, STUDY)
    read |= {folder / MARKER, folder / FILE}
    yield f"study: {len(study.trials)} trials, every field is valid"
    for number in range(len(study.trials)):
        run = path / run_name(number)
        if (run / RECIPE).exists():
            yield from (f"{run.name}: {line}" for line in _check_run(run, read))


def _check_run(path: Path, read: set[Path]) -> Iterator[str]:
    recipe = read_recipe(path)
    check_marker(path, RUN)
    hashed = check_hashes(path)
    local_identity(path)
    read |= {path / name for name in (MARKER, RECIPE, PLAN, RESULT, MIRROR)}.union(hashed)
    yield f"recipe: {recipe.name}"
    if hashed:
        yield f"report and curves: {len(hashed) - 1} files have the hashes in {FILES}"
    if _check_plan(path):
        yield "plan: every field is valid"
    result = read_result(path)
    if result is not None:
        yield f"result: of {result.checkpoint}"
        if checkpoint.step_path(Path(), result.steps).name < result.checkpoint:
            raise CheckpointError(
                f"{path / RESULT} names {result.checkpoint}, but only {result.steps} steps"
            )
    checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
    if (path / REFIT / RECIPE).exists():
        read |= {path / REFIT / RECIPE, path / REFIT / PLAN}
        read_recipe(path / REFIT)
        _check_plan(path / REFIT)
        checkpoints += checkpoint.list_checkpoints(path / REFIT / "checkpoints")
    # A continued run does not need its first checkpoints, which contain values that `forget`
    # removed.
    if result is not None and (checkpoints or not periods.paths(path)):
        for needed in (result.tested(path), result.served(path)):
            if needed not in checkpoints:
                raise CheckpointError(
                    f"{path / RESULT} names {needed.relative_to(path)}, which does not exist"
                )
    for folder in checkpoints:
        with checkpoint.locked(folder):
            phase = "refit, " if folder.parents[1] != path else ""
            rows = _check_checkpoint(folder, recipe, read)
            yield f"{phase}{folder.name}: {rows:,} rows, every hash and checksum matches"
    if (path / "export" / EXPORT).exists():
        yield from _check_export(path / "export", read)
    if (path / "export.delta" / DELTA).exists():
        yield from _check_delta(path / "export.delta", read)
    yield from _check_periods(path, read)
    outputs = [file for pattern in OUTPUTS for file in sorted(path.glob(pattern)) if not file.is_symlink()]
    if outputs:
        read.update(outputs)
        yield f"outputs, which have no hash: {', '.join(file.name for file in outputs)}"


def _check_plan(path: Path) -> bool:
    """Check the plan of a run or of a period. Return False if there is no plan."""
    if not (path / PLAN).exists():
        return False
    content = read_sealed(path / PLAN, RunPlan, "restore it, or start again with --overwrite")
    Plan.from_dict(content.plan, str(path / PLAN))
    return True


def _check_periods(run: Path, read: set[Path]) -> Iterator[str]:
    """Check the periods of a run. For earlier periods only the records exist, and the data is
    deleted.
    """
    for number, path in enumerate(periods.paths(run), start=1):
        period, recipe = periods.read(path), read_recipe(path)
        read |= {path / PERIOD, path / RECIPE, path / PLAN}
        _check_plan(path)
        samples = (
            f"{period.file}, {period.scores['all']['samples']:,} samples"
            if period.kind == "log"
            else period.kind
        )
        yield f"period {number}: {samples}"
        if number > 1 and period.parent != file_hash(periods.of_number(run, number - 1) / PERIOD):
            raise CheckpointError(f"{path / PERIOD} does not follow the period before it")
        for folder in checkpoint.list_checkpoints(path / "checkpoints"):
            periods.check(path)
            rows = _check_checkpoint(folder, recipe, read)
            yield f"period {number}, {folder.name}: {rows:,} rows, every hash and checksum matches"
        if (path / DATA / MANIFEST).exists():
            yield from (f"period {number}, {line}" for line in check_dataset(path / DATA, read))


def _check_checkpoint(path: Path, recipe: Recipe, read: set[Path]) -> int:
    """Read a complete checkpoint, whose model must be the one of `recipe`. Return the number of its
    rows.
    """
    loaded, total = checkpoint.load(path), 0
    for name, tensors in ((NETWORK, loaded.network), (OPTIMIZER, loaded.optimizer)):
        checkpoint.check_tensors(path / name, tensors, tensors)
    difference = first_difference(recipe.to_dict()["model"], loaded.state["identity"]["model"], "model")
    if difference is not None:
        raise CheckpointError(
            f"{path} has {difference.field} {difference.have!r}, but "
            f"{path.parents[1] / RECIPE} {difference.want!r}"
        )
    read |= {path / name for name in (STATE, NETWORK, OPTIMIZER)}
    for group in loaded.state["tables"]["groups"]:
        read.update(saved_files(path / "tables" / group["name"], group))
        for rows, arrays in saved_rows(path / "tables" / group["name"], group):
            if not all(
                np.isfinite(values).all()
                for values in (arrays.weights, arrays.row_state, arrays.full_state)
            ):
                raise CheckpointError(f"{path}: {group['name']} has a row that is not finite")
            total += len(rows)
    return total
