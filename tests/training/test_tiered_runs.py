"""Test runs whose tables have tiers: the same model as in memory, and the files on disk."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from errors import missing
from recipes import assert_same_model, fill_disk, last, prepared, start, table_values, tiny, train
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.config import CodecConfig
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.build import new_plan
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

EVERY_ROW: dict[str, Any] = {"kind": "adam", "learning_rate": 0.01, "rows": "all", "weight_decay": 0.01}
INT8: dict[str, Any] = {"precision": "int8", "lookahead": 2, "cache": {"fraction": 0.1, "ways": 8}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set."""
    root = tmp_path_factory.mktemp("tiered")
    prepared(Recipe.from_dict(content(root)).data)
    return root


def content(root: Path, **train: Any) -> dict[str, Any]:
    """Return a configuration with tables of up to a few thousand rows, of which batches use a small
    part.
    """
    config = tiny(root, **{"batch_size": 64, "eval_every": 40, **train})
    config["data"]["source"]["scale"] = 0.05
    config["data"]["vocabulary"] = {"min_count": 1, "tail_buckets": 4}
    config["model"]["embedding_dim"] = 16
    return config


def make_recipe(home: Path, run: Path, memory: dict[str, Any], **train: Any) -> Recipe:
    return Recipe.from_dict({**content(home, run=str(run), **train), "memory": memory})


def on_ssd(recipe: Recipe, kind: Literal["fp32", "int8"]) -> Plan:
    """Return the plan of `recipe` with its cached tables in an SSD store, unlike the plan for so
    few rows.
    """
    plan = new_plan(recipe, Dataset.open(recipe.data.path))
    assert plan is not None
    codec = CodecConfig(kind=kind)
    tables = tuple(
        placed if placed.tier == "level0" else replace(placed, tier="log", codec=codec)
        for placed in plan.tables
    )
    return replace(plan, tables=tables)


def cached(trainer: Trainer) -> int:
    return sum(
        len(tables.configs)
        for tables in trainer.parts.model.embeddings.engine.tables
        if not tables.resident
    )


def test_float32_homes_give_the_model_of_tables_in_memory(home: Path, tmp_path: Path) -> None:
    """Cases include rows that a step changes without looking them up, and clipped gradients that
    include the rows'.
    """
    options: dict[str, Any] = {"embedding": EVERY_ROW, "clip_norm": 0.05, "clip_rows": True}
    plain = train(make_recipe(home, tmp_path / "plain", {}, **options))
    block = {"path": str(tmp_path / "rows"), "budget": "64MiB"}
    recipe = make_recipe(home, tmp_path / "log", {**INT8, "block": block}, **options)
    tiered = train(recipe, plan=on_ssd(recipe, "fp32"))
    assert cached(tiered) > 0
    assert plain.state.losses == tiered.state.losses
    assert [entry["auc"] for entry in plain.state.evaluations] == [
        entry["auc"] for entry in tiered.state.evaluations
    ]
    left, right = all_rows(tmp_path / "plain"), all_rows(tmp_path / "log")
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_array_equal(values, right[name], err_msg=name)


def test_reading_a_run_changes_no_file_in_the_directories_of_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, scratch = tmp_path / "rows", tmp_path / "scratch"
    recipe = make_recipe(
        home, tmp_path / "a", {**INT8, "block": {"path": str(rows), "budget": "64MiB"}}, max_steps=10
    )
    train(recipe, plan=on_ssd(recipe, "int8"))
    shutil.rmtree(rows)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    # Leftovers of a killed reader, and a link that an attacker planted among them.
    for left in (rows / "tiny-reading-mine", scratch / "stratarec-temporary-0123456789ab"):
        left.mkdir(parents=True)
        (left / "kept").touch()
    before = sorted(rows.rglob("*"))
    for command in (
        ["evaluate"],
        ["predict", "-o", str(tmp_path / "s.parquet")],
        ["export", "-o", str(tmp_path / "e")],
    ):
        assert main([command[0], "-q", str(tmp_path / "a"), *command[1:]]) == 0
    assert sorted(rows.rglob("*")) == before
    # The memory of a run without a plan is measured in another directory.
    (tmp_path / "a" / "plan.json").unlink()
    assert main(["evaluate", "-q", str(tmp_path / "a")]) == 0
    broken = last(tmp_path / "a") / "tables"
    next(broken.glob("*/slots/rows-*.safetensors")).write_bytes(b"damaged")
    assert main(["evaluate", "-q", str(tmp_path / "a")]) != 0
    assert sorted(rows.rglob("*")) == before
    assert not list(scratch.iterdir())


