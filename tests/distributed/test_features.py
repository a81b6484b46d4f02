"""Test labels, weights, sequences and widths on several ranks: model, metrics and scores equal
those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from distributed.ranks import Ranks
from distributed.test_runs import assert_near, model, score, train

from recipes import tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.distributed.mesh import Mesh
from stratarec.recipe import Recipe

ROWS = 1600


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set."""
    root = tmp_path_factory.mktemp("features")
    draws = np.random.default_rng(7)
    last = [draws.integers(0, 40, draws.integers(0, 6)).tolist() for _ in range(ROWS // 4)]
    pl.DataFrame(
        {
            "click": draws.integers(0, 2, ROWS),
            "like": pl.Series(
                np.where(draws.random(ROWS) < 0.5, np.nan, draws.integers(0, 2, ROWS))
            ).fill_nan(None),
            "who": np.arange(ROWS) // 4,
            "weight": draws.choice([0.0, 0.5, 2.0], ROWS),
            "item": draws.integers(0, 40, ROWS),
            "kind": draws.integers(0, 7, ROWS),
            "last": [last[row // 4] for row in range(ROWS)],
            "last_kind": [[item % 7 for item in last[row // 4]] for row in range(ROWS)],
        },
        schema_overrides={"last": pl.List(pl.Int64), "last_kind": pl.List(pl.Int64)},
    ).write_parquet(root / "log.parquet")
    prepare(make_recipe(root, root / "unused").data)
    return root


def make_recipe(home: Path, run: Path, **train: Any) -> Recipe:
    options = {
        "batch_size": 90,
        "max_steps": 12,
        "eval_every": 6,
        "portions": 2,
        "loss_weights": {"like": 0.3},
    }
    options["class_weight"] = "balanced"
    config = tiny(home, **options | train, run=str(run))
    schema = {
        "labels": ["click", "like"],
        "user": "who",
        "weight": "weight",
        "sparse": [
            {"name": "item"},
            {"name": "kind"},
            {"name": "last", "kind": "sequence", "of": "item"},
            {"name": "last_kind", "kind": "sequence", "of": "kind", "beside": "last"},
        ],
    }
    config["data"]["source"] = {"kind": "parquet", "paths": [str(home / "log.parquet")], "schema": schema}
    config["model"] |= {
        "history": {"pooling": "target_attention"},
        "heads": {"kind": "mmoe"},
        "embedding_dims": {"kind": 2},
    }
    return Recipe.from_dict({**config, "distributed": {"sharding": "row"}})


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Drop the calibration by bins, because the last bit of a logit can move a sample to another
    bin.
    """
    return {name: value for name, value in metrics.items() if name != "reliability"}


@pytest.mark.slow
def test_ranks_train_and_score_like_one_process(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    data = Dataset.open(home / "data")
    assert any({"last", "last_kind"} <= set(names) for names in data.groups.values())
    expected = train(Mesh.alone(), make_recipe(home, tmp_path / "one"))
    results = ranks.run(2, train, make_recipe(home, tmp_path / "two"))
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0]["losses"], expected["losses"], rtol=1e-4)
    for label, figures in expected["test"]["labels"].items():
        assert numbers(results[0]["test"]["labels"][label]) == pytest.approx(numbers(figures), abs=1e-3)
    assert_near(model(tmp_path / "two"), model(tmp_path / "one"), 1e-4)
    alone = score(Mesh.alone(), tmp_path / "two", tmp_path / "one.parquet")
    for rank in ranks.run(2, score, tmp_path / "two", tmp_path / "two.parquet"):
        assert numbers(rank["metrics"]["labels"]["like"]) == pytest.approx(
            numbers(alone["metrics"]["labels"]["like"]), abs=1e-6
        )
    one, two = (pl.read_parquet(tmp_path / f"{name}.parquet").drop("file") for name in ("one", "two"))
    np.testing.assert_allclose(one.to_numpy(), two.to_numpy(), rtol=1e-5)


@pytest.mark.slow
def test_ranks_without_samples_share_every_label(ranks: Ranks, home: Path, tmp_path: Path) -> None:
    few = {"batch_size": 1, "portions": 1, "max_steps": 6, "eval_every": 0}
    train(Mesh.alone(), make_recipe(home, tmp_path / "one", **few))
    ranks.run(2, train, make_recipe(home, tmp_path / "two", **few))
    assert_near(model(tmp_path / "two"), model(tmp_path / "one"), 1e-5)
