"""All that can be checked of something that StrataRec wrote, file by file; what a start checks is less, and quick."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.tune.study_record import FILE, STUDY, read_study, run_name
from stratarec.config.difference import first_difference
from stratarec.data.column_names import label_names
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE, DATASET, MANIFEST
from stratarec.data.schema import UNKNOWN
from stratarec.embedding.checkpoint import saved_files, saved_rows
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.io.atomic import file_hash
from stratarec.io.owned_directory import HOLDER, MARKER, check_marker, kind_of
from stratarec.io.sealed import read_sealed
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.serving.delta import DELTA, DELTA_ROWS, DeltaManifest
from stratarec.serving.export_files import check_files, map_tensors
from stratarec.serving.export_manifest import MANIFEST as EXPORT
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.baseline.beside import read_baselines
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

# Files that are named of those that are not read.
_NAMED = 5


def check(path: Path) -> Iterator[str]:
    """Check a data set, a run, an export, a plan or a study; gives a line for each part that was found right.

    Every file is read that anything is known of; the last line names the others, if there are any.

    Raises
    ------
    StrataError
        At the first part that is not.
    ConfigError
        When `path` is none of these.
    """
    read: set[Path] = set()
    if kind_of(path) == DATASET.name or (path / MANIFEST).exists():
        yield from _data_set(path, read)
    elif kind_of(path) == RUN.name or (path / RECIPE).exists():
        yield from _run(path, read)
    elif kind_of(path / STUDY.name) == STUDY.name:
        yield from _study(path, read)
    elif (path / EXPORT).exists():
        yield from _export(path, read)
    elif (path / DELTA).exists():
        yield from _delta(path, read)
    elif path.is_file():
        Plan.load(path)
        yield "plan: every field is right"
    else:
        raise ConfigError(f"{path} is no data set, run, export, delta, plan or study of StrataRec")
    others = [str(each.relative_to(path)) for each in _files(path) if each not in read]
    if others:
        more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
        yield f"not read, since nothing is known of them: {', '.join(others[:_NAMED])}{more}"


def _files(path: Path) -> list[Path]:
    """Everything below a directory but directories, and but what says who works in it now; links as they are."""
    found = (Path(folder, name) for folder, inside, names in os.walk(path) for name in (*inside, *names))
    return sorted(each for each in found if each.name != HOLDER and (each.is_symlink() or not each.is_dir()))


def _export(path: Path, read: set[Path]) -> Iterator[str]:
    manifest = Scorer.open(path).manifest
    check_files(path, manifest.files)
    read |= {path / EXPORT, *(path / name for name in manifest.files)}
    rows = sum(table.rows for table in manifest.tables.values())
    yield f"export: {len(manifest.tables)} tables, {rows:,} rows, every hash fits"


def _delta(path: Path, read: set[Path]) -> Iterator[str]:
    manifest = DeltaManifest.read(path)
    check_files(path, manifest.files)
    map_tensors(path, DELTA_ROWS, manifest.files[DELTA_ROWS], manifest.tensors())
    read |= {path / DELTA, *(path / name for name in manifest.files)}
    yield f"delta: {sum(manifest.changed.values()):,} rows, every hash fits; what it is laid over is not read"


def _data_set(path: Path, read: set[Path]) -> Iterator[str]:
    dataset = Dataset.open(path, verify="full")
    check_marker(path, DATASET)
    read |= {path / MARKER, path / MANIFEST, *(path / file.path for file in dataset.manifest.files())}
    with dataset.locked():
        yield f"files: {len(dataset.manifest.files())} have the hashes that {MANIFEST} names"
        yield from _content(path, dataset)
        beside = read_baselines(dataset)
        if beside is not None:
            read.add(path / BASELINE)
            yield f"baseline: {len(beside.methods)} methods, of this data set"


def _content(path: Path, dataset: Dataset) -> Iterator[str]:
    for name, info in dataset.vocabularies.items():
        counted = dataset.carried_counts(name)["value"] if info.kind == "count" else pl.Series([])
        rest = (~counted.is_in(dataset.vocabulary(name).values.implode())).sum() if len(counted) else 0
        more = f", and {rest:,} without a row" if rest else ""
        more = f"{more}; {info.holes:,} rows of values that are gone" if info.holes else more
        yield f"vocabulary {name}: {info.values - info.holes:,} values, each once{more}"
    events = dataset.events()
    if events is not None:
        yield f"events: the last {len(events):,} of users"
    clicks = dataset.clicks()
    if clicks is not None:
        yield f"clicks: {len(clicks.recent):,} that later ones look back on, {len(clicks.waiting):,} that wait"
    for split in dataset.splits:
        found = np.zeros((len(dataset.schema.label_columns), 2), dtype=np.int64)
        for number in range(len(dataset.shards(split))):
            found += _shard(dataset, split, number)
        for (label, count), (known, positives) in zip(dataset.label_counts(split).items(), found.tolist(), strict=True):
            if (known, positives) != (count.known, count.positives):
                of = f" of {count.known} with {label!r}" if dataset.schema.labels else ""
                have = f"{positives} of {known}" if dataset.schema.labels else str(positives)
                raise DatasetError(
                    f"{path / MANIFEST} names {count.positives} positive samples{of} in {split}, its files have "
                    f"{have}; prepare the data again"
                )
        yield f"{split}: {dataset.samples(split):,} samples, every value within its range"


def _shard(dataset: Dataset, split: str, number: int) -> NDArray[np.int64]:
    """Read all of a shard; of each label the samples that have it, and positive ones."""
    names = label_names(len(dataset.schema.label_columns))
    found = np.zeros((len(names), 2), dtype=np.int64)
    rows, shard = [], dataset.shards(split)[number]
    with dataset.reader(split) as reader:
        for group in range(len(shard.row_groups)):
            samples = reader.read(number, group).samples
            for place, name in enumerate(names):
                label = samples[name].to_numpy()
                found[place] += (np.count_nonzero(label != UNKNOWN), np.count_nonzero(label == 1))
            if dataset.about.rows.kept:
                rows.append(reader.row_numbers(number, group))
    if rows and len(np.unique(np.concatenate(rows))) != shard.samples:
        raise DatasetError(f"{dataset.path / shard.path}: rows of the log stand twice; prepare the data again")
    return found


def _study(path: Path, read: set[Path]) -> Iterator[str]:
    folder = path / STUDY.name
    found = read_study(folder)
    check_marker(folder, STUDY)
    read |= {folder / MARKER, folder / FILE}
    yield f"study: {len(found.trials)} trials, every field is right"
    for number in range(len(found.trials)):
        run = path / run_name(number)
        if (run / RECIPE).exists():
            yield from (f"{run.name}: {line}" for line in _run(run, read))


def _run(path: Path, read: set[Path]) -> Iterator[str]:
    recipe = read_recipe(path)
    check_marker(path, RUN)
    looked_at = check_hashes(path)
    read |= {path / name for name in (MARKER, RECIPE, PLAN, RESULT)}.union(looked_at)
    yield f"recipe: {recipe.name}"
    if looked_at:
        yield f"report and curves: {len(looked_at) - 1} files have the hashes that {FILES} names"
    if _check_plan(path):
        yield "plan: every field is right"
    result = read_result(path)
    if result is not None:
        yield f"result: of {result.checkpoint}"
        if checkpoint.step_path(Path(), result.steps).name < result.checkpoint:
            raise CheckpointError(f"{path / RESULT} is of {result.checkpoint}, after {result.steps} steps")
    found = checkpoint.list_checkpoints(path / "checkpoints")
    if result is not None and path / "checkpoints" / result.checkpoint not in found:
        raise CheckpointError(f"{path} has a result of {result.checkpoint}, which is not there")
    for each in found:
        with checkpoint.locked(each):
            yield f"{each.name}: {_rows(each, recipe, read):,} rows, every hash and checksum fits"
    if (path / "export" / EXPORT).exists():
        yield from _export(path / "export", read)
    if (path / "export.delta" / DELTA).exists():
        yield from _delta(path / "export.delta", read)
    yield from _periods(path, read)


def _check_plan(path: Path) -> bool:
    """Check the plan of a run or of a period; false where it has none."""
    if not (path / PLAN).exists():
        return False
    content = read_sealed(path / PLAN, RunPlan, "restore it, or start anew with --overwrite")
    Plan.from_dict(content.plan, str(path / PLAN))
    return True


def _periods(run: Path, read: set[Path]) -> Iterator[str]:
    """What a run went on with; of earlier periods only what they say of themselves is kept."""
    for number, path in enumerate(periods.paths(run), start=1):
        about, recipe = periods.read(path), read_recipe(path)
        read |= {path / PERIOD, path / RECIPE, path / PLAN}
        _check_plan(path)
        samples = f"{about.file}, {about.scores['all']['samples']:,} samples" if about.kind == "log" else about.kind
        yield f"period {number}: {samples}"
        if number > 1 and about.parent != file_hash(periods.of_number(run, number - 1) / PERIOD):
            raise CheckpointError(f"{path / PERIOD} goes on from another period than the one before it")
        for each in checkpoint.list_checkpoints(path / "checkpoints"):
            periods.check(path)
            yield f"period {number}, {each.name}: {_rows(each, recipe, read):,} rows, every hash and checksum fits"
        if (path / DATA / MANIFEST).exists():
            yield from (f"period {number}, {line}" for line in _data_set(path / DATA, read))


def _rows(path: Path, recipe: Recipe, read: set[Path]) -> int:
    """Read all of a checkpoint of `recipe`; how many rows its tables have."""
    loaded, total = checkpoint.load(path), 0
    for name, tensors in ((NETWORK, loaded.network), (OPTIMIZER, loaded.optimizer)):
        checkpoint.check_tensors(path / name, tensors, tensors)
    other = first_difference(recipe.to_dict()["model"], loaded.state["identity"]["model"], "model")
    if other is not None:
        raise CheckpointError(f"{path} has {other.field} {other.have!r}, {path.parents[1] / RECIPE} {other.want!r}")
    read |= {path / name for name in (STATE, NETWORK, OPTIMIZER)}
    for group in loaded.state["tables"]["groups"]:
        read.update(saved_files(path / "tables" / group["name"], group))
        for rows, found in saved_rows(path / "tables" / group["name"], group):
            if not all(np.isfinite(values).all() for values in (found.weights, found.row_state, found.full_state)):
                raise CheckpointError(f"{path}: {group['name']} has a row that is not finite")
            total += len(rows)
    return total
