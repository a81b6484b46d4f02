"""Test losses: their formulas, a loss of another package, and that scores of every loss are
probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from errors import refuses
from recipes import prepared, tiny
from stratarec import Scorer
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.errors import ConfigError
from stratarec.models.losses import LOSSES, Loss, LossConfig, by_sample
from stratarec.models.losses.focal import FocalConfig
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, _adapter, with_values
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.loss import Objective
from stratarec.training.trainer import Trainer

DRAWS = np.random.default_rng(3)
LOGITS = torch.from_numpy(DRAWS.normal(0, 3, (37, 2)).astype(np.float32))
LABEL = torch.from_numpy((DRAWS.random((37, 2)) < 0.3).astype(np.float32))
WEIGHT = torch.from_numpy(DRAWS.random((37, 2)).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class SquaredConfig(LossConfig):
    """Squared distance of the logit from a target, a loss of another package."""

    kind: Literal["squared"] = "squared"
    target: float = 1.0


@by_sample
def squared(config: SquaredConfig, logits: Tensor, label: Tensor) -> Tensor:
    return (logits - config.target * (2 * label - 1)).square()


@pytest.fixture
def registered() -> Iterator[None]:
    """Register a loss as a package does."""
    LOSSES.register("squared", Loss(config=SquaredConfig, function=squared))
    yield
    del LOSSES["squared"]


def batch_of(label: Tensor, weight: Tensor | None) -> Batch:
    sparse = KeyedJagged(
        keys=(), values=torch.zeros(0, dtype=torch.int32), offsets=None, batch_size=len(label)
    )
    return Batch(label=label, dense=torch.zeros(len(label), 0), sparse=sparse, weight=weight)


def expected(kind: str) -> np.ndarray:
    logits, label = LOGITS.double().numpy(), LABEL.double().numpy()
    probability = 1 / (1 + np.exp(-np.where(label > 0, logits, -logits)))
    return {
        "cross_entropy": -np.log(probability),
        "focal": -((1 - probability) ** 2) * np.log(probability),
        "hinge": np.maximum(1 - np.where(label > 0, logits, -logits), 0),
    }[kind]


@pytest.mark.parametrize("kind", [*LOSSES])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_and_its_reductions_follow_the_formula(kind: str, weighted: bool) -> None:
    loss, want = LOSSES[kind], torch.from_numpy(expected(kind))
    weight = WEIGHT if weighted else None
    want = want * WEIGHT.double() if weighted else want
    for reduction, result in {"none": want, "mean": want.mean(), "sum": want.sum()}.items():
        actual = loss.function(loss.config(), LOGITS, LABEL, weight, reduction)
        torch.testing.assert_close(actual.double(), result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [loss.config() for loss in LOSSES.values()], ids=[*LOSSES])
@pytest.mark.parametrize("labels", [1, 2])
def test_ranks_and_graphs_compute_the_loss_of_one_process(config: LossConfig, labels: int) -> None:
    logits, label = (part if labels > 1 else part[:, 0] for part in (LOGITS, LABEL))
    objective = Objective((1.0, 0.5)[:labels], (3.0, 1.0)[:labels], config)
    batch = batch_of(label, WEIGHT[:, 0])
    whole = objective.mean(logits, batch)
    torch.testing.assert_close(
        objective.of_targets(logits, objective.targets(batch)), whole, rtol=0, atol=0
    )
    parts = [
        (logits[rows], batch_of(label[rows], WEIGHT[rows, 0])) for rows in (slice(0, 20), slice(20, 37))
    ]
    sums = sum(objective.sums(*part) for part in parts)
    weights = [sum(each) for each in zip(*(objective.weights(part) for _, part in parts), strict=True)]
    torch.testing.assert_close(objective.joined(sums, weights), whole)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_has_finite_gradients_at_extreme_logits(gamma: float) -> None:
    logits = torch.tensor([-200.0, -1e-3, 0.0, 200.0], requires_grad=True)
    label = torch.tensor([0.0, 0.0, 1.0, 1.0])
    (slope,) = torch.autograd.grad(
        LOSSES["focal"].function(FocalConfig(gamma=gamma), logits, label, None, "sum"), logits
    )
    assert slope.isfinite().all()
    if not gamma:
        torch.testing.assert_close(slope, logits.sigmoid() - label)


def run(tmp_path: Path, loss: dict[str, Any], **changes: Any) -> tuple[Recipe, dict[str, Any]]:
    content = with_values(tiny(tmp_path, epochs=3, eval_every=0), {"train.loss": loss, **changes})
    recipe = Recipe.from_dict(content)
    return recipe, Trainer(recipe, prepared(recipe.data), SilentProgress()).train()


@pytest.mark.parametrize(
    "loss", [{"kind": "focal", "gamma": 3.0}, {"kind": "hinge"}, {"kind": "squared", "target": 2}]
)
@pytest.mark.usefixtures("registered")
def test_scores_of_a_loss_are_calibrated_in_evaluations_predictions_and_exports(
    tmp_path: Path, loss: dict[str, Any]
) -> None:
    changes = {"train.class_weight": "balanced", "train.early_stopping.patience": 5}
    recipe, result = run(tmp_path, loss, **changes)
    assert Recipe.from_dict(recipe.to_dict()).train.loss == recipe.train.loss
    assert result["test"]["auc"] > 0.6
    assert (
        abs(result["test"]["calibration"] - 1)
        < 0.2
        < abs(result["uncalibrated"]["test"]["calibration"] - 1)
    )
    with open_run(tmp_path / "run") as trained:
        assert trained.maps
        assert not any(trained.model.network.correction)
        export(trained, tmp_path / "export")
    scorer = Scorer.open(tmp_path / "export")
    columns = scorer.manifest.columns
    frame = {feature.name: [1, 2] for feature in (*columns.dense, *columns.sparse)}
    assert ((scores := scorer.score(frame)) > 0.05).all()
    assert (scores < 0.8).all()


@pytest.mark.usefixtures("registered")
def test_a_registered_loss_is_listed_wherever_losses_are() -> None:
    with refuses(ConfigError, "train.loss.kind cross_entropy focal hinge squared"):
        Recipe.from_dict(with_values(tiny(Path()), {"train.loss.kind": "mse"}))
    with refuses(ConfigError, "train.loss.goal"):
        Recipe.from_dict(with_values(tiny(Path()), {"train.loss": {"kind": "squared", "goal": 1}}))
    with refuses(ConfigError, "squared"):
        LOSSES.register("squared", LOSSES["focal"])
    assert "SquaredConfig" in _adapter().json_schema()["$defs"]


def test_a_loss_without_log_odds_is_refused_where_nothing_calibrates_it(tmp_path: Path) -> None:
    with refuses(ConfigError, "train.calibration none hinge"):
        run(tmp_path, {"kind": "hinge"}, **{"train.calibration": "none"})
    with refuses(ConfigError, "train.loss.kind focal ensemble"):
        run(tmp_path, {"kind": "focal"}, model={"kind": "ensemble", "embedding_dim": 4})
    with refuses(ConfigError, "train.loss.kind hinge 20 data.split.valid"):
        run(tmp_path, {"kind": "hinge"}, **{"data.split.valid": 0.0, "data.path": str(tmp_path / "other")})


def test_a_run_resumes_only_with_its_loss(tmp_path: Path) -> None:
    recipe, result = run(tmp_path, {"kind": "focal"}, **{"train.max_steps": 30})
    other = recipe.with_overrides(["train.loss.gamma=1", "train.max_steps=40"])
    with refuses(Exception, "train.loss.gamma"):
        Trainer(other, prepared(recipe.data), SilentProgress()).train(resume=True)
    same = recipe.with_overrides(["train.max_steps=40"])
    assert (
        Trainer(same, prepared(recipe.data), SilentProgress()).train(resume=True)["steps"]
        == 40
        > result["steps"]
    )
