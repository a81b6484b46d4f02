"""Whole runs by several ranks: the model of one process, whatever the ranks, the sharding and the tiers."""

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
    """A folder with a prepared data set."""
    root = tmp_path_factory.mktemp("shared")
    prepared(Recipe.from_dict(content(root)).data)
    return root


def content(root: Path, **train: Any) -> dict[str, Any]:
    found = tiny(root, **{"batch_size": 120, "max_steps": 30, "epochs": 3, "eval_every": 12, "portions": 3, **train})
    found["data"]["source"]["samples"] = 4500
    found["data"]["source"]["scale"] = 0.05
    found["data"]["vocabulary"] = {"min_count": 1, "tail_buckets": 4}
    found["model"]["embedding_dim"] = 8
    return found


def recipe(
    home: Path, run: Path, memory: dict[str, Any] | None = None, sharding: str = "auto", **train: Any
) -> Recipe:  # fmt: skip
    made = content(home, run=str(run), **train)
    return Recipe.from_dict({**made, "memory": memory or {}, "distributed": {"sharding": sharding}})


def train(mesh: Mesh, made: Recipe, resume: bool = False, earlier: Path | None = None) -> dict[str, Any]:
    dataset = Dataset.open(made.data.path)
    plan = new_plan(made, dataset, mesh.ranks)
    if plan is not None and made.memory.block is not None:
        # A planner would not send so few rows to a device, nor keep them exactly.
        moved = (t if t.tier == "level0" else replace(t, tier="log", codec=CodecConfig()) for t in plan.tables)
        plan = replace(plan, tables=tuple(moved))
    trainer = Trainer(made, dataset, plan=plan, mesh=mesh)
    result = trainer.train(resume=resume, earlier=earlier)
    return {
        "losses": trainer.state.losses,
        "evaluations": [settled(point) for point in trainer.state.evaluations],
        "test": settled(result["test"]),
        "cached": len(trainer.model.embeddings.engine.tiers.tables),
    }


def settled(found: Any) -> Any:
    """Metrics with 12 digits: sums over batches have other last bits where batches are dealt to other ranks."""
    if isinstance(found, dict):
        return {name: settled(value) for name, value in found.items()}
    if isinstance(found, list):
        return [settled(value) for value in found]
    return float(f"{found:.12g}") if isinstance(found, float) else found


