"""Test downsampling of negatives: training uses fewer samples, and predictions have the click rate
of the full log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recipes import agreeing_scores
from stratarec.data.prepare.prepare import prepare
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.evaluate import evaluate_split
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

ROWS = 12_000


def make_recipe(root: Path, negatives: float) -> Recipe:
    draws = np.random.default_rng(0)
    item = draws.integers(0, 20, ROWS)
    click = (draws.random(ROWS) < 0.02 + 0.2 * (item % 4 == 0)).astype(int)
    log = pl.DataFrame({"click": click, "item": item, "shop": draws.integers(0, 9, ROWS)})
    log.write_parquet(root / "log.parquet")
    schema = {"label": "click", "sparse": [{"name": "item"}, {"name": "shop"}]}
    content: dict[str, Any] = {
        "name": "thin",
        "data": {
            "path": str(root / "data"),
            "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema},
            "split": {"valid": 0.1, "test": 0.3, "negatives": negatives},
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [8]},
        "train": {
            "run": str(root / "run"),
            "batch_size": 64,
            "epochs": 3,
            "report": False,
            "embedding": {"kind": "rowwise_adagrad", "learning_rate": 0.1},
        },
    }
    return Recipe.from_dict(content)


def test_a_quarter_of_the_negatives_gives_the_probabilities_of_all(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, 0.25)
    dataset = prepare(recipe.data)
    label = pl.read_parquet(tmp_path / "log.parquet")["click"]
    left = ROWS - sum(dataset.samples(split) for split in dataset.splits)
    negatives = dataset.samples("train") - dataset.positives["train"]
    assert 2.7 < left / negatives < 3.3
    assert sum(dataset.positives.values()) == label.sum()
    for split in ("valid", "test"):
        assert dataset.positives[split] / dataset.samples(split) == pytest.approx(label.mean(), rel=0.25)
    Trainer(recipe, dataset).train()
    with open_run(recipe.run) as trained:
        metrics, _ = evaluate_split(
            trained.model, dataset, "test", precision="float32", progress=SilentProgress()
        )
        result = metrics["click"]
        # Without the correction predictions would be more than twice the click rate.
        assert result["calibration"] == pytest.approx(1, abs=0.15)
        assert result["auc"] > 0.7
    agreeing_scores(recipe.run, tmp_path / "log.parquet", tmp_path, rtol=1e-5)
