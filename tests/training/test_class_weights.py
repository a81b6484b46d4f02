"""Test class weights: both classes count the same in the loss, and scores still have the true click
rate.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from training.test_losses import batch_of

from recipes import assert_same_model, interrupt, last, tiny, train
from stratarec import Scorer
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import Interrupted
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.export.export import export
from stratarec.training.predict import predict
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.loss import Objective
from stratarec.training.trainer import Trainer

ROWS = 30_000


def log(root: Path, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """Return a log of rare clicks and rarer likes, and the click probability of each row."""
    draws = np.random.default_rng(5)
    item = draws.integers(0, 20, ROWS)
    chance = scale * (0.02 + 0.12 * (item % 4 == 0))
    columns = {"click": draws.random(ROWS) < chance, "like": draws.random(ROWS) < 0.03, "item": item}
    frame = pl.DataFrame({**columns, "shop": draws.integers(0, 9, ROWS)})
    frame.with_columns(pl.col("click", "like").cast(pl.Int64)).write_parquet(root / "log.parquet")
    return chance


def make_recipe(root: Path, labels: list[str] | None = None, data: str = "data", **settings: Any) -> Recipe:
    named = {"labels": labels} if labels else {"label": "click"}
    negatives = settings.pop("negatives", 1.0)
    config = tiny(
        root,
        epochs=2,
        batch_size=128,
        eval_every=0,
        embedding={"kind": "rowwise_adagrad", "learning_rate": 0.1},
        **settings,
    )
    config["data"] |= {
        "path": str(root / data),
        "source": {
            "kind": "parquet",
            "paths": [str(root / "log.parquet")],
            "schema": {**named, "sparse": [{"name": "item"}, {"name": "shop"}]},
        },
        "split": {"valid": 0.2, "test": 0.3, "negatives": negatives},
    }
    return Recipe.from_dict(config)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("labels", [1, 2])
def test_the_loss_applies_the_class_weight(labels: int, weighted: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(40, labels, generator=draws, requires_grad=True)
    label = torch.randint(0, 2, (40, labels), generator=draws).float()
    weight = torch.rand(40, generator=draws) if weighted else None
    ratios, scale = (9.0, 0.5)[:labels], torch.ones(40) if weight is None else weight
    expected = torch.zeros(())
    for place, ratio in enumerate(ratios):
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits[:, place], label[:, place], reduction="none"
        )
        each = torch.where(label[:, place] == 1, (1 + ratio) / 2, (1 + 1 / ratio) / 2)
        expected = expected + (each * scale * loss).sum() / scale.sum()
    objective = Objective((1.0,) * labels, class_weights=ratios)
    shaped = (logits, label) if labels > 1 else (logits.squeeze(1), label.squeeze(1))
    torch.testing.assert_close(objective.mean(shaped[0], batch_of(shaped[1], weight)), expected)
    # Two processes with a part of the batch each.
    rows = (slice(0, 7), slice(7, 40))
    parts = [batch_of(shaped[1][part], None if weight is None else weight[part]) for part in rows]
    weights = [sum(each) for each in zip(*(objective.weights(part) for part in parts), strict=True)]
    sums = [objective.sums(shaped[0][part], each) for part, each in zip(rows, parts, strict=True)]
    torch.testing.assert_close(sum(objective.joined(each, weights) for each in sums), expected)


def test_balanced_weights_have_mean_one_and_equal_classes_change_no_bit() -> None:
    label = torch.cat([torch.ones(30), torch.zeros(970)])
    zeros = torch.zeros(1000)
    assert Objective(class_weights=(970 / 30,)).mean(zeros, batch_of(label, None)).item() == pytest.approx(
        math.log(2)
    )
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        Objective(class_weights=(1.0,)).mean(logits, batch_of(label, None)),
        Objective().mean(logits, batch_of(label, None)),
    )


def test_every_label_has_its_own_weight_and_exports_contain_it(tmp_path: Path) -> None:
    log(tmp_path)
    recipe = make_recipe(tmp_path, ["click", "like"], max_steps=20, class_weight={"like": 30.0})
    prepare(recipe.data)
    Trainer(recipe, Dataset.open(recipe.data.path)).train()
    with open_run(recipe.run) as trained:
        assert trained.model.network.correction == (0.0, -math.log(30.0))
        export(trained, tmp_path / "export")
        predict(trained, "test", tmp_path / "scores.parquet", SilentProgress())
    known = pl.read_parquet(tmp_path / "scores.parquet")
    scores = Scorer.open(tmp_path / "export").score(pl.read_parquet(tmp_path / "log.parquet"))
    for place, label in enumerate(("click", "like")):
        np.testing.assert_allclose(
            known[f"score_{label}"], scores[known["row"].to_numpy() - 1, place], rtol=1e-5
        )


def test_a_resumed_run_keeps_its_weights_and_other_data_does_not(tmp_path: Path) -> None:
    log(tmp_path)
    options = {"class_weight": "balanced", "max_steps": 20, "checkpoint": {"every_steps": 5}}
    uninterrupted = make_recipe(tmp_path, run=str(tmp_path / "whole"), **options)
    dataset = prepare(uninterrupted.data)
    train(uninterrupted)
    parts = make_recipe(tmp_path, run=str(tmp_path / "parts"), **options)
    first = Trainer(parts, dataset)
    interrupt(first, 8)
    with pytest.raises(Interrupted):
        first.train()
    train(parts, resume=True)
    assert_same_model(last(uninterrupted.run), last(parts.run))
    log(tmp_path, scale=3.0)
    other = prepare(make_recipe(tmp_path, data="other").data)
    assert other.positives["train"] > 2 * dataset.positives["train"]
    with open_run(uninterrupted.run) as mine, open_run(uninterrupted.run, other.path) as theirs:
        assert mine.model.network.correction == theirs.model.network.correction != (0.0,)
