"""Test that no model scores above 0.5 on a log of random clicks.

Users, sessions, items and contexts are independent of each other and of time. A model that beats
chance on the test split learns the label from how samples are built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.data.prepare.prepare import prepare
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

CLICKS, FEW = 56_000, 3_000
SPLITS: dict[str, dict[str, Any]] = {
    "time": {"by": "time", "valid": "1d", "test": "7d"},
    "fraction": {"by": "fraction", "valid": 0.05, "test": 0.35},
}


def random_log(path: Path, law: str, clicks: int) -> None:
    draws = np.random.default_rng(11)
    popularity = np.ones(500) if law == "uniform" else 1 / np.arange(1, 501)
    times = draws.integers(1_600_000_000_000, 1_600_000_000_000 + 19 * 86_400_000, clicks)
    pl.DataFrame(
        {
            "user_id": draws.integers(0, clicks // 28, clicks),
            "session_id": draws.integers(0, clicks * 20 // 56, clicks),
            "item_id": draws.choice(500, clicks, p=popularity / popularity.sum()),
            "timestamp": times,
            "device": draws.integers(0, 3, clicks),
        }
    ).write_parquet(path)


def random_recipe(
    root: Path, law: str, split: str, negatives: int, clicks: int = CLICKS, **model: Any
) -> Recipe:
    """Prepare each data set once for all models."""
    log = root / f"{law}-{clicks}.parquet"
    if not log.exists():
        random_log(log, law, clicks)
    source = {
        "kind": "clicks",
        "paths": [str(log)],
        "time_unit": "ms",
        "contexts": ["device"],
        "negatives": negatives,
    }
    data = {
        "path": str(root / f"{law}-{clicks}-{split}-{negatives}"),
        "source": {**source, "history_length": 5},
        "split": SPLITS[split],
    }
    network = model or {"kind": "dlrm", "bottom_mlp": [16], "top_mlp": [16]}
    train = {"run": str(root / "run"), "batch_size": 512, "epochs": 2, "report": False}
    return Recipe.from_dict(
        {"name": "random", "data": data, "model": {**network, "embedding_dim": 4}, "train": train}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


def assert_chance(auc: float, positives: int, samples: int, most: float = 0.003) -> None:
    negatives = samples - positives
    error = np.sqrt((samples + 1) / (12.0 * positives * negatives))
    assert error <= most
    assert abs(auc - 0.5) <= 4 * error


DLRM = {"kind": "dlrm", "bottom_mlp": [16], "top_mlp": [16]}


@pytest.mark.parametrize(
    ("model", "law"),
    [
        pytest.param({**DLRM, "history": {"pooling": "mean"}}, "zipf", marks=pytest.mark.slow),
        pytest.param({**DLRM, "history": {"pooling": "target_attention"}}, "zipf", marks=pytest.mark.slow),
        pytest.param({**DLRM, "history": {"pooling": "transformer"}}, "uniform", marks=pytest.mark.slow),
        pytest.param({"kind": "dcnv2"}, "zipf", marks=pytest.mark.slow),
    ],
    ids=["mean-zipf", "attention-zipf", "transformer-uniform", "dcn-zipf"],
)
def test_every_model_is_at_chance(root: Path, model: dict[str, Any], law: str) -> None:
    recipe = random_recipe(root, law, "time", 1, **model)
    dataset = prepare(recipe.data)
    metrics = Trainer(recipe, dataset).train(overwrite=True)["test"]
    assert_chance(metrics["auc"], dataset.positives["test"], dataset.samples("test"))
