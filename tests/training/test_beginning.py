"""Test runs that start from the weights of another run: every value keeps its row under any tiers
of both runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from errors import missing, refuses
from recipes import assert_same_model, last
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.distributed.mesh import Mesh
from stratarec.embedding.config import CodecConfig
from stratarec.errors import CheckpointError, ConfigError
from stratarec.io.tensors import read_tensors
from stratarec.models import CTRModel
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.build import identity, new_model, new_plan
from stratarec.training.run.open_run import open_run, open_warm_start
from stratarec.training.torch_setup import build_optimizer
from stratarec.training.trainer import Trainer

MEMORIES: dict[str, dict[str, Any]] = {
    "memory": {},
    "int8": {"precision": "int8", "lookahead": 1, "cache": {"fraction": 0.2, "ways": 16}},
    "log": {"precision": "int8", "lookahead": 1, "cache": {"fraction": 0.2, "ways": 16}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "memory": {},
    "int8": {},
    "log": {"rows": "all", "weight_decay": 0.1},
}
"""Optimizer of the run under each memory section."""
Rows = dict[Any, tuple[np.ndarray[Any, Any], ...]]


def write_log(root: Path, day: int, rows: int = 3000) -> None:
    random = np.random.default_rng(day)
    items = day * 60 + random.geometric(0.005, rows)
    pl.DataFrame(
        {
            "label": random.integers(0, 2, rows),
            "item": items,
            "place": [f"p{place}" for place in random.integers(0, 40, rows)],
            "age": random.gamma(2.0, 10.0 + day, rows),
        }
    ).write_parquet(root / f"log-{day}.parquet")


def content(root: Path, day: int, run: Path, memory: str = "memory", **train: Any) -> dict[str, Any]:
    memories = dict(MEMORIES[memory])
    if memory == "log":
        memories["block"] = {"path": str(run.parent / "rows"), "budget": "64MiB"}
    base = {"base": str(root / f"day-{day - 1}")} if day else {}
    return {
        "name": f"day-{day}",
        "data": {
            "path": str(root / f"day-{day}"),
            "source": {
                "kind": "parquet",
                "paths": [str(root / f"log-{day}.parquet")],
                "schema": {"sparse": [{"name": "item"}, {"name": "place"}], "dense": [{"name": "age"}]},
            },
            "split": {"valid": 0.0, "test": 0.2},
            "vocabulary": {
                "min_count": 3,
                "tail_buckets": 5,
                "overrides": {"place": {"kind": "hash", "buckets": 30}},
                **base,
            },
        },
        "model": {"kind": "dlrm", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8]},
        "memory": memories,
        "train": {"run": str(run), "batch_size": 16, "max_steps": 12, "report": False, **train},
    }


def make_plan(recipe: Recipe) -> Plan | None:
    """Return the plan of a recipe.

    With a block device, place its tables there in float32, which the planner would not do.
    """
    dataset = Dataset.open(recipe.data.path)
    plan = new_plan(recipe, dataset)
    if plan is None or recipe.memory.block is None:
        return plan
    tables = (
        replace(t, tier="log", codec=CodecConfig(kind="fp32")) for t in plan.tables if t.tier != "level0"
    )
    results = {table.table: table for table in tables}
    return replace(plan, tables=tuple(results.get(table.table, table) for table in plan.tables))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare data of three days, and train a run on the first day under each memory section."""
    root = tmp_path_factory.mktemp("beginning")
    for day in range(3):
        write_log(root, day)
        prepare(Recipe.from_dict(content(root, day, root / "run")).data)
    for memory in MEMORIES:
        recipe = Recipe.from_dict(
            content(root, 0, root / memory / "run", memory, seed=4, embedding=OPTIMIZERS[memory])
        )
        Trainer(recipe, Dataset.open(recipe.data.path), plan=make_plan(recipe)).train()
    return root


def rows_by_value(model: CTRModel, dataset: Dataset) -> dict[str, Rows]:
    """Return each table as a dictionary from a value, or the number of a tail bucket, to its
    weights and state.
    """
    results = {}
    for name, info in dataset.vocabularies.items():
        values = pl.read_parquet(dataset.path / info.path)["value"].to_list()
        parts = model.embeddings.rows(name, 0, info.rows)
        rows: Rows = {}
        for place in range(info.rows):
            key = values[place] if place >= info.tail_buckets else ("tail", place)
            rows[key] = tuple(part[place].numpy().copy() for kind, part in parts.items() if kind != "clock")
        results[name] = rows
    return results


# Reading does not depend on what is read into, so each memory section occurs once on either side.
@pytest.mark.parametrize(
    ("before", "now"), [("memory", "memory"), ("memory", "log"), ("log", "int8"), ("int8", "memory")]
)
def test_every_value_keeps_its_row(home: Path, tmp_path: Path, before: str, now: str) -> None:
    earlier = home / before / "run"
    with open_run(earlier) as trained:
        old, network = rows_by_value(trained.model, trained.dataset), trained.model.network.state_dict()
        recipe = Recipe.from_dict(
            content(home, 1, tmp_path / "new", now, seed=4, embedding=OPTIMIZERS[before])
        )
        dataset, plan = Dataset.open(recipe.data.path), make_plan(recipe)
        model = new_model(recipe, dataset, plan, "beginning")
        assert any(not tables.resident for tables in model.embeddings.engine.tables) == (now != "memory")
        untrained = rows_by_value(model, dataset)
        optimizer = build_optimizer(recipe.train.dense, model.network)
        with open_warm_start(
            earlier, tmp_path / "new", identity(recipe, dataset), dataset, Mesh.alone()
        ) as first:
            first.load_into(model, optimizer)
        new_rows = rows_by_value(model, dataset)
        assert all(torch.equal(value, network[key]) for key, value in model.network.state_dict().items())
        model.embeddings.close()
    kept = read_tensors(last(earlier) / "optimizer.safetensors")
    assert all(
        torch.equal(value, kept[key])
        for key, value in checkpoint.optimizer_tensors(optimizer).items()
        if key != "random"
    )
    new = {value for value in new_rows["item"] if value not in old["item"]}
    assert 10 < len(new) < len(new_rows["item"]) - 20
    for name, rows in new_rows.items():
        exact = plan is None or plan[name].codec.kind == "fp32"
        for value, parts in rows.items():
            expected = old[name].get(value, untrained[name][value])
            for part, expected_part in zip(parts, expected, strict=True):
                # The tolerance is one step of int8. Other rows are not rounded to it.
                step = 0.0 if exact or value in new else 1.01 * float(np.ptp(expected_part)) / 255
                np.testing.assert_allclose(
                    part, expected_part, rtol=0, atol=step + 1e-7 * (not exact), err_msg=f"{name} {value}"
                )


