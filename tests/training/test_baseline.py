"""Test the baselines: what they learn, how they are reported, and which files are refused."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from sklearn.metrics import roc_auc_score

from errors import missing, refuses
from recipes import log_config, tiny
from stratarec.cli import main
from stratarec.cli.checks.artifacts import check
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.splits import SplitConfig
from stratarec.errors import DatasetError
from stratarec.models.zoo.config import DCNv2Config, DLRMConfig, EnsembleConfig
from stratarec.progress import SilentProgress
from stratarec.training.baseline.baselines import (
    Baselines,
    Method,
    MethodFigures,
    compare_with_baselines,
    read_baselines,
    read_scores,
    write_baselines,
)
from stratarec.training.baseline.fit_methods import (
    _FOLDS,
    _PRIOR,
    Arrays,
    Bags,
    Settings,
    _fit_trees,
    _one_hot,
    _Shares,
    blocks,
    fit_methods,
    read,
    regression,
    trees,
)
from stratarec.training.evaluate import ScoredSamples

needs_lightgbm = pytest.mark.skipif(
    importlib.util.find_spec("lightgbm") is None,
    reason="lightgbm is not installed: pip install 'stratarec[baseline]'",
)
ROWS = 6000


def log() -> pl.DataFrame:
    """Return a log of clicks that depend on single values and on whether the parities of item and
    shop agree.

    It has few items and many shops.
    """
    draws = np.random.default_rng(2)
    item, shop = draws.integers(0, 40, ROWS), draws.integers(0, 400, ROWS)
    logit = 1.5 * ((item + shop) % 2) + draws.normal(size=40)[item] - 1.5
    return pl.DataFrame(
        {
            "click": (draws.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(int),
            "like": draws.integers(0, 2, ROWS),
            "item": item,
            "parity": shop % 2,
            "shop": shop,
            "price": draws.normal(size=ROWS),
            "tags": [list(range(row % 3)) for row in range(ROWS)],
            "weight": draws.integers(0, 3, ROWS).astype(float),
        }
    )


def content(root: Path, **schema: Any) -> dict[str, Any]:
    config = tiny(root, max_steps=30, report=True, eval_every=0)
    sparse = [{"name": "item"}, {"name": "parity"}, {"name": "shop"}, {"name": "tags", "kind": "multi"}]
    given = {"label": "click", "dense": [{"name": "price"}], "sparse": sparse, **schema}
    config["data"] |= {
        "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": given},
        "split": {"valid": 0.2, "test": 0.3},
    }
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a log, a recipe and its prepared data."""
    root = tmp_path_factory.mktemp("baseline")
    log().write_parquet(root / "log.parquet")
    (root / "r.yaml").write_text(yaml.safe_dump(content(root)))
    assert main(["prepare", "-q", str(root / "r.yaml")]) == 0
    return root


def bags(draws: np.random.Generator, samples: int, most: int) -> Bags:
    lengths = draws.integers(0, 4, samples)
    return Bags(draws.integers(0, most, int(lengths.sum())), lengths)


def arrays(samples: int = 60) -> Arrays:
    draws = np.random.default_rng(1)
    label = draws.integers(0, 2, samples).astype(np.float32)
    single = Bags(draws.integers(0, 9, samples), np.ones(samples, dtype=np.int64))
    dense = draws.normal(size=(samples, 2)).astype(np.float32)
    return Arrays(label, None, dense, {"one": single, "list": bags(draws, samples, 12)})


def test_one_hot_columns_match_a_loop() -> None:
    samples, columns = arrays(), {"one": 9, "list": 7}
    expected = np.zeros((60, 2 + 9 + 7))
    expected[:, :2] = samples.dense
    for key, first in (("one", 2), ("list", 11)):
        place = 0
        for row, length in enumerate(samples.bags[key].lengths):
            for id_ in samples.bags[key].ids[place : place + length]:
                if id_ < columns[key]:
                    expected[row, first + id_] += 1 / length
            place += length
    np.testing.assert_allclose(_one_hot(samples, columns).toarray(), expected)


