"""Verify everything that StrataRec wrote, file by file. Opening a data set or a run checks less, and is faster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.tune.study_record import FILE, STUDY, read_study, run_name
from stratarec.config.validate import first_difference
from stratarec.data.column_names import label_names
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE, BASELINE_SCORES, DATASET, MANIFEST
from stratarec.data.schema import UNKNOWN
from stratarec.embedding.checkpoint import saved_files, saved_rows
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.io.atomic import file_hash
from stratarec.io.owned_directory import MARKER, check_marker, kind_of
from stratarec.io.sealed import read_sealed
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.serving.export_files import check_files, map_tensors
from stratarec.serving.export_manifest import DELTA, DELTA_ROWS, DeltaManifest
from stratarec.serving.export_manifest import MANIFEST as EXPORT
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.baseline.baselines import read_baselines, read_scores
from stratarec.training.checkpoint import NETWORK, OPTIMIZER, STATE
from stratarec.training.run import periods
from stratarec.training.run.periods import DATA, PERIOD
from stratarec.training.run.run_directory import (
    FILES,
    PLAN,
    RECIPE,
    RESULT,
    RUN,
    RunPlan,
    check_hashes,
    read_recipe,
    read_result,
)

# Number of unknown files whose names are printed.
_SHOWN_FILES = 5


def check(path: Path) -> Iterator[str]:
    """Verify a data set, run, export, delta, plan or study; yield one line for each part that is valid.

    All known files are read. The last line names files that are not known, if there are any.

    Raises
    ------
    StrataError
        At the first invalid part.
    ConfigError
        If `path` is none of these.
    """
    read: set[Path] = set()
    if kind_of(path) == DATASET.name or (path / MANIFEST).exists():
        yield from _check_dataset(path, read)
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
    unknown = [str(file.relative_to(path)) for file in _files(path) if file not in read]
    if unknown:
        more = f" and {len(unknown) - _SHOWN_FILES:,} more" if len(unknown) > _SHOWN_FILES else ""
        yield f"unknown files, not read: {', '.join(unknown[:_SHOWN_FILES])}{more}"


def _files(path: Path) -> list[Path]:
    """Return all files and links below a directory."""
    paths = (Path(folder, name) for folder, folders, names in os.walk(path) for name in (*folders, *names))
    return sorted(each for each in paths if each.is_symlink() or not each.is_dir())


def _check_export(path: Path, read: set[Path]) -> Iterator[str]:
    manifest = Scorer.open(path).manifest
    check_files(path, manifest.files)
    read |= {path / EXPORT, *(path / name for name in manifest.files)}
    rows = sum(table.rows for table in manifest.tables.values())
    yield f"export: {len(manifest.tables)} tables, {rows:,} rows, every hash matches"


def _check_delta(path: Path, read: set[Path]) -> Iterator[str]:
    manifest = DeltaManifest.read(path)
    check_files(path, manifest.files)
    map_tensors(path, DELTA_ROWS, manifest.files[DELTA_ROWS], manifest.tensors())
    read |= {path / DELTA, *(path / name for name in manifest.files)}
    yield f"delta: {sum(manifest.changed.values()):,} rows, every hash matches; its base export is not read"


def _check_dataset(path: Path, read: set[Path]) -> Iterator[str]:
    dataset = Dataset.open(path, verify="full")
    check_marker(path, DATASET)
    read |= {path / MARKER, path / MANIFEST, *(path / file.path for file in dataset.manifest.files())}
    with dataset.locked():
        yield f"files: {len(dataset.manifest.files())} have the hashes in {MANIFEST}"
        yield from _check_content(path, dataset)
        baselines = read_baselines(dataset)
        if baselines is not None:
            read_scores(dataset, baselines)
            read |= {path / BASELINE, path / BASELINE_SCORES}
            yield f"baseline: {len(baselines.methods)} methods, of this data set"


def _check_content(path: Path, dataset: Dataset) -> Iterator[str]:
    for name, info in dataset.vocabularies.items():
        counted = dataset.carried_counts(name)["value"] if info.kind == "count" else pl.Series([])
        rare = (~counted.is_in(dataset.vocabulary(name).values.implode())).sum() if len(counted) else 0
        more = f", and {rare:,} without a row" if rare else ""
        more += f"; {info.holes:,} rows of removed values" if info.holes else ""
        yield f"vocabulary {name}: {info.values - info.holes:,} distinct values{more}"
    events = dataset.events()
    if events is not None:
        yield f"events: the last {len(events):,} of users"
    clicks = dataset.clicks()
    if clicks is not None:
        yield f"clicks: {len(clicks.recent):,} for later look-back, {len(clicks.waiting):,} not yet samples"
    for split in dataset.splits:
        totals = np.zeros((len(dataset.schema.label_columns), 2), dtype=np.int64)
        for number in range(len(dataset.shards(split))):
            totals += _check_shard(dataset, split, number)
        for (label, count), (known, positives) in zip(
            dataset.label_counts(split).items(), totals.tolist(), strict=True
        ):
            if (known, positives) != (count.known, count.positives):
                of = f" of {count.known} with {label!r}" if dataset.schema.labels else ""
                have = f"{positives} of {known}" if dataset.schema.labels else str(positives)
                raise DatasetError(
                    f"{path / MANIFEST} names {count.positives} positive samples{of} in {split}, its files have "
                    f"{have}; prepare the data again"
                )
        yield f"{split}: {dataset.samples(split):,} samples, every value within its range"


def _check_shard(dataset: Dataset, split: str, number: int) -> NDArray[np.int64]:
    """Read a whole shard; return the labelled and the positive samples of each label, ``[labels, 2]``."""
    names = label_names(len(dataset.schema.label_columns))
    totals = np.zeros((len(names), 2), dtype=np.int64)
    rows, shard = [], dataset.shards(split)[number]
    with dataset.reader(split) as reader:
        for group in range(len(shard.row_groups)):
            samples = reader.read(number, group).samples
            for index, name in enumerate(names):
                label = samples[name].to_numpy()
                totals[index] += (np.count_nonzero(label != UNKNOWN), np.count_nonzero(label == 1))
            if dataset.about.rows.kept:
                rows.append(reader.row_numbers(number, group))
    if rows and len(np.unique(np.concatenate(rows))) != shard.samples:
        raise DatasetError(f"{dataset.path / shard.path} has duplicate rows of the log; prepare the data again")
    return totals


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
    read |= {path / name for name in (MARKER, RECIPE, PLAN, RESULT)}.union(hashed)
    yield f"recipe: {recipe.name}"
    if hashed:
        yield f"report and curves: {len(hashed) - 1} files have the hashes in {FILES}"
    if _check_plan(path):
        yield "plan: every field is valid"
    result = read_result(path)
    if result is not None:
        yield f"result: of {result.checkpoint}"
        if checkpoint.step_path(Path(), result.steps).name < result.checkpoint:
            raise CheckpointError(f"{path / RESULT} names {result.checkpoint}, after {result.steps} steps")
    checkpoints = checkpoint.list_checkpoints(path / "checkpoints")
    if result is not None and path / "checkpoints" / result.checkpoint not in checkpoints:
        raise CheckpointError(f"{path / RESULT} names {result.checkpoint}, which does not exist")
    for folder in checkpoints:
        with checkpoint.locked(folder):
            yield f"{folder.name}: {_check_checkpoint(folder, recipe, read):,} rows, every hash and checksum matches"
    if (path / "export" / EXPORT).exists():
        yield from _check_export(path / "export", read)
    if (path / "export.delta" / DELTA).exists():
        yield from _check_delta(path / "export.delta", read)
    yield from _check_periods(path, read)


def _check_plan(path: Path) -> bool:
    """Check the plan of a run or of a period; False if it has none."""
    if not (path / PLAN).exists():
        return False
    content = read_sealed(path / PLAN, RunPlan, "restore it, or start again with --overwrite")
    Plan.from_dict(content.plan, str(path / PLAN))
    return True


def _check_periods(run: Path, read: set[Path]) -> Iterator[str]:
    """Check the periods of a run. Of earlier periods only the records remain, not the data."""
    for number, path in enumerate(periods.paths(run), start=1):
        period, recipe = periods.read(path), read_recipe(path)
        read |= {path / PERIOD, path / RECIPE, path / PLAN}
        _check_plan(path)
        samples = f"{period.file}, {period.scores['all']['samples']:,} samples" if period.kind == "log" else period.kind
        yield f"period {number}: {samples}"
        if number > 1 and period.parent != file_hash(periods.of_number(run, number - 1) / PERIOD):
            raise CheckpointError(f"{path / PERIOD} does not follow the period before it")
        for folder in checkpoint.list_checkpoints(path / "checkpoints"):
            periods.check(path)
            rows = _check_checkpoint(folder, recipe, read)
            yield f"period {number}, {folder.name}: {rows:,} rows, every hash and checksum matches"
        if (path / DATA / MANIFEST).exists():
            yield from (f"period {number}, {line}" for line in _check_dataset(path / DATA, read))


def _check_checkpoint(path: Path, recipe: Recipe, read: set[Path]) -> int:
    """Read a whole checkpoint of `recipe`, and return the number of its rows."""
    loaded, total = checkpoint.load(path), 0
    for name, tensors in ((NETWORK, loaded.network), (OPTIMIZER, loaded.optimizer)):
        checkpoint.check_tensors(path / name, tensors, tensors)
    difference = first_difference(recipe.to_dict()["model"], loaded.state["identity"]["model"], "model")
    if difference is not None:
        raise CheckpointError(
            f"{path} has {difference.field} {difference.have!r}, {path.parents[1] / RECIPE} {difference.want!r}"
        )
    read |= {path / name for name in (STATE, NETWORK, OPTIMIZER)}
    for group in loaded.state["tables"]["groups"]:
        read.update(saved_files(path / "tables" / group["name"], group))
        for rows, arrays in saved_rows(path / "tables" / group["name"], group):
            if not all(np.isfinite(values).all() for values in (arrays.weights, arrays.row_state, arrays.full_state)):
                raise CheckpointError(f"{path}: {group['name']} has a row that is not finite")
            total += len(rows)
    return total