def test_a_run_starts_from_another_resumes_and_does_not_change_it(home: Path, tmp_path: Path) -> None:
    """Run the command line.

    A run of the third day starts from a run of the second day, and another from one of the first.
    """
    options: dict[str, Any] = {
        "embedding": {"kind": "rowwise_adam"}, "checkpoint": {"every_steps": 3, "keep": 9}, "max_steps": 6,
    }  # fmt: skip
    runs = [tmp_path / f"run-{day}" for day in range(3)]
    for day, run in enumerate(runs):
        recipe = content(home, day, run, **options)
        (tmp_path / f"{day}.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "-q", str(tmp_path / "0.yaml")]) == 0
    before = {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()}
    assert main(["train", "-q", str(tmp_path / "1.yaml"), "--from", str(runs[0])]) == 0
    assert {path: path.read_bytes() for path in runs[0].rglob("*") if path.is_file()} == before
    steps = [checkpoint.read_state(path) for path in checkpoint.list_checkpoints(runs[1] / "checkpoints")]
    assert [state["step"] for state in steps] == [0, 3, 6]
    assert {state["tables"]["earlier"] for state in steps} == {6}
    assert main(["train", "-q", str(tmp_path / "2.yaml"), "--from", str(runs[1])]) == 0
    assert checkpoint.read_state(last(runs[2]))["tables"]["earlier"] == 12
    assert main(["export", "-q", str(runs[2]), "-o", str(tmp_path / "export")]) == 0
    assert Scorer.open(tmp_path / "export").manifest.vocabularies["item"].inherited > 0
    # The second run stopped at its first checkpoint and resumes without the run that it started
    # from.
    shutil.copytree(runs[1], tmp_path / "whole")
    shutil.move(runs[0], tmp_path / "elsewhere")
    for path in checkpoint.list_checkpoints(runs[1] / "checkpoints")[1:]:
        shutil.rmtree(path)
    (runs[1] / "result.json").unlink()
    assert main(["train", "-q", str(tmp_path / "1.yaml"), "--resume", "--from", str(runs[0])]) == 0
    assert_same_model(last(runs[1]), last(tmp_path / "whole"))
    recipe = Recipe.from_dict(content(home, 2, tmp_path / "later", **options))
    Trainer(recipe, Dataset.open(recipe.data.path)).train(earlier=tmp_path / "elsewhere")
    assert checkpoint.read_state(last(tmp_path / "later"))["tables"]["earlier"] == 6


def train_refused(home: Path, run: Path, earlier: Path, day: int = 1, **changes: Mapping[str, Any]) -> str:
    config = content(home, day, run)
    for section, change in changes.items():
        config[section] |= change
    recipe = Recipe.from_dict(config)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Trainer(recipe, Dataset.open(recipe.data.path)).train(earlier=earlier)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_incompatible_runs_are_refused_and_nothing_is_written(home: Path, tmp_path: Path) -> None:
    earlier = home / "memory" / "run"
    width = train_refused(home, tmp_path / "new", earlier, model={"embedding_dim": 4})
    assert not missing("model.embedding_dim 8 4", width)
    kind = train_refused(home, tmp_path / "new", earlier, train={"embedding": {"kind": "sgd"}})
    assert not missing("train.embedding.kind rowwise_adagrad sgd", kind)
    assert "is not a run" in train_refused(home, tmp_path / "new", home / "day-0")
    assert "which is the run to train" in train_refused(home, tmp_path / "new", tmp_path / "new")
    write_log(tmp_path, 0, rows=900)
    other = content(tmp_path, 0, tmp_path / "new")
    prepare(Recipe.from_dict(other).data)
    assert "does not extend the data set of" in (
        error := train_refused(tmp_path, tmp_path / "new", earlier, day=0)
    )
    assert not missing("dense[0].mean", error)
    assert not (tmp_path / "new").exists()


def test_a_data_set_with_other_values_is_refused_and_an_earlier_run_stays(
    home: Path, tmp_path: Path
) -> None:
    """The data set is of a day before the run's. It has some of the run's values, but not the first
    ones.
    """
    recipe = Recipe.from_dict(content(home, 1, tmp_path / "second"))
    Trainer(recipe, Dataset.open(recipe.data.path)).train()
    recipe = Recipe.from_dict(content(home, 0, tmp_path / "first"))
    Trainer(recipe, Dataset.open(recipe.data.path)).train()
    before = last(tmp_path / "first")
    with refuses(CheckpointError, "item"):
        Trainer(recipe, Dataset.open(recipe.data.path)).train(overwrite=True, earlier=tmp_path / "second")
    assert before.is_dir()
