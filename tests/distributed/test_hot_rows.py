"""Hot rows that every rank has train as rows that one process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.jobs import HOT, TABLES, Setup, ahead, batch, loss, places, row_optimizer, sharded, single, together
from distributed.ranks import Ranks
from distributed.test_exchange import compare
from distributed.test_runs import TIERED, assert_near, content, model, recipe, train

from recipes import prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection, SharedEngine
from stratarec.distributed.sharding import Sharding
from stratarec.embedding import RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer


@pytest.mark.parametrize(
    ("count", "local", "layout", "home", "optimizer", "tolerance"),
    [
        (2, 1, "rows", "", "adagrad", 1e-6),
        (4, 2, "split", "log", "rowwise_adagrad", 1e-6),
        (2, 2, "split", "dram", "adam", 1e-4),
    ],
)
def test_copies_train_as_the_rows_of_one_process(
    ranks: Ranks, count: int, local: int, layout: str, home: str, optimizer: str, tolerance: float, tmp_path: Path
) -> None:
    """Weights, state and outputs, in batches of all rows and of hot rows alone."""
    setup = Setup(layout, home=home, optimizer=optimizer, steps=40, hot=True)
    compare(together(ranks.run(count, sharded, setup, tmp_path, local=local)), single(setup, tmp_path), tolerance)


def collection_of(mesh: Mesh, layout: str, hot: dict[str, int], optimizer: str = "rowwise_adagrad") -> Any:
    sharding = Sharding(TABLES, places(layout, mesh.ranks), mesh.ranks)
    made = row_optimizer(Setup(layout, optimizer=optimizer))
    return ShardedCollection(sharding, mesh, optimizer=made, seed=7, hot=hot)


def copies(mesh: Mesh, path: Path) -> dict[str, Any]:
    """Ten steps, a checkpoint, ten steps; then the ten from the checkpoint again. All copies, and bytes a step."""

    def steps(collection: Any, first: int) -> list[int]:
        sent = []
        for step in range(first, first + 10):
            before = mesh.rows.sent_bytes
            features = batch(step, True, hot=True).take(torch.arange(mesh.rank, 24, mesh.ranks))
            loss(collection(features), features).backward()
            sent.append(mesh.rows.sent_bytes - before)
        return sent

    first, second = (collection_of(mesh, "split", HOT, "adam") for _ in range(2))
    steps(first, 0)
    if mesh.is_first:
        path.mkdir()
    mesh.files.agree(None)
    manifest = first.save(path)
    sent = steps(first, 10)
    second.load(path, manifest)
    steps(second, 10)
    found = []
    for collection in (first, second):
        assert isinstance(collection.engine, SharedEngine)
        replicas = collection.engine.replicas
        assert replicas is not None
        found.append({
            f"{part}.{state}": value.clone() for part in replicas.parts for state, value in replicas.part(*part).items()
        })  # fmt: skip
        collection.close()
    return {"copies": found, "sent": sent, "manifest": manifest}


@pytest.mark.slow
def test_copies_are_the_same_on_all_ranks_and_resume_from_a_checkpoint_that_one_process_reads(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(2, copies, tmp_path / "saved")
    want = found[0]["copies"][0]
    assert len(want) == 3 * len(HOT)  # weights and two of state, of all tables
    for rank in found:
        for run in rank["copies"]:
            assert all(torch.equal(value, want[name]) for name, value in run.items())
    one = TieredEmbeddingBagCollection(TABLES, optimizer=RowOptimizerConfig(kind="adam"), seed=7)
    one.load(tmp_path / "saved", found[0]["manifest"])
    assert one.step == 10
    rest = single(Setup("split", optimizer="adam", singles=True, steps=10, hot=True), tmp_path)["tables"]
    for table in TABLES:
        torch.testing.assert_close(one.table(table.name)["weight"], rest[table.name]["weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_batches_ahead_leave_the_bits(ranks: Ranks, wire: Any, tmp_path: Path) -> None:
    """Two runs, one of them prepared ahead, and batches that some ranks have nothing of."""
    setup = Setup("split", home="dram", codec="int8", hot=True, uneven=True, steps=24,
                  exchange=DistributedConfig(wire=wire, gradient_wire=wire))  # fmt: skip
    first, second = (together(ranks.run(2, ahead, setup, tmp_path / str(depth), depth)) for depth in (0, 2))
    compare(first, second, 0)


def other(mesh: Mesh) -> None:
    collection_of(mesh, "split", {**HOT, "page": 5 + mesh.rank})


@pytest.mark.slow
def test_ranks_with_other_hot_rows_are_refused_on_all_of_them(ranks: Ranks) -> None:
    (message,) = ranks.refused(2, other)
    assert message.startswith("rank 1 was started with hot rows.page 6, rank 0 with 5")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared data set."""
    root = tmp_path_factory.mktemp("copies")
    prepared(Recipe.from_dict(content(root)).data)
    return root


def copying(home: Path, run: Path, memory: dict[str, Any] | None = None, **train: Any) -> Recipe:
    """A run with copies of hot rows."""
    made = recipe(home, run, memory, "row", **train).to_dict()
    return Recipe.from_dict({**made, "hot": {"copies": "24KiB"}})


def copying_run(mesh: Mesh, made: Recipe, resume: bool = False) -> tuple[dict[str, Any], dict[str, int]]:
    """What a run found, and the rows that each rank has copies of."""
    trainer = Trainer(made, Dataset.open(made.data.path), mesh=mesh)
    engine = trainer.model.embeddings.engine
    assert isinstance(engine, SharedEngine)
    copied = {} if engine.replicas is None else {name: last - first for name, first, last in engine.replicas.parts}
    result = trainer.train(resume=resume)
    return {"losses": trainer.state.losses, "test": result["test"]}, copied


@pytest.mark.slow
def test_runs_with_copies_train_the_model_of_one_process_and_resume_to_the_bit(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    """On two hosts of two ranks, on deduplicated data, rows of int8 under caches."""
    short = {"max_steps": 40, "eval_every": 0}
    train(Mesh.alone(), recipe(home, tmp_path / "one", **short))
    whole = ranks.run(4, copying_run, copying(home, tmp_path / "whole", **short), local=2)
    assert all(rank == whole[0] for rank in whole)
    assert sum(whole[0][1].values()) > 100
    assert_near(model(tmp_path / "whole"), model(tmp_path / "one"), 1e-4)
    for name, steps in (("int8", 40), ("cut", 23)):
        ranks.run(4, copying_run, copying(home, tmp_path / name, TIERED, **{**short, "max_steps": steps}), local=2)
    _, copied = ranks.run(4, copying_run, copying(home, tmp_path / "cut", TIERED, **short), True, local=2)[0]
    assert copied
    assert_near(model(tmp_path / "cut"), model(tmp_path / "int8"), 0)


@pytest.mark.slow
def test_a_budget_beyond_the_memory_of_a_rank_is_one_error_on_all(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    made = copying(home, tmp_path / "run", {"dram": "20KiB", "precision": "int8"})
    messages = ranks.refused(2, copying_run, made)
    (message,) = messages
    assert message.startswith("rank 0: hot.copies is 24,576 bytes")