def model(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every row of every table with its state, and the network, as one process reads them."""
    with open_run(run) as found:
        embeddings = found.model.embeddings
        rows = {
            f"{table.name}.{part}": values.numpy().copy()
            for table in embeddings.tables
            for part, values in embeddings.rows(table.name, 0, table.num_embeddings).items()
        }
        return {**rows, **{name: value.numpy().copy() for name, value in found.model.network.state_dict().items()}}


def assert_near(found: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == want.keys()
    for name, values in want.items():
        if tolerance:
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name)


TIERED: dict[str, Any] = {"precision": "int8", "lookahead": 2, "cache": {"fraction": 0.3, "ways": 8}}


@pytest.mark.parametrize(("count", "sharding", "log"), [(2, "row", True), (3, "table", False)])
def test_ranks_train_the_model_of_one_process(
    ranks: Ranks, home: Path, count: int, sharding: str, log: bool, tmp_path: Path
) -> None:
    """On deduplicated data; rows of two ranks are at home in logs."""
    assert Dataset.open(content(home)["data"]["path"]).deduplicated
    memory = {"block": {"path": str(tmp_path / "rows"), "budget": "64MiB"}, **TIERED} if log else {}
    want = train(Mesh.alone(), recipe(home, tmp_path / "one"))
    found = ranks.run(count, train, recipe(home, tmp_path / "many", memory, sharding=sharding))
    assert (found[0]["cached"] > 0) == log
    for rank in found:
        assert rank == found[0]
        np.testing.assert_allclose(rank["losses"], want["losses"], rtol=1e-4)
        for mine, whole in zip(rank["evaluations"], want["evaluations"], strict=True):
            assert mine["auc"] == pytest.approx(whole["auc"], abs=1e-4)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """int8 rows under caches, tables shared row by row."""
    whole, cut = (recipe(home, tmp_path / name, TIERED, "row") for name in ("whole", "cut"))
    expected = ranks.run(2, train, whole)[0]
    ranks.run(2, train, recipe(home, tmp_path / "cut", TIERED, "row", max_steps=17))
    resumed = ranks.run(2, train, cut, True)[0]
    assert [tuple(point) for point in resumed["losses"]] == expected["losses"]
    assert resumed["cached"] > 0
    assert_near(model(tmp_path / "cut"), model(tmp_path / "whole"), 0)


def with_network(made: Recipe, **model: Any) -> Recipe:
    return Recipe.from_dict(made.to_dict() | {"model": made.to_dict()["model"] | model})


def network_of(mesh: Mesh, made: Recipe, resume: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Return the network of each rank after training."""
    trainer = Trainer(made, Dataset.open(made.data.path), mesh=mesh)
    trainer.train(resume=resume)
    return {name: value.numpy().copy() for name, value in trainer.model.network.state_dict().items()}


@pytest.mark.slow
def test_ranks_have_masks_of_their_own_and_the_same_statistics(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """The last batch of an epoch leaves a rank without samples; a resumed run has the same bits."""
    options = {"dropout": 0.2, "batch_norm": True}
    train = {"eval_every": 0, "average": {"decay": 0.9}}
    whole, cut = (with_network(recipe(home, tmp_path / name, **train), **options) for name in ("whole", "cut"))
    found = ranks.run(3, network_of, whole)
    for other in found[1:]:
        assert_near(other, found[0], 0)
    assert (found[0]["score.top.1.running_var"] != 1).all()
    ranks.run(3, network_of, with_network(recipe(home, tmp_path / "cut", max_steps=16, **train), **options))
    assert_near(ranks.run(3, network_of, cut, True)[2], found[0], 0)


def held(mesh: Mesh, made: Recipe, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every row of a checkpoint as these ranks load it."""
    dataset = Dataset.open(made.data.path)
    built = new_model(made, dataset, new_plan(made, dataset, mesh.ranks), "held", mesh)
    checkpoint.load(path).load_into(built)
    rows = {
        f"{table.name}.{part}": values.numpy().copy()
        for table in built.embeddings.tables
        for part, values in built.embeddings.rows(table.name, 0, table.num_embeddings).items()
    }
    built.embeddings.close()
    return rows


@pytest.mark.slow
def test_other_numbers_of_ranks_and_other_shardings_take_over_every_row(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks.run(4, train, recipe(home, run, sharding="table", max_steps=10))
    want = model(run)
    for count, sharding in ((2, "table"), (2, "row"), (4, "row")):
        found = ranks.run(count, held, recipe(home, run, sharding=sharding), last(run))
        for rank in found:
            assert_near(rank, {name: want[name] for name in rank}, 0)
        assert found[0].keys() < want.keys()  # all tables; the rest is the network


@pytest.mark.slow
def test_a_run_resumes_with_fewer_ranks(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    train(Mesh.alone(), recipe(home, tmp_path / "one"))
    ranks.run(3, train, recipe(home, tmp_path / "many", max_steps=10))
    ranks.run(2, train, recipe(home, tmp_path / "many", max_steps=20), True)
    train(Mesh.alone(), recipe(home, tmp_path / "many"), True)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)


def otherwise(mesh: Mesh, made: Recipe, other: Recipe) -> None:
    train(mesh, other if mesh.rank == 1 else made)


@pytest.mark.slow
def test_ranks_of_other_recipes_are_refused(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    made = recipe(home, tmp_path / "run")
    (message,) = ranks.refused(2, otherwise, made, recipe(home, tmp_path / "run", seed=5))
    assert message.startswith("rank 1 was started with recipe.train.seed 5, rank 0 with 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_missing_part_of_a_checkpoint_is_an_error_on_all_ranks(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    made = recipe(home, tmp_path / "run", sharding="row", max_steps=10)
    ranks.run(2, train, made)
    lost = next((last(tmp_path / "run") / "tables" / "group-1000").rglob("*.safetensors"))
    lost.unlink()
    (message,) = ranks.refused(2, train, recipe(home, tmp_path / "run", sharding="row", max_steps=20), True)
    assert message.startswith("rank 1: ")
    assert str(lost) in message


def scored(mesh: Mesh, run: Path, output: Path) -> dict[str, Any]:
    with open_run(run, mesh=mesh) as found:
        metrics, _ = evaluate_split(
            found.model, found.dataset, "test", precision="float32", progress=SilentProgress(), mesh=mesh
        )
        told = figures(metrics)
        bins = [value for each in told.pop("reliability") for value in each.values()]
        return {"metrics": told, "bins": bins, "rows": predict(found, "valid", output, SilentProgress())}


def test_ranks_evaluate_and_predict_what_one_process_does(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """The run of two ranks, read by one process, by two, and by three."""
    run = tmp_path / "run"
    # Exact homes: rows of any other are rounded when another layout takes them over.
    # Their probabilities are corrected, as all of them fit it.
    made = recipe(home, run, {**TIERED, "precision": "fp32"}, calibration="platt")
    result = ranks.run(2, train, made)[0]
    want = scored(Mesh.alone(), run, tmp_path / "one.parquet")
    for name in ("auc", "log_loss"):
        assert result["test"][name] == pytest.approx(want["metrics"][name], abs=1e-6)
    for count in (2, 3):
        for found in ranks.run(count, scored, run, tmp_path / f"{count}.parquet"):
            assert found["rows"] == want["rows"]
            assert found["bins"] == pytest.approx(want["bins"], abs=1e-6)
            for name, value in want["metrics"].items():
                assert found["metrics"][name] == pytest.approx(value, abs=1e-6), name
        mine, whole = (pq.read_table(tmp_path / f"{name}.parquet") for name in (count, "one"))
        assert mine.drop_columns("score").equals(whole.drop_columns("score"))
        np.testing.assert_allclose(mine["score"].to_numpy(), whole["score"].to_numpy(), rtol=1e-5)


@pytest.mark.slow
def test_ranks_begin_with_the_rows_of_another_run(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    """The other run has other tiers and another sharding. After two steps, the model is that of one process."""
    first = recipe(home, tmp_path / "first", TIERED, max_steps=10)
    train(Mesh.alone(), first)
    one, many = (recipe(home, tmp_path / name, sharding="row", max_steps=2) for name in ("one", "many"))
    train(Mesh.alone(), one, earlier=tmp_path / "first")
    found = ranks.run(2, train, many, False, tmp_path / "first")
    assert found[0] == found[1]
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-5)
    begun = [checkpoint.read_state(last(tmp_path / name))["tables"]["earlier"] for name in ("one", "many")]
    assert begun == [10, 10]