@pytest.mark.parametrize("key", ["one", "list"])
def test_target_shares_of_a_training_sample_come_from_other_folds(key: str) -> None:
    samples = arrays()
    fold = np.random.default_rng(3).integers(0, _FOLDS, 60)
    bag, rate = samples.bags[key], samples.label.mean()
    rows = np.repeat(np.arange(60), bag.lengths)

    def share(id_: int, others: Callable[[int], bool]) -> float:
        known = [row for row, each in zip(rows, bag.ids, strict=True) if each == id_ and others(row)]
        return float((samples.label[known].sum() + _PRIOR * rate) / (len(known) + _PRIOR))

    def expected_share(row: int, others: Callable[[int], bool]) -> float:
        return float(np.mean([share(id_, others) for id_ in bag.ids[rows == row]] or [rate]))

    shares = _Shares(bag, samples)
    training = shares.columns(bag, (fold, samples.label))[0]
    np.testing.assert_allclose(
        training,
        [expected_share(row, lambda other, row=row: fold[other] != fold[row]) for row in range(60)],
    )
    np.testing.assert_allclose(
        shares.columns(bag, None)[0], [expected_share(row, lambda other: True) for row in range(60)]
    )
    unseen = Bags(np.array([10_000, -5]), np.array([1, 1]))
    np.testing.assert_allclose(shares.columns(unseen, None)[0], [rate, rate], rtol=1e-6)


def test_missing_values_in_only_some_splits_keep_the_columns_consistent() -> None:
    full = arrays()
    lengths = np.ones(60, dtype=np.int64)
    lengths[::7] = 0
    one = full.bags["one"]
    gaps = full._replace(bags={**full.bags, "one": Bags(one.ids[lengths > 0], lengths)})
    for train, other in ((full, gaps), (gaps, full)):
        shares = _Shares(train.bags["one"], train)
        share, count = shares.columns(other.bags["one"], None)
        missing = other.bags["one"].lengths == 0
        np.testing.assert_allclose(share[missing], train.label.mean(), rtol=1e-6)
        assert not count[missing].any()
        assert (count[~missing] > 0).all()
        for rows in (9, 1000):
            scores = trees(train, train, Settings({"one": rows, "list": 12}, 0, 1))(other)
            assert scores.shape == (60,)


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_chooses_whether_many_ids_are_categories_or_rates(seed: int) -> None:
    draws = np.random.default_rng(seed)
    effect, ones = draws.normal(size=300), np.ones(4000, dtype=np.int64)

    def drawn() -> Arrays:
        ids = draws.integers(0, 300, 4000)
        label = (draws.random(4000) < 1 / (1 + np.exp(-effect[ids]))).astype(np.float32)
        return Arrays(
            label=label, weight=None, dense=np.zeros((4000, 0), np.float32), bags={"one": Bags(ids, ones)}
        )

    train, valid, settings = drawn(), drawn(), Settings({"one": 300}, 0, 1)
    losses = [_fit_trees(train, valid, settings, native)[0] for native in ([], ["one"])]
    assert losses[0] != losses[1]
    logits = trees(train, valid, settings)(valid)
    assert np.logaddexp(0, logits).mean() - (valid.label * logits).mean() == pytest.approx(
        min(losses), abs=1e-6
    )


def test_regression_learns_single_values_and_uses_validation(home: Path) -> None:
    dataset = Dataset.open(home / "data")
    train, valid = (read(dataset, split, 1 << 30, 0, SilentProgress()) for split in ("train", "valid"))
    settings = Settings({"item": 104, "parity": 66, "shop": 464, "tags": 67}, 0, 1)
    settings = settings._replace(
        rows={each.name: dataset.table_rows()[each.vocabulary] for each in dataset.schema.sparse}
    )
    result = regression(train, valid, settings)(valid)
    frame = log()
    ceiling = roc_auc_score(frame["click"], frame.select(pl.col("click").mean().over("item")).to_series())
    assert roc_auc_score(valid.label, result) > ceiling - 0.05
    # Random labels lead to the strongest penalty and to predictions near the click rate.
    draws = np.random.default_rng(0)
    noise = [
        each._replace(label=draws.integers(0, 2, len(each.label)).astype(np.float32))
        for each in (train, valid)
    ]
    assert np.std(regression(noise[0], noise[1], settings)(noise[1])) < 0.2  # 0.05 as a probability


