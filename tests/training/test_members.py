"""Test members of an ensemble: each stops at its own best step and has a weight by validation, in
every file and score of a run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from training.test_no_signal import assert_chance

from recipes import agreeing_scores, assert_same_model, last, prepared, tiny, train
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.estimator.click_model import ClickModel
from stratarec.io.tensors import read_tensors
from stratarec.models.zoo.ensemble import EnsembleScore
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import EarlyStoppingConfig
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.checkpoint import MEMBERS
from stratarec.training.run import periods
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.members import BestMembers, select_weights
from stratarec.training.steps.state import best, patience_exhausted
from stratarec.training.trainer import Trainer

MODEL = {"kind": "ensemble", "members": 4, "embedding_dim": 3, "member_mlp": [8, 4], "bins": 4}
ROWS = {"kind": "adam", "rows": "all", "learning_rate": 0.05, "weight_decay": 0.1, "decay": "decoupled"}
WEIGHTS = "score.out.weights"


def make_recipe(root: Path, **options: Any) -> Recipe:
    """Return a recipe with rates at which members overfit within a few evaluations."""
    usual = {"dense": {"learning_rate": 0.05}, "embedding": ROWS, "eval_every": 9, "epochs": 2}
    return Recipe.from_dict({**tiny(root, **(usual | options)), "model": MODEL})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("members")
    prepared(make_recipe(root).data)
    return root


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Trainer:
    """Train a run without interruption."""
    return train(make_recipe(home, run=str(home / "whole")))


# Selection of weights


Array = np.ndarray[Any, Any]


def value(weights: Array, logits: Array, label: Array, scale: Array) -> float:
    mean = logits @ weights
    losses = np.log1p(np.exp(-np.abs(mean))) + np.maximum(mean, 0) - label * mean
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = np.where(weights > 0, weights * np.log(len(weights) * weights), 0)
    return float((scale * losses).sum() / scale.mean() + 3 * entropy.sum())


def draw_logits(samples: int, members: int, seed: int = 0) -> tuple[Array, Array]:
    draws = np.random.default_rng(seed)
    truth = draws.normal(size=samples)
    label = (draws.random(samples) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    label[:2] = 0, 1
    noise = draws.normal(size=(samples, members)) * np.linspace(0.3, 2, members)
    return (truth[:, None] + noise).astype(np.float32), label


@pytest.mark.parametrize("samples", [5, 60, 2000])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_other_weights_on_a_grid_are_better(samples: int, weighted: bool) -> None:
    logits, label = draw_logits(samples, 3)
    scale = np.random.default_rng(1).gamma(1.0, size=samples) if weighted else np.ones(samples)
    chosen = select_weights(logits, label, scale)
    assert chosen.min() >= 0
    assert chosen.sum() == pytest.approx(1, abs=1e-6)
    grid = np.linspace(0, 1, 101)
    least = min(
        value(np.array([a, b, 1 - a - b]), logits, label, scale)
        for a, b in product(grid, grid)
        if a + b <= 1 + 1e-9
    )
    assert value(chosen.astype(np.float64), logits, label, scale) <= least + 1e-4


def test_useless_members_lose_their_weight_and_equal_members_share_it() -> None:
    logits, label = draw_logits(20_000, 6)
    chosen = select_weights(np.concatenate([logits, logits[:, :1]], axis=1), label, np.ones(len(label)))
    assert chosen[0] == pytest.approx(chosen[6], abs=1e-6)
    assert chosen[0] > 0.3
    assert chosen[5] < 0.04
    noise = 5 * np.random.default_rng(1).normal(size=len(label)).astype(np.float32)
    assert select_weights(np.stack([logits[:, 0], noise], axis=1), label, np.ones(len(label)))[1] < 0.01


def test_copies_of_samples_by_their_users_change_no_weight() -> None:
    logits, label = draw_logits(50, 4)
    once = select_weights(logits, label, np.ones(50))
    many = select_weights(np.repeat(logits, 30, axis=0), np.repeat(label, 30), np.ones(1500), per_user=30.0)
    np.testing.assert_allclose(many, once, atol=2e-3)
    assert (
        np.abs(
            select_weights(np.repeat(logits, 30, axis=0), np.repeat(label, 30), np.ones(1500)) - once
        ).max()
        > 0.1
    )


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_keeps_weights_equal(label: float, members: int) -> None:
    logits, _ = draw_logits(50, members)
    np.testing.assert_array_equal(
        select_weights(logits, np.full(50, label), np.ones(50)), np.float32(1 / members)
    )
    np.testing.assert_array_equal(
        select_weights(logits, np.full(50, label), np.zeros(50)), np.float32(1 / members)
    )


def test_validation_without_weights_gives_members_of_the_last_step_and_finite_figures(
    tmp_path: Path,
) -> None:
    log(tmp_path / "log.parquet").with_columns(
        weight=pl.lit(0.0), time=pl.int_range(pl.len())
    ).with_columns(weight=pl.when(pl.col("time") < 500).then(1.0).otherwise(0.0)).write_parquet(
        tmp_path / "log.parquet"
    )
    content = of_log(tmp_path)
    content["data"]["source"]["schema"] |= {"weight": "weight", "time": "time"}
    content["data"]["split"] = {"by": "time", "valid": "300s", "test": "300s"}
    recipe = Recipe.from_dict(content)
    prepare(recipe.data)
    members = train(recipe).state.evaluations[-1]["members"]
    assert all(np.isfinite(row["log_loss"]) and row["weight"] > 0 for row in members)


def test_few_samples_hardly_move_weights() -> None:
    logits, label = draw_logits(8, 5, seed=3)
    assert np.abs(select_weights(logits, label, np.ones(8)) - 0.2).max() < 0.15


def test_samples_without_weight_do_not_count() -> None:
    logits, label = draw_logits(300, 4)
    scale = (np.arange(300) < 200).astype(np.float64)
    np.testing.assert_array_equal(
        select_weights(logits, label, scale), select_weights(logits[:200], label[:200], np.ones(200))
    )


def test_large_logits_and_useless_members_give_finite_weights() -> None:
    logits, label = draw_logits(500, 4)
    chosen = select_weights(logits * 1e4, label, np.ones(500))
    assert np.isfinite(chosen).all()
    assert chosen.sum() == pytest.approx(1, abs=1e-5)


# Runs


def record_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[int, dict[str, torch.Tensor], list[dict[str, float]]]]:
    """Record the weights of the model at each evaluation, and the table of its members."""
    seen: list[tuple[int, dict[str, torch.Tensor], list[dict[str, float]]]] = []
    real = BestMembers.combine

    def combine(self: BestMembers, samples: Any, step: int, **options: Any) -> Any:
        now = {name: tensor.clone() for name, tensor in self.current.items()}
        result = real(self, samples, step, **options)
        seen.append((step, now, result[1]))
        return result

    monkeypatch.setattr(BestMembers, "combine", combine)
    return seen


def test_every_member_has_the_weights_of_its_best_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_weights(monkeypatch)
    trainer = train(make_recipe(home, run=str(tmp_path / "run")))
    by_step = {step: weights for step, weights, _ in seen}
    chosen = best(trainer.state.evaluations, trainer.parts.config.early_stopping)
    assert chosen is not None
    table = chosen["members"]
    assert len({row["step"] for row in table}) > 1
    assert sum(row["weight"] for row in table) == pytest.approx(1, abs=1e-6)
    stored = checkpoint.load(checkpoint.step_path(tmp_path / "run" / "checkpoints", chosen["step"]))
    score = trainer.parts.model.network.score
    assert isinstance(score, EnsembleScore)
    for name, tensor in stored.network.items():
        view = score.by_member(name.removeprefix("score."), tensor)
        for k, row in enumerate(table if view is not None else ()):
            expected = score.by_member(name.removeprefix("score."), by_step[row["step"]][f"network/{name}"])
            assert view is not None
            assert expected is not None
            assert torch.equal(view[k], expected[k])
    np.testing.assert_allclose(stored.network[WEIGHTS].numpy(), [row["weight"] for row in table], rtol=1e-6)
    with open_run(tmp_path / "run") as opened:
        for config in opened.model.embeddings.tables:
            rows = opened.model.embeddings.table(config.name)["weight"].unflatten(1, (4, 4))
            for k, row in enumerate(table):
                assert torch.equal(
                    rows[:, k], by_step[row["step"]][f"table/{config.name}"].unflatten(1, (4, 4))[:, k]
                )


def test_the_mean_is_better_than_its_members_which_only_some_evaluations_list(
    uninterrupted: Trainer,
) -> None:
    evaluations = uninterrupted.state.evaluations
    entry = best(evaluations, uninterrupted.parts.config.early_stopping)
    assert entry is not None
    # The log loss is convex in the logit.
    assert entry["log_loss"] < sum(row["weight"] * row["log_loss"] for row in entry["members"])
    assert len(evaluations) > 2
    assert all(each is entry or each is evaluations[-1] for each in evaluations if "members" in each)


@pytest.mark.parametrize("stop", [5, 13, 40])
def test_a_stopped_run_matches_an_uninterrupted_run_bit_for_bit(
    home: Path, uninterrupted: Trainer, tmp_path: Path, stop: int
) -> None:
    """The run stops before the first evaluation, after it, and later. The first part ends with an
    evaluation.
    """
    train(make_recipe(home, run=str(tmp_path / "parts"), max_steps=stop))
    torch.rand(100)
    train(make_recipe(home, run=str(tmp_path / "parts")), resume=True)
    points = [last(uninterrupted.run), last(tmp_path / "parts")]
    assert_same_model(*points)
    one, other = (checkpoint.read_state(point)["training"]["evaluations"] for point in points)
    assert one == other


def test_an_average_of_weights_and_best_members_are_restored_together(home: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"average": {"decay": 0.9}}
    train(make_recipe(home, run=str(tmp_path / "whole"), **options))
    train(make_recipe(home, run=str(tmp_path / "parts"), max_steps=23, **options))
    train(make_recipe(home, run=str(tmp_path / "parts"), **options), resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))


def with_shared_layers(home: Path, run: Path, **options: Any) -> Recipe:
    recipe = make_recipe(home, run=str(run), **options)
    name = next(iter(Dataset.open(recipe.data.path).vocabularies))
    return replace(recipe, model=replace(recipe.model, embedding_dims={name: 4}))


def test_members_that_share_layers_are_used_at_one_step_with_weights(home: Path, tmp_path: Path) -> None:
    trainer = train(with_shared_layers(home, tmp_path / "whole"))
    entry = best(trainer.state.evaluations, trainer.parts.config.early_stopping)
    assert entry is not None
    assert {row["step"] for row in entry["members"]} == {entry["step"]}
    assert len({row["weight"] for row in entry["members"]}) > 1
    lowest = min(trainer.state.evaluations, key=lambda each: each["networks_log_loss"])
    assert trainer.state.evaluations[-1]["networks_improved"] == lowest["step"]
    stored = checkpoint.step_path(trainer.run / "checkpoints", entry["step"])
    weights = read_tensors(stored / "network.safetensors")[WEIGHTS]
    np.testing.assert_allclose(weights, [row["weight"] for row in entry["members"]], rtol=1e-6)
    for stop in (5, 13, 40):
        train(with_shared_layers(home, tmp_path / f"{stop}", max_steps=stop))
        train(with_shared_layers(home, tmp_path / f"{stop}"), resume=True)
        assert_same_model(last(trainer.run), last(tmp_path / f"{stop}"))


def test_trees_have_weight_next_to_cached_rows(home: Path, tmp_path: Path, said: list[str]) -> None:
    """Cached rows cannot be copied for each member, but trees are members as always."""

    def cached(run: str, steps: int) -> Recipe:
        content = make_recipe(home, run=str(tmp_path / run), batch_size=8, max_steps=steps).to_dict()
        return Recipe.from_dict(
            {**content, "model": {**MODEL, "trees": 50}, "memory": {"precision": "int8"}}
        )

    trainer = train(cached("whole", 60))
    assert any("used at the same step" in line and "DRAM" in line for line in said)
    members = trainer.state.evaluations[-1]["members"]
    assert len({row["step"] for row in members[:4]}) == 1
    assert sum(row["weight"] for row in members[4:]) > 0.2
    train(cached("parts", 13))
    train(cached("parts", 60), resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))


# Small logs


def log(path: Path, rows: int = 1500, *, random: bool = False, seed: int = 5) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    item, age = draws.integers(0, 40, rows), draws.gamma(2.0, 10.0, rows)
    rate = 1 / (1 + np.exp(-np.sin(item) - (age - 20) / 20))
    clicked = draws.integers(0, 2, rows) if random else (draws.random(rows) < rate).astype(np.int64)
    frame = pl.DataFrame({"label": clicked, "item": [f"i{each}" for each in item], "age": age})
    frame.write_parquet(path)
    return frame


def of_log(root: Path, **options: Any) -> dict[str, Any]:
    source = {
        "kind": "parquet", "paths": [str(root / "log.parquet")],
        "schema": {"sparse": [{"name": "item"}], "dense": [{"name": "age"}]},
    }  # fmt: skip
    config = make_recipe(root, batch_size=64, **options).to_dict()
    config["data"] = {"path": str(root / "data"), "source": source, "split": {"valid": 0.2, "test": 0.2}}
    return config


def test_a_run_an_export_and_an_estimator_have_the_same_scores(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet")
    recipe = Recipe.from_dict(of_log(tmp_path, report=True))
    prepare(recipe.data)
    trainer = train(recipe)
    assert "Members of the ensemble" in (trainer.run / "report.html").read_text()
    entry = best(trainer.state.evaluations, trainer.parts.config.early_stopping)
    assert entry is not None
    assert len({row["weight"] for row in entry["members"]}) > 1
    agreeing_scores(trainer.run, tmp_path / "log.parquet", tmp_path, rtol=1e-6)
    model = ClickModel(recipe).fit(frame, label="label")
    saved = model.save(tmp_path / "model")
    assert len(set(read_tensors(saved / "export" / "network.safetensors")[WEIGHTS].tolist())) > 1
    scores = Scorer.open(saved / "export").score(frame)
    np.testing.assert_allclose(ClickModel.load(saved).predict_proba(frame)[:, 1], scores, rtol=1e-6)


def test_a_combined_model_continues_with_its_weights(tmp_path: Path) -> None:
    log(tmp_path / "log.parquet")
    log(tmp_path / "later.parquet", seed=6)
    recipe = Recipe.from_dict(of_log(tmp_path))
    prepare(recipe.data)
    trainer = train(recipe)
    with open_run(trainer.run) as trained:
        before = trained.model.network.state_dict()[WEIGHTS].clone()
    assert main(["continue", "-q", str(trainer.run), str(tmp_path / "later.parquet")]) == 0
    with open_run(trainer.run) as trained:
        assert torch.equal(trained.model.network.state_dict()[WEIGHTS], before)
    (tmp_path / "forget.csv").write_text("item\ni3\n")
    assert main(["forget", "-q", str(trainer.run), str(tmp_path / "forget.csv")]) == 0
    folder = periods.only_checkpoint(periods.paths(trainer.run)[-1])
    assert not any(name.startswith(MEMBERS) for name in read_tensors(folder / "optimizer.safetensors"))


def test_random_labels_stay_random(tmp_path: Path) -> None:
    log(tmp_path / "log.parquet", rows=30_000, random=True)
    recipe = Recipe.from_dict(
        of_log(tmp_path) | {"data": of_log(tmp_path)["data"] | {"split": {"valid": 0.1, "test": 0.5}}}
    )
    prepare(recipe.data)
    test = Trainer(recipe, prepare(recipe.data)).train()["test"]
    assert_chance(test["auc"], test["positives"], test["samples"], 0.005)


def test_an_ensemble_continues_while_half_of_its_networks_improve() -> None:
    """Trees have most of the weight, so the ensemble is best at step 1, but its networks are
    not.
    """
    config = EarlyStoppingConfig(metric="log_loss", patience=2)
    entries = [
        {"step": step, "log_loss": 0.5 + step / 100, "networks_improved": min(step, 3)}
        for step in range(1, 6)
    ]
    assert [patience_exhausted(entries[:count], config) for count in range(1, 6)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    plain = [{key: entry[key] for key in ("step", "log_loss")} for entry in entries]
    assert [patience_exhausted(plain[:count], config) for count in range(1, 6)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_an_ensemble_ends_when_its_networks_have_no_weight() -> None:
    config = EarlyStoppingConfig(metric="log_loss", patience=2)
    weights = [0.3, 0.01, 0.05, 0.01, 0.01]
    entries = [
        {"step": step, "log_loss": 0.5 - step / 100, "networks_improved": step, "networks_weight": weight}
        for step, weight in enumerate(weights, 1)
    ]
    assert [patience_exhausted(entries[:count], config) for count in range(1, 6)] == [False] * 4 + [True]
    assert not patience_exhausted(entries, EarlyStoppingConfig(metric="log_loss", patience=0))
