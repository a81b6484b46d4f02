"""Whole runs by several ranks: the model of one process, whatever the ranks, the sharding and the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.ranks import Ranks

from recipes import tiny
from stratarec.data.dataset import Dataset
from stratarec.data.prepare import prepare
from stratarec.distributed.mesh import Mesh
from stratarec.recipe import Recipe
from stratarec.training.run import open_run
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared data set."""
    root = tmp_path_factory.mktemp("shared")
    prepare(Recipe.from_dict(content(root)).data)
    return root


def content(root: Path, **train: Any) -> dict[str, Any]:
    found = tiny(root, **{"batch_size": 120, "max_steps": 60, "epochs": 3, "eval_every": 25, **train})
    found["data"]["source"]["scale"] = 0.05
    found["data"]["vocabulary"] = {"min_count": 1, "tail_buckets": 4}
    found["model"]["embedding_dim"] = 8
    return found


def recipe(home: Path, run: Path, memory: dict[str, Any] | None = None, sharding: str = "auto", **train: Any) -> Recipe:
    made = content(home, run=str(run), **train)
    return Recipe.from_dict({**made, "memory": memory or {}, "distributed": {"sharding": sharding}})


def train(mesh: Mesh, made: Recipe, resume: bool = False) -> dict[str, Any]:
    trainer = Trainer(made, Dataset.open(made.data.path), mesh=mesh)
    result = trainer.train(resume=resume)
    return {"losses": trainer.position.losses, "evaluations": trainer.position.evaluations, "test": result["test"]}


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


INT8: dict[str, Any] = {"precision": "fp32", "lookahead": 2, "cache": {"fraction": 0.1, "ways": 8}}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("sharding", ["table", "row"])
def test_ranks_train_the_model_of_one_process(
    ranks: Ranks, home: Path, count: int, sharding: str, tmp_path: Path
) -> None:
    want = train(Mesh.alone(), recipe(home, tmp_path / "one"))
    found = ranks.run(count, train, recipe(home, tmp_path / "many", sharding=sharding))
    for rank in found:
        assert rank == found[0]
        np.testing.assert_allclose(rank["losses"], want["losses"], rtol=1e-4)
        for mine, whole in zip(rank["evaluations"], want["evaluations"], strict=True):
            assert mine["auc"] == pytest.approx(whole["auc"], abs=1e-4)
    assert_near(model(tmp_path / "many"), model(tmp_path / "one"), 1e-4)
