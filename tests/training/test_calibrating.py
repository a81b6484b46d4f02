"""Test calibration maps: what they learn, that they are applied everywhere, and that they are
fitted on validation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from recipes import prepared, tiny
from stratarec import Scorer
from stratarec.data.dataset.dataset import Dataset
from stratarec.models.calibration import Calibration, LogitMap
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.evaluate import (
    IDENTITY,
    ScoredSamples,
    corrected_by,
    evaluate_split,
    fit,
    fit_again,
)
from stratarec.training.export.export import export
from stratarec.training.predict import predict
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

EMPTY = np.zeros(0, dtype=np.float32)
KINDS = ("platt", "isotonic")


def overconfident(samples: int, seed: int = 0) -> ScoredSamples:
    """Return samples whose correct logit is half of the given one, minus 0.3."""
    draws = np.random.default_rng(seed)
    logit = draws.normal(-1.0, 2.0, samples)
    right = logit / 2 - 0.3
    label = (draws.random(samples) < 1 / (1 + np.exp(-right))).astype(np.float32)
    return ScoredSamples(label, logit.astype(np.float32), np.zeros(0, np.int64), EMPTY)


@pytest.mark.parametrize("kinds", [("none", "platt", "isotonic"), ("platt",), ("isotonic",)])
def test_a_handful_of_samples_keeps_the_current_map(kinds: Any) -> None:
    """A map of 12 samples would be mostly chance, whether it is the best of some kinds or the
    chosen kind.
    """
    few = overconfident(12)
    curve = LogitMap(knots=(0.0,), values=(0.5,), slopes=(0.8, 0.8))
    assert 0 < few.label.sum() < 12
    assert fit(kinds, few) == ()
    assert fit(kinds, few, (curve,)) == (curve,)
    assert fit(kinds, overconfident(2000)) != ()


def test_platt_is_logistic_regression_on_the_logit() -> None:
    samples = overconfident(20_000)
    (mine,) = fit(("platt",), samples)
    peer = LogisticRegression(C=1e12, tol=1e-10).fit(samples.logit[:, None].astype(float), samples.label)
    assert mine.slopes == pytest.approx([peer.coef_[0, 0]] * 2, rel=2e-3)
    assert mine.values == pytest.approx([peer.intercept_[0]], rel=2e-3)
    assert mine.slopes[0] == pytest.approx(0.5, abs=0.03)


def test_isotonic_has_the_rates_of_isotonic_regression() -> None:
    samples = overconfident(20_000)
    (mine,) = fit(("isotonic",), samples)
    cells = np.floor(samples.logit.astype(float) * 256)
    peer = IsotonicRegression().fit_transform(cells, samples.label)
    rates = 1 / (1 + np.exp(-np.array(mine.values)))
    # Knots that are too close to each other are left out.
    assert np.isin(np.round(rates[1:-1], 6), np.round(np.unique(peer), 6)).all()
    assert len(rates) > 0.5 * len(np.unique(peer)) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_works_on_other_samples_and_keeps_their_order(kind: Any) -> None:
    maps = fit((kind,), overconfident(100_000))
    other = overconfident(50_000, seed=1)
    before, after = (evaluate_logits(each.label, each.logit) for each in (other, corrected_by(maps, other)))
    assert before["calibration_error"] > 8 * before["calibration_noise"]
    assert after["calibration_error"] < 1.6 * after["calibration_noise"]
    assert after["log_loss"] < before["log_loss"] - 0.03
    assert after["auc"] == pytest.approx(before["auc"], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_counts_as_that_many_samples_and_each_label_has_its_own_map(kind: Any) -> None:
    samples, other = overconfident(4_000), overconfident(4_000, seed=1)
    weight = np.random.default_rng(2).integers(0, 3, 4_000)
    both = samples._replace(
        label=np.stack([samples.label, np.where(weight > 1, np.nan, other.label)], 1),
        logit=np.stack([samples.logit, other.logit], 1),
        weight=weight.astype(np.float32),
    )
    maps = fit((kind,), both)
    chosen = weight == 1
    expected = (
        fit(
            (kind,),
            samples._replace(
                label=np.repeat(samples.label, weight), logit=np.repeat(samples.logit, weight)
            ),
        )[0],
        fit((kind,), other._replace(label=other.label[chosen], logit=other.logit[chosen]))[0],
    )
    for mine, whole in zip(maps, expected, strict=True):
        inside = torch.linspace(-4, 2, 50)
        np.testing.assert_allclose(
            Calibration([mine])(inside), Calibration([whole])(inside), rtol=0.02, atol=0.02
        )
    corrected = corrected_by(maps, both).logit
    np.testing.assert_array_equal(corrected[:, 1], Calibration(maps[1:])(torch.from_numpy(other.logit)))


@pytest.mark.parametrize("kind", KINDS)
def test_unusual_validation_splits_give_finite_increasing_maps(kind: Any) -> None:
    logit = np.linspace(-3, 3, 200).astype(np.float32)
    for label in (logit > 0, logit < 0, np.arange(200) % 2, np.arange(200) == 7):
        result = ScoredSamples(label.astype(np.float32), logit, np.zeros(0, np.int64), EMPTY)
        for scores in (logit, np.zeros_like(logit), logit * 1e4):
            (mine,) = fit((kind,), result._replace(logit=scores)) or (IDENTITY,)
            corrected = Calibration([mine])(torch.tensor([-1e30, -5, 0, 5, 1e30]))
            assert (corrected.diff() >= 0).all()
            assert corrected[1:4].isfinite().all()
    assert fit((kind,), result._replace(label=np.zeros(200, np.float32))) == ()


AUTO = TrainConfig(calibration="auto").fitted


def test_auto_uses_the_simplest_map_that_is_better_by_more_than_chance() -> None:
    (line,) = fit(AUTO, overconfident(20_000))
    assert line == fit(("platt",), overconfident(20_000))[0]
    assert fit(AUTO, overconfident(2000)) == fit(("platt",), overconfident(2000))
    # The scores are calibrated already, so a map can fit only chance.
    draws = (overconfident(2000, seed) for seed in range(20))
    right = [fit(AUTO, samples._replace(logit=samples.logit / 2 - np.float32(0.3))) for samples in draws]
    assert sum(not maps for maps in right) == 20
    # No line calibrates scores that saturate on both sides.
    samples = overconfident(40_000)
    bent = samples._replace(logit=(samples.logit / 2 - 0.3) ** 3)
    (curve,) = fit(AUTO, bent)
    assert len(curve.knots) > 10
    assert len(fit(AUTO, bent.of(np.arange(5_000)))[0].knots) == 1


def test_auto_is_not_deceived_by_users_whose_samples_are_alike() -> None:
    """The scores are calibrated, but each user has some 200 samples and clicks more or less than
    others.
    """
    found = {True: 0, False: 0}
    for seed in range(20):
        draws = np.random.default_rng(seed)
        logit, user = draws.normal(-1.0, 0.5, 4000), draws.integers(0, 20, 4000)
        own = logit + draws.normal(0, 1.5, 20)[user]
        label = (draws.random(4000) < 1 / (1 + np.exp(-own))).astype(np.float32)
        for named in found:
            users = user if named else np.zeros(0, np.int64)
            found[named] += bool(
                fit(AUTO[:2], ScoredSamples(label, logit.astype(np.float32), users, EMPTY))
            )
    assert found[True] <= 2
    assert found[False] >= 10


def test_auto_makes_scores_without_information_as_good_as_a_constant() -> None:
    samples, other = overconfident(1_000), overconfident(50_000, seed=1)
    noise = np.random.default_rng(2).normal(0, 2, 51_000).astype(np.float32)
    maps = fit(AUTO, samples._replace(logit=noise[:1_000]))
    after = corrected_by(maps, other._replace(logit=noise[1_000:]))
    assert evaluate_logits(other.label, noise[1_000:])["normalized_entropy"] > 1.3
    assert evaluate_logits(after.label, after.logit)["normalized_entropy"] < 1.01


def test_the_current_map_stays_unless_the_samples_contradict_it() -> None:
    samples = overconfident(5_000)
    current = (LogitMap(knots=(0.0,), values=(-0.3,), slopes=(0.5, 0.5)),)
    assert fit(AUTO, samples, current) == current
    assert fit(AUTO, samples._replace(label=np.zeros(5_000, np.float32)), current) == current
    wrong = (LogitMap(knots=(0.0,), values=(0.0,), slopes=(1.5, 1.5)),)
    assert fit(AUTO, samples, wrong) == fit(("platt",), samples)
    assert TrainConfig(calibration="auto", class_weight="balanced").fitted[0] == "shift"


def test_a_map_for_a_model_that_learns_the_rate_from_the_same_samples_keeps_the_mean() -> None:
    """Otherwise a log whose rate falls before it rises again would be corrected twice."""
    samples, weight = overconfident(20_000), np.random.default_rng(3).random(20_000)
    right = samples.logit / 2 - np.float32(0.3)
    samples = samples._replace(logit=samples.logit + np.float32(1), weight=weight)
    (line,), (again,) = fit(AUTO, samples), fit_again(AUTO, samples)
    assert again.slopes == line.slopes
    before, after, shifted = (
        np.average(1 / (1 + np.exp(-corrected_by(maps, samples).logit.astype(np.float64))), weights=weight)
        for maps in ((), (again,), (line,))
    )
    assert after == pytest.approx(before, abs=1e-5)
    assert shifted == pytest.approx(np.average(samples.label, weights=weight), abs=1e-2)
    assert abs(before - shifted) > 0.02
    # Two labels, one of which needs no map.
    both = samples._replace(
        label=np.stack([samples.label] * 2, axis=1), logit=np.stack([samples.logit, right], axis=1)
    )
    assert fit_again(AUTO, both) == (again, fit(AUTO, both)[1])
    assert fit_again(AUTO, samples._replace(logit=right)) == ()
    # These correct a shift that the training causes itself, or were asked for.
    for kinds in (("shift",), ("platt",), ("isotonic",)):
        assert fit_again(kinds, samples) == fit(kinds, samples)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    root = tmp_path_factory.mktemp("home")
    return root, prepared(Recipe.from_dict(tiny(root)).data)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, home: tuple[Path, Dataset]) -> tuple[Recipe, dict[str, Any]]:
    root, dataset = home
    train = {
        "run": str(root / request.param),
        "max_steps": 40,
        "eval_every": 0,
        "calibration": request.param,
        "report": True,
    }
    recipe = Recipe.from_dict(tiny(root, **train))
    return recipe, Trainer(recipe, dataset).train()


def test_calibration_is_fitted_on_validation_and_reported_before_and_after(
    run: tuple[Recipe, dict[str, Any]],
) -> None:
    recipe, result = run
    with open_run(recipe.run) as trained:
        maps, trained.model.network.calibration = trained.model.network.calibration.maps, None
        splits = {
            split: evaluate_split(
                trained.model, trained.dataset, split, precision="float32", progress=SilentProgress()
            )[1]
            for split in ("valid", "test")
        }
    assert maps == fit(recipe.train.fitted, splits["valid"])
    for split, samples in splits.items():
        before, after = (
            evaluate_logits(each.label, each.logit) for each in (samples, corrected_by(maps, samples))
        )
        assert result["uncalibrated"][split]["log_loss"] == pytest.approx(before["log_loss"], rel=1e-6)
        assert result[split]["log_loss"] == pytest.approx(after["log_loss"], rel=1e-6)
    assert result["valid"]["log_loss"] < result["uncalibrated"]["valid"]["log_loss"]
    page = (recipe.run / "report.html").read_text()
    assert "test, uncorrected" in page


def test_predictions_and_exports_are_calibrated(run: tuple[Recipe, dict[str, Any]], tmp_path: Path) -> None:
    recipe, result = run
    with open_run(recipe.run) as trained:
        predict(trained, "test", tmp_path / "scores.parquet", SilentProgress())
        export(trained, tmp_path / "export")
        network = trained.model.network.eval()
        # Calibration is not part of a checkpoint.
        assert not any("calibration" in name for name in network.state_dict())
    scores = pl.read_parquet(tmp_path / "scores.parquet")
    loss = -np.log(np.where(scores["label"], scores["score"], 1 - scores["score"]).astype(float)).mean()
    assert loss == pytest.approx(result["test"]["log_loss"], rel=1e-5)
    assert Scorer.open(tmp_path / "export").manifest.calibration == tuple(
        LogitMap(**each) for each in as_tuples(result)
    )


def as_tuples(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: tuple(values) for name, values in each.items()} for each in result["calibration"]]