@needs_lightgbm
@pytest.mark.slow
def test_a_baseline_is_reported_by_train_evaluate_reports_and_check(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = str(home / "r.yaml"), str(home / "run")
    assert main(["train", recipe, "-q"]) == 0
    assert not missing("baselines `stratarec baseline`", " ".join(capsys.readouterr().out.split()))
    assert main(["baseline", recipe, "-q", "train.threads=1"]) == 0
    output = capsys.readouterr().out
    dataset = Dataset.open(home / "data")
    baselines = read_baselines(dataset)
    assert baselines is not None
    assert baselines.fitted == dataset.samples("train")
    line, trees = (method.splits["test"] for method in baselines.methods)
    assert line.samples == dataset.samples("test")
    assert trees.auc > line.auc + 0.02  # the pair of parities is no effect of single values
    assert not missing(f"{run} AUC", output)
    assert main(["evaluate", run, "-q"]) == 0
    evaluated = capsys.readouterr().out
    assert main(["train", recipe, "-q", "--overwrite"]) == 0
    for printed in (output, evaluated, capsys.readouterr().out):
        text = " ".join(printed.split())
        assert not missing(f"LightGBM: AUC {trees.auc:.4f}", text)
        assert not missing(f"AUC {line.auc:.4f}", text)
        assert not missing("LightGBM", text)
        assert "stratarec tune" in text
    assert not missing("LightGBM", (home / "run" / "report.html").read_text())
    assert not missing("baseline 2", list(check(home / "data")))
    again = fit_methods(dataset, SilentProgress(), threads=1)
    assert [method.splits for method in again.methods] == [method.splits for method in baselines.methods]
    part = fit_methods(dataset, SilentProgress(), threads=1, most_values=4_000)
    assert part.fitted <= dataset.samples("train")


@needs_lightgbm
@pytest.mark.slow
def test_weights_count_and_large_data_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    config = content(tmp_path, weight="weight")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config))
    assert main(["prepare", "-q", str(tmp_path / "r.yaml")]) == 0
    dataset = Dataset.open(tmp_path / "data")
    monkeypatch.setattr("stratarec.training.baseline.fit_methods._BATCH", 256)
    result = fit_methods(dataset, SilentProgress(), threads=1, most_values=6_000)
    assert 0 < result.fitted < dataset.samples("train") / 2
    comparison = compare_with_baselines(dataset, "test", None, DLRMConfig())
    assert not missing(f"{result.fitted:,} {dataset.samples('train'):,}", comparison)
    # Other weights of the same samples give other metrics.
    assert result.methods[0].splits["test"].samples == dataset.samples("test")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Return a data set without a baseline."""
    log().write_parquet(tmp_path / "log.parquet")
    schema = Schema(label="click", sparse=(SparseFeature(name="item"),))
    return prepare(log_config(tmp_path, schema, split=SplitConfig(valid=0.2, test=0.2)))


def score_split(dataset: Dataset, split: str, slope: float, noise: float, seed: int = 0) -> ScoredSamples:
    """Return the samples of a split with scores: `slope` times a logit that reveals the label up to
    `noise`.
    """
    label = np.concatenate([part.label for part in blocks(dataset, split, SilentProgress())])
    logit = slope * (label + np.random.default_rng(seed).normal(-0.6, noise, len(label)))
    return ScoredSamples(label, logit.astype(np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))


def write_scores(dataset: Dataset, parts: list[ScoredSamples]) -> Baselines:
    """Write a baseline with these scores for both splits."""
    splits = {
        split: MethodFigures(
            positives=int(part.label.sum()), samples=len(part.label), auc=0.7, log_loss=0.5
        )
        for split, part in zip(("valid", "test"), parts, strict=True)
    }
    method = Method(name="LightGBM", seconds=1.0, splits=splits)  # type: ignore[arg-type]
    logits = np.concatenate([part.logit for part in parts])[None]
    return write_baselines(dataset, dataset.samples("train"), (method,), logits)


def verdicts(dataset: Dataset, model: ScoredSamples) -> list[str]:
    """Return how the comparison rates the model by AUC and by log loss."""
    return re.findall("better|worse|equal", compare_with_baselines(dataset, "test", model, DLRMConfig())[0])


def test_models_are_compared_by_both_metrics_on_the_same_samples(dataset: Dataset) -> None:
    valid, other = (score_split(dataset, split, 1.5, 1.0) for split in ("valid", "test"))
    write_scores(dataset, [valid, other])
    assert verdicts(dataset, other) == ["equal", "equal"]
    assert verdicts(dataset, score_split(dataset, "test", 1.5, 0.7)) == ["better", "better"]
    assert verdicts(dataset, score_split(dataset, "test", 1.5, 1.6)) == ["worse", "worse"]
    # The order of the samples is better, but the scores are far too extreme.
    assert verdicts(dataset, score_split(dataset, "test", 12.0, 0.9)) == ["better", "worse"]
    # Other noise of the same size is equally good within the chance of so few samples.
    assert verdicts(dataset, score_split(dataset, "test", 1.5, 1.0, seed=1)) == ["equal", "equal"]
    worse = score_split(dataset, "test", 1.5, 1.6)
    (line, advice) = compare_with_baselines(dataset, "test", worse, DLRMConfig())
    assert not missing("model.kind=ensemble dcnv2 finalmlp stratarec tune", advice)
    # An ensemble has members of the other kinds, so a single network is no advice.
    for has_trees in (False, True):
        advice = compare_with_baselines(dataset, "test", worse, EnsembleConfig(trees=has_trees))[-1]
        assert ("model.trees" in advice) == (not has_trees)
        assert "stratarec tune" in advice
        assert "model.kind" not in advice
    assert "dcnv2" not in compare_with_baselines(dataset, "test", worse, DCNv2Config())[-1]
    value, half = (float(text) for text in re.findall(r"AUC ([+-]\d\.\d+) \+- (\d\.\d+)", line)[0])
    mine, theirs = (
        roc_auc_score(part.label, part.logit) for part in (score_split(dataset, "test", 1.5, 1.6), other)
    )
    assert value == pytest.approx(mine - theirs, abs=1e-4)
    assert half == pytest.approx(
        1.96 * bootstrap_error(score_split(dataset, "test", 1.5, 1.6), other), rel=0.15
    )


def bootstrap_error(one: ScoredSamples, other: ScoredSamples) -> float:
    """Return the standard error of the difference of AUC, by resampling."""
    draws, differences = np.random.default_rng(0), []
    for _ in range(300):
        rows = draws.integers(0, len(one.label), len(one.label))
        differences.append(
            np.subtract(*(roc_auc_score(part.label[rows], part.logit[rows]) for part in (one, other)))
        )
    return float(np.std(differences))


def test_damaged_scores_of_baselines_are_refused(dataset: Dataset) -> None:
    parts = [score_split(dataset, split, 1.5, 1.0) for split in ("valid", "test")]
    baselines = write_scores(dataset, parts)
    path = Path(dataset.path) / "baseline.npy"
    assert read_scores(dataset, baselines)["test"][0] == pytest.approx(parts[1].logit)
    check(Path(dataset.path))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with refuses(DatasetError, "baseline.npy"):
        read_scores(dataset, baselines)
    (line,) = compare_with_baselines(dataset, "test", parts[1], DLRMConfig())
    assert "baseline.npy" in line
    # A file with the right hash but another shape.
    baselines = write_scores(dataset, [parts[0], parts[0]])
    with refuses(DatasetError, "baseline.npy"):
        read_scores(dataset, baselines)
