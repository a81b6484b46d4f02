"""Create small artifacts of every kind and read them as users do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from recipes import tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SPLITS
from stratarec.embedding.config import CodecConfig
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.serving.export_files import check_files
from stratarec.serving.export_manifest import ExportManifest as ExportManifest
from stratarec.serving.scorer import Scorer
from stratarec.training.build import new_plan
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

STEPS = 6
ROWS = "rows"
"""Name of the folder of log homes."""
_ROWS = 600
TIERS: dict[str, Any] = {"precision": "int8", "lookahead": 1, "cache": {"fraction": 0.1, "ways": 8}}


Use: TypeAlias = Callable[[Path, Path], object]
"""Function of the path of an artifact and a folder for outputs."""


def make_log(root: Path) -> Path:
    """Write a log with a feature of every kind: ids, lists, a history, a group, a dense column,
    times, users.
    """
    draws, path = np.random.default_rng(0), root / "log.parquet"
    pl.DataFrame(
        {
            "label": draws.integers(0, 2, _ROWS),
            "user": np.repeat(np.arange(60), 10),
            "time": np.arange(_ROWS),
            "item": draws.integers(0, 200, _ROWS),
            "city": np.repeat(draws.integers(0, 9, 60), 10),
            "tags": [[f"t{draws.integers(0, 40)}" for _ in range(row % 3)] for row in range(_ROWS)],
            "price": draws.random(_ROWS),
        }
    ).write_parquet(path)
    return path


def make_recipe(
    root: Path, run: Path, *, steps: int = STEPS, memory: dict[str, Any] | None = None
) -> Recipe:
    """Return the recipe of every run in these tests."""
    config = tiny(root, run=str(run), batch_size=16, max_steps=steps, eval_every=3, log_every=2)
    config["model"]["embedding_dim"] = 16
    config["train"] |= {"checkpoint": {"every_steps": 2, "keep": 1}}
    config["data"] = {
        "path": str(root / "data"),
        "source": {
            "kind": "parquet",
            "paths": [str(root / "log.parquet")],
            "schema": {
                "sparse": [
                    {"name": "item"},
                    {"name": "city", "group": "where"},
                    {"name": "tags", "kind": "multi"},
                    {"name": "seen", "kind": "history", "of": "item"},
                ],
                "dense": [{"name": "price", "standardize": True}],
                "user": "user",
                "time": "time",
            },
        },
        "split": {"valid": 0.2, "test": 0.2},
        "vocabulary": {"min_count": 1, "tail_buckets": 500},
        "shard_samples": 400,
    }
    if memory is not None:
        config["memory"] = memory
    return Recipe.from_dict(config)


def memories(root: Path) -> dict[str, dict[str, Any] | None]:
    """Return a dictionary from the kind of run to the memory section of its recipe."""
    log = {**TIERS, "block": {"path": str(root / ROWS), "budget": "64MiB"}}
    return {"resident": None, "cached": TIERS, "log": log}


def place_tables(kind: str, recipe: Recipe) -> Plan | None:
    """Return the plan of a recipe. If it has a log, place its cached tables there, with caches that
    training fills.

    The planner would do neither for so few rows.
    """
    plan = new_plan(recipe, Dataset.open(recipe.data.path))
    if plan is None or kind != "log":
        return plan
    tables = tuple(
        placed
        if placed.tier == "level0"
        else replace(placed, tier="log", codec=CodecConfig(kind="int8"), cache_rows=96)
        for placed in plan.tables
    )
    return replace(plan, tables=tables)


def make(root: Path) -> None:
    """Create every artifact in its own folder below `root`."""
    make_log(root)
    recipe = make_recipe(root, root / "run")
    prepare(recipe.data)
    prepare(replace(recipe.data, path=str(root / "plain"), groups="none"))
    for kind, memory in memories(root).items():
        recipe = make_recipe(root, root / kind, memory=memory)
        Trainer(recipe, Dataset.open(recipe.data.path), plan=place_tables(kind, recipe)).train()
    (root / "plan").mkdir()
    recipe = make_recipe(root, root / "run", memory=TIERS)
    plan = place_tables("cached", recipe)
    assert plan is not None
    plan.save(root / "plan" / "plan.json")
    with open_run(root / "resident") as trained:
        export(trained, root / "export")


def _digest(*values: Any) -> str:
    result = hashlib.sha256()
    for value in values:
        array = np.asarray(value)
        result.update(repr((array.dtype, array.shape)).encode())
        result.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return result.hexdigest()


def read(path: Path, _: Path) -> dict[str, str]:
    """Read everything that training, profiles and predictions read of a data set."""
    dataset, results = Dataset.open(path), {}
    for split in SPLITS:
        results[f"{split} rows"] = _digest(*dataset.row_numbers(split))
        for number, shard in enumerate(dataset.shards(split)):
            for group in range(len(shard.row_groups)):
                table = dataset.read_row_group(split, number, group)
                content = json.dumps({name: table[name].to_pylist() for name in table.column_names})
                results[f"{split} {number} {group}"] = hashlib.sha256(content.encode()).hexdigest()
        batches = list(Loader(dataset, split, LoaderConfig(batch_size=64)).epoch(0))
        parts = [(batch.label, batch.dense, batch.sparse.values, batch.sparse.offsets) for batch in batches]
        results[f"{split} batches"] = _digest(*(part.numpy() for each in parts for part in each))
    for name in dataset.vocabularies:
        results[f"counts {name}"] = _digest(dataset.access_counts(name))
    results["inputs"] = json.dumps(dataset.inputs(), sort_keys=True)
    return results


def score(path: Path, _: Path) -> dict[str, str]:
    """Check an export and compute scores with it."""
    check_files(path, ExportManifest.read(path).files)
    frame = {
        "item": [0, 1, 5, 10**9],
        "city": [0, 1, 2, None],
        "tags": [["t1"], [], ["t2", "nothing"], ["t3"] * 5],
        "seen": [[], [1], [2, 3], [10**9]],
        "price": [0.5, 0.1, None, 7.0],
    }
    return {"scores": _digest(Scorer.open(path).score(frame))}
