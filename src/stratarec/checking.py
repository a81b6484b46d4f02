"""All that can be checked of something that StrataRec wrote, file by file; what a start checks is less, and quick."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stratarec.artifacts import read_sealed
from stratarec.data.dataset import Dataset
from stratarec.data.manifest import DATASET, MANIFEST
from stratarec.data.names import LABEL
from stratarec.data.vocabulary import read_vocabulary
from stratarec.embedding.saving import saved_rows
from stratarec.errors import CheckpointError, ConfigError, DatasetError
from stratarec.ownership import kind_of
from stratarec.planning.plan import Plan
from stratarec.serving.manifest import MANIFEST as EXPORT
from stratarec.serving.scorer import Scorer
from stratarec.tensors import read_tensors
from stratarec.training import checkpoint
from stratarec.training.directory import PLAN, RECIPE, RUN
from stratarec.training.records import RunPlan, read_recipe, read_result
from stratarec.training.state import NETWORK, OPTIMIZER


def check(path: Path) -> Iterator[str]:
    """Check a data set, a run, an export or a plan; gives a line for each part that was found right.

    Raises
    ------
    StrataError
        At the first part that is not.
    ConfigError
        When `path` is none of these.
    """
    if kind_of(path) == DATASET.name or (path / MANIFEST).exists():
        yield from _data_set(path)
    elif kind_of(path) == RUN.name or (path / RECIPE).exists():
        yield from _run(path)
    elif (path / EXPORT).exists():
        tables = Scorer.open(path).manifest.tables
        yield f"export: {len(tables)} tables, {sum(table.rows for table in tables.values()):,} rows, every hash fits"
    elif path.is_file():
        Plan.load(path)
        yield "plan: every field is right"
    else:
        raise ConfigError(f"{path} is no data set, run, export or plan of StrataRec")


def _data_set(path: Path) -> Iterator[str]:
    dataset = Dataset.open(path, verify="full")
    yield f"files: {len(dataset.manifest.files())} have the hashes that {MANIFEST} names"
    for name, info in dataset.vocabularies.items():
        read_vocabulary(path / info.path, info, str(path / info.path))
        yield f"vocabulary {name}: {info.values:,} values, each once"
    for split in dataset.splits:
        positives = sum(_shard(dataset, split, number) for number in range(len(dataset.shards(split))))
        if positives != dataset.positives[split]:
            raise DatasetError(
                f"{path / MANIFEST} names {dataset.positives[split]} positive samples in {split}, its files have "
                f"{positives}; prepare the data again"
            )
        yield f"{split}: {dataset.samples(split):,} samples, every value within its range"


def _shard(dataset: Dataset, split: str, number: int) -> int:
    """Read all of a shard; how many of its samples are positive."""
    positives, rows, shard = 0, [], dataset.shards(split)[number]
    with dataset.reader(split) as reader:
        for group in range(len(shard.row_groups)):
            positives += int(reader.read(number, group).samples[LABEL].to_numpy().sum())
            if dataset.about.rows.kept:
                rows.append(reader.row_numbers(number, group))
    if rows and len(np.unique(np.concatenate(rows))) != shard.samples:
        raise DatasetError(f"{dataset.path / shard.path}: rows of the log stand twice; prepare the data again")
    return positives


def _run(path: Path) -> Iterator[str]:
    recipe = read_recipe(path)
    yield f"recipe: {recipe.name}"
    if (path / PLAN).exists():
        content = read_sealed(path / PLAN, RunPlan, "start anew with --overwrite")
        Plan.from_dict(content.plan, str(path / PLAN))
        yield "plan: every field is right"
    result = read_result(path)
    if result is not None:
        yield f"result: of {result.checkpoint}"
    found = checkpoint.steps(path / "checkpoints")
    if result is not None and path / "checkpoints" / result.checkpoint not in found:
        raise CheckpointError(f"{path} has a result of {result.checkpoint}, which is not there")
    for each in found:
        with checkpoint.held(each):
            yield f"{each.name}: {_rows(each):,} rows, every hash and checksum fits"


def _rows(path: Path) -> int:
    """Read all of a checkpoint; how many rows its tables have."""
    loaded, total = checkpoint.load(path), 0
    for name in (NETWORK, OPTIMIZER):
        tensors = read_tensors(path / name)
        checkpoint.check_tensors(path / name, tensors, tensors)
    known = loaded.state["identity"]
    recipe = read_recipe(path.parents[1]).to_dict()
    if json.dumps(recipe["model"], sort_keys=True) != json.dumps(known["model"], sort_keys=True):
        raise CheckpointError(f"{path} is of another model than {path.parents[1] / RECIPE}")
    for group in loaded.state["tables"]["groups"]:
        for rows, found in saved_rows(path / "tables" / group["name"], group):
            if not all(np.isfinite(values).all() for values in (found.weights, found.row_state, found.full_state)):
                raise CheckpointError(f"{path}: {group['name']} has a row that is not finite")
            total += len(rows)
    return total