def test_other_tiers_load_a_checkpoint_before_and_after_they_train(home: Path, tmp_path: Path) -> None:
    train(make_recipe(home, tmp_path / "a", INT8, max_steps=5))
    results = []
    for name, steps in (("new", 0), ("trained", 5)):
        recipe = make_recipe(home, tmp_path / name, {}, max_steps=5)
        trained = Trainer(recipe, Dataset.open(recipe.data.path)).build()
        for step, item in enumerate(itertools.islice(trained.pipeline.load(0), steps)):
            trained.pipeline.train(step, *item)
        trained.restore(last(tmp_path / "a"))
        tables = trained.model.embeddings
        results.append(
            [part.numpy().copy() for table in tables.tables for part in tables.table(table.name).values()]
        )
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def all_rows(run: Path) -> dict[str, Any]:
    """Return weights and state of every table in a run's last checkpoint, under any tiers."""
    with open_run(run) as trained:
        collection = trained.model.embeddings
        return {
            f"{table.name}.{part}": value.numpy().copy()
            for table in collection.tables
            for part, value in collection.table(table.name).items()
        }


def test_a_checkpoint_resumes_under_other_tiers(home: Path, tmp_path: Path) -> None:
    train(make_recipe(home, tmp_path / "a", INT8, max_steps=30, embedding=EVERY_ROW))
    before = all_rows(tmp_path / "a")
    recipe = make_recipe(home, tmp_path / "a", {}, max_steps=30, embedding=EVERY_ROW)
    run = Trainer(recipe, Dataset.open(recipe.data.path)).build()
    run.restore(last(tmp_path / "a"))
    after = {
        f"{table.name}.{part}": value.numpy()
        for table in run.model.embeddings.tables
        for part, value in run.model.embeddings.table(table.name).items()
    }
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)
    train(recipe, resume=True)


def test_checkpoints_contain_only_changes(home: Path, tmp_path: Path) -> None:
    train(make_recipe(home, tmp_path / "a", {}, checkpoint={"every_steps": 1, "keep": 50}, max_steps=12))
    paths = checkpoint.list_checkpoints(tmp_path / "a" / "checkpoints")
    files = [
        {path.name: path.stat() for path in (each / "tables").rglob("rows-*.safetensors")} for each in paths
    ]
    went_on = 0
    for first, second in pairwise(files):
        shared = [name for name in first if name in second and first[name].st_ino == second[name].st_ino]
        new = sum(stat.st_size for name, stat in second.items() if name not in first)
        assert new > 0
        # The base is written again when there are half as many changes as rows.
        went_on += bool(shared) and new < sum(stat.st_size for stat in first.values()) / 2
    assert went_on
    assert table_values(paths[1]).keys() == table_values(paths[0]).keys()


@pytest.mark.slow
def test_a_disk_that_fills_in_mid_run_ends_the_run_at_its_last_checkpoint(
    home: Path, tmp_path: Path, small_disk: Path
) -> None:
    def make_run_recipe(name: str, rows: Path) -> Recipe:
        block = {**INT8, "block": {"path": str(rows), "budget": "64MiB"}}
        return make_recipe(home, tmp_path / name, block, checkpoint={"every_steps": 9, "keep": 2}, epochs=8)

    uninterrupted = make_run_recipe("whole", tmp_path / "rows")
    train(uninterrupted, plan=on_ssd(uninterrupted, "int8"))
    filled = make_run_recipe("filled", small_disk / "rows")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(filled.to_dict()))
    on_ssd(uninterrupted, "int8").save(tmp_path / "plan.json")
    command = (tmp_path / "r.yaml", "--plan", str(tmp_path / "plan.json"))
    process = start(*command)
    while process.poll() is None and not checkpoint.list_checkpoints(tmp_path / "filled" / "checkpoints"):
        time.sleep(0.01)
    fill_disk(small_disk / "filler", 0)
    _, errors = process.communicate()
    line = errors.decode().splitlines()[-1]
    assert process.returncode == 2, errors.decode()
    assert str(small_disk / "rows") in line
    assert not missing("device", line)
    assert "Traceback" not in errors.decode()
    (small_disk / "filler").unlink()
    with pytest.warns(RuntimeWarning, match="hard links from"):  # its rows are on another disk
        assert main(["train", "-q", "--resume", *map(str, command)]) == 0
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "filled"))
