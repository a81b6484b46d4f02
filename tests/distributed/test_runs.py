"""Test runs on several ranks: the model equals that of one process for any number of ranks,
sharding and tiers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from distributed.ranks import Ranks

from recipes import last, prepared, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding.config import CodecConfig
from stratarec.models.metrics import figures
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.build import new_model, new_plan
from stratarec.training.evaluate import evaluate_split
from stratarec.training.predict import predict
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set."""
    root = tmp_path_factory.mktemp("shared")
    prepared(Recipe.from_dict(make_config(root)).data)
    return root


def make_config(root: Path, **train: Any) -> dict[str, Any]:
    config = tiny(
        root, **{"batch_size": 120, "max_steps": 30, "epochs": 3, "eval_every": 12, "portions": 3, **train}
    )
    config["data"]["source"]["samples"] = 4500
    config["data"]["source"]["scale"] = 0.05
    config["data"]["vocabulary"] = {"min_count": 1, "tail_buckets": 4}
    config["model"]["embedding_dim"] = 8
    return config


def make_recipe(
    home: Path, run: Path, memory: dict[str, Any] | None = None, sharding: str = "auto", **train: Any
) -> Recipe:
    config = make_config(home, run=str(run), **train)
    return Recipe.from_dict({**config, "memory": memory or {}, "distributed": {"sharding": sharding}})


def train(mesh: Mesh, recipe: Recipe, resume: bool = False, earlier: Path | None = None) -> dict[str, Any]:
    dataset = Dataset.open(recipe.data.path)
    plan = new_plan(recipe, dataset, mesh.ranks)
    if plan is not None and recipe.memory.block is not None:
        # The planner would not store so few rows in an SSD store, nor store them in full precision.
        moved = (
            t if t.tier == "level0" else replace(t, tier="log", codec=CodecConfig()) for t in plan.tables
        )
        plan = replace(plan, tables=tuple(moved))
    trainer = Trainer(recipe, dataset, plan=plan, mesh=mesh)
    result = trainer.train(resume=resume, earlier=earlier)
    return {
        "losses": trainer.state.losses,
        "evaluations": [rounded(point) for point in trainer.state.evaluations],
        "test": rounded(result["test"]),
        # A refit has released the parts of the first phase.
        "cached": 0 if recipe.train.refit else len(trainer.parts.model.embeddings.engine.tiers.tables),
    }


def rounded(metrics: Any) -> Any:
    """Round metrics to 12 digits, because the last bits of sums depend on how batches are split
    among ranks.
    """
    if isinstance(metrics, dict):
        return {name: rounded(value) for name, value in metrics.items()}
    if isinstance(metrics, list):
        return [rounded(value) for value in metrics]
    return float(f"{metrics:.12g}") if isinstance(metrics, float) else metrics


def model(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return every row with its state, and the network's weights, as one process reads them."""
    with open_run(run) as trained_run:
        embeddings = trained_run.model.embeddings
        rows = {
            f"{table.name}.{part}": values.numpy().copy()
            for table in embeddings.tables
            for part, values in embeddings.rows(table.name, 0, table.num_embeddings).items()
        }
        return {
            **rows,
            **{
                name: value.numpy().copy() for name, value in trained_run.model.network.state_dict().items()
            },
        }


def assert_near(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        if tolerance:
            np.testing.assert_allclose(actual[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(actual[name], values, err_msg=name)


TIERED: dict[str, Any] = {"precision": "int8", "lookahead": 2, "cache": {"fraction": 0.3, "ways": 8}}


@pytest.mark.parametrize(("count", "sharding", "log"), [(2, "row", True), (3, "table", False)])
def test_ranks_train_the_model_of_one_process(
    ranks: Ranks, home: Path, count: int, sharding: str, log: bool, tmp_path: Path
) -> None:
    """The data is deduplicated. The rows of two ranks are stored in logs, and three ranks refit the
    tested model.
    """
    assert Dataset.open(make_config(home)["data"]["path"]).deduplicated
    memory = {"block": {"path": str(tmp_path / "rows"), "budget": "64MiB"}, **TIERED} if log else {}
    expected = train(Mesh.alone(), make_recipe(home, tmp_path / "one", refit=not log))
    results = ranks.run(
        count, train, make_recipe(home, tmp_path / "many", memory, sharding=sharding, refit=not log)
    )
    assert (results[0]["cached"] > 0) == log
    for rank in results:
        assert rank == results[0]
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=1e-4)
        for mine, whole in zip(rank["evaluations"], expected["evaluations"], strict=True):
            assert mine["auc"] == pytest.approx(whole["auc"], abs=1e-4)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)


def test_a_resumed_run_matches_an_uninterrupted_run_bit_for_bit(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    """Rows are int8 under caches, and tables are sharded by row."""
    uninterrupted, cut = (make_recipe(home, tmp_path / name, TIERED, "row") for name in ("whole", "cut"))
    expected = ranks.run(2, train, uninterrupted)[0]
    ranks.run(2, train, make_recipe(home, tmp_path / "cut", TIERED, "row", max_steps=17))
    resumed = ranks.run(2, train, cut, True)[0]
    assert [tuple(point) for point in resumed["losses"]] == expected["losses"]
    assert resumed["cached"] > 0
    assert_near(model(tmp_path / "cut"), model(tmp_path / "whole"), 0)


def with_network(recipe: Recipe, **model: Any) -> Recipe:
    return Recipe.from_dict(recipe.to_dict() | {"model": recipe.to_dict()["model"] | model})


def network_of(mesh: Mesh, recipe: Recipe, resume: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Return the network of each rank after training."""
    trainer = Trainer(recipe, Dataset.open(recipe.data.path), mesh=mesh)
    trainer.train(resume=resume)
    return {name: value.numpy().copy() for name, value in trainer.parts.model.network.state_dict().items()}


@pytest.mark.slow
def test_ranks_have_different_dropout_masks_and_the_same_statistics(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    """The last batch of an epoch leaves one rank without samples. A resumed run has the same
    bits.
    """
    options = {"dropout": 0.2, "batch_norm": True}
    train = {"eval_every": 0, "average": {"decay": 0.9}}
    uninterrupted, cut = (
        with_network(make_recipe(home, tmp_path / name, **train), **options) for name in ("whole", "cut")
    )
    networks = ranks.run(3, network_of, uninterrupted)
    for other in networks[1:]:
        assert_near(other, networks[0], 0)
    assert (networks[0]["score.top.1.running_var"] != 1).all()
    ranks.run(
        3, network_of, with_network(make_recipe(home, tmp_path / "cut", max_steps=16, **train), **options)
    )
    assert_near(ranks.run(3, network_of, cut, True)[2], networks[0], 0)


def load_rows(mesh: Mesh, recipe: Recipe, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return every row of a checkpoint as this rank loads it."""
    dataset = Dataset.open(recipe.data.path)
    loaded = new_model(recipe, dataset, new_plan(recipe, dataset, mesh.ranks), "held", mesh)
    checkpoint.load(path).load_into(loaded)
    rows = {
        f"{table.name}.{part}": values.numpy().copy()
        for table in loaded.embeddings.tables
        for part, values in loaded.embeddings.rows(table.name, 0, table.num_embeddings).items()
    }
    loaded.embeddings.close()
    return rows


@pytest.mark.slow
def test_every_row_loads_under_other_ranks_and_shardings(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks.run(4, train, make_recipe(home, run, sharding="table", max_steps=10))
    expected = model(run)
    for count, sharding in ((2, "table"), (2, "row"), (4, "row")):
        rows_by_rank = ranks.run(count, load_rows, make_recipe(home, run, sharding=sharding), last(run))
        for rank in rows_by_rank:
            assert_near(rank, {name: expected[name] for name in rank}, 0)
        # all tables; the expected model also has the network
        assert rows_by_rank[0].keys() < expected.keys()


@pytest.mark.slow
def test_a_run_resumes_with_fewer_ranks(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    train(Mesh.alone(), make_recipe(home, tmp_path / "one"))
    ranks.run(3, train, make_recipe(home, tmp_path / "many", max_steps=10))
    ranks.run(2, train, make_recipe(home, tmp_path / "many", max_steps=20), True)
    train(Mesh.alone(), make_recipe(home, tmp_path / "many"), True)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)


def train_other_recipe(mesh: Mesh, recipe: Recipe, other: Recipe) -> None:
    train(mesh, other if mesh.rank == 1 else recipe)


@pytest.mark.slow
def test_ranks_with_different_recipes_are_refused(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    recipe = make_recipe(home, tmp_path / "run")
    (message,) = ranks.refused(2, train_other_recipe, recipe, make_recipe(home, tmp_path / "run", seed=5))
    assert message.startswith("rank 1 was started with recipe.train.seed 5, rank 0 with 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_missing_part_of_a_checkpoint_is_an_error_on_all_ranks(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(home, tmp_path / "run", sharding="row", max_steps=10)
    ranks.run(2, train, recipe)
    lost = next((last(tmp_path / "run") / "tables" / "group-1000").rglob("*.safetensors"))
    lost.unlink()
    (message,) = ranks.refused(
        2, train, make_recipe(home, tmp_path / "run", sharding="row", max_steps=20), True
    )
    assert message.startswith("rank 1: ")
    assert str(lost) in message


def score(mesh: Mesh, run: Path, output: Path) -> dict[str, Any]:
    with open_run(run, mesh=mesh) as trained_run:
        metrics, _ = evaluate_split(
            trained_run.model,
            trained_run.dataset,
            "test",
            precision="float32",
            progress=SilentProgress(),
            mesh=mesh,
        )
        metric_values = figures(metrics)
        bins = [value for each in metric_values.pop("reliability") for value in each.values()]
        return {
            "metrics": metric_values,
            "bins": bins,
            "rows": predict(trained_run, "valid", output, SilentProgress()),
        }


def test_ranks_evaluate_and_predict_like_one_process(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """One, two and three processes read the run of two ranks."""
    run = tmp_path / "run"
    # The homes are fp32, because other codecs round rows when another layout loads them. All ranks
    # fit the calibration.
    recipe = make_recipe(home, run, {**TIERED, "precision": "fp32"}, calibration="platt")
    result = ranks.run(2, train, recipe)[0]
    expected = score(Mesh.alone(), run, tmp_path / "one.parquet")
    for name in ("auc", "log_loss"):
        assert result["test"][name] == pytest.approx(expected["metrics"][name], abs=1e-6)
    for count in (2, 3):
        for scores in ranks.run(count, score, run, tmp_path / f"{count}.parquet"):
            assert scores["rows"] == expected["rows"]
            assert scores["bins"] == pytest.approx(expected["bins"], abs=1e-6)
            for name, value in expected["metrics"].items():
                assert scores["metrics"][name] == pytest.approx(value, abs=1e-6), name
        mine, theirs = (pq.read_table(tmp_path / f"{name}.parquet") for name in (count, "one"))
        assert mine.drop_columns("score").equals(theirs.drop_columns("score"))
        np.testing.assert_allclose(mine["score"].to_numpy(), theirs["score"].to_numpy(), rtol=1e-5)


@pytest.mark.slow
def test_ranks_start_from_the_rows_of_another_run(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """The other run has other tiers and another sharding. After two steps the model equals that of
    one process.
    """
    first = make_recipe(home, tmp_path / "first", TIERED, max_steps=10)
    train(Mesh.alone(), first)
    one, many = (
        make_recipe(home, tmp_path / name, sharding="row", max_steps=2) for name in ("one", "many")
    )
    train(Mesh.alone(), one, earlier=tmp_path / "first")
    results = ranks.run(2, train, many, False, tmp_path / "first")
    assert results[0] == results[1]
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-5)
    begun = [checkpoint.read_state(last(tmp_path / name))["tables"]["earlier"] for name in ("one", "many")]
    assert begun == [10, 10]


def test_ranks_train_the_loss_of_one_process(home: Path, tmp_path: Path, ranks: Ranks) -> None:
    loss = {"kind": "focal", "gamma": 1.5}
    alone = train(Mesh.alone(), make_recipe(home, tmp_path / "one", loss=loss))
    (shared, _) = ranks.run(2, train, make_recipe(home, tmp_path / "two", loss=loss))
    losses = [[value for _, value in each["losses"]] for each in (alone, shared)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert shared["test"]["log_loss"] == pytest.approx(alone["test"]["log_loss"], rel=1e-4)
