"""Compare explanations with naive permutations, with the raw log, and with models whose parts are
known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from sklearn.metrics import log_loss, roc_auc_score

from recipes import tiny
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.progress import SilentProgress
from stratarec.training.explain.importance import importance
from stratarec.training.explain.probe import Column, Probe, columns_of, draw_samples
from stratarec.training.run.open_run import TrainedModel, open_run

ROWS = 3000
COLUMNS = ["x", "y", "item", "city", "tags", "last", "before"]


def write_log(root: Path) -> pl.DataFrame:
    """Write a log: clicks follow `x` and `item`, likes follow `y` where they are known, and `city`
    is noise.
    """
    draws = np.random.default_rng(6)
    x, y, item = draws.exponential(20, ROWS).round(), draws.normal(3, 2, ROWS), draws.integers(0, 20, ROWS)
    click = draws.random(ROWS) < 1 / (1 + np.exp(-3 * (np.log1p(x) - 3.2 + (item % 4 == 0) * 2)))
    like = np.where(draws.random(ROWS) < 0.7, draws.random(ROWS) < 1 / (1 + np.exp(-2 * (y - 3))), np.nan)
    lists: list[list[int]] = [draws.integers(0, 12, size).tolist() for size in draws.integers(0, 5, ROWS)]
    frame = pl.DataFrame(
        {
            "click": click.astype(int),
            "like": pl.Series(like).fill_nan(None).cast(pl.Int64),
            "who": np.arange(ROWS) // 6,
            "at": np.arange(ROWS),
            "worth": draws.integers(0, 3, ROWS).astype(float),
            "x": x,
            "y": y,
            "item": item,
            "city": [f"c{each}" for each in draws.integers(0, 9, ROWS)],
            "tags": lists,
            "shares": [[0.5 + each % 3 for each in values] for values in lists],
            "last": lists[::-1],
            "kinds": [[f"k{each % 3}" for each in values] for values in lists[::-1]],
        },
        schema_overrides={
            "tags": pl.List(pl.Int64),
            "shares": pl.List(pl.Float64),
            "last": pl.List(pl.Int64),
        }
        | {"kinds": pl.List(pl.String)},
    )
    frame.write_parquet(root / "log.parquet")
    return frame


def content(root: Path, model: dict[str, Any], *, weights: bool = True, **train: Any) -> dict[str, Any]:
    rates = {"dense": {"learning_rate": 0.03}, "embedding": {"learning_rate": 0.02}}
    config = tiny(root, **{"epochs": 8, "eval_every": 0, "threads": 1, **rates, **train})
    schema = {
        "labels": ["click", "like"],
        "user": "who",
        "time": "at",
        "weight": "worth",
        "dense": [{"name": "x"}, {"name": "y", "transform": "none", "standardize": False}],
        "sparse": [
            {"name": "item"},
            {"name": "city"},
            {"name": "tags", "kind": "multi", **({"weights": "shares"} if weights else {})},
            {"name": "last", "kind": "sequence", "of": "item"},
            {"name": "kinds", "kind": "sequence", "beside": "last"},
            {"name": "before", "kind": "history", "of": "item", "max_length": 3},
        ],
    }
    source = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema}
    config["data"] |= {"source": source, "split": {"by": "fraction", "valid": 0.1, "test": 0.4}}
    return config | {"model": {"embedding_dim": 1 if model["kind"] == "lr" else 4, **model}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on two labels, and its log."""
    result = tmp_path_factory.mktemp("explain")
    write_log(result)
    model = {"kind": "dlrm", "bottom_mlp": [8], "top_mlp": [16], "history": {"pooling": "target_attention"}}
    config = content(result, model, report=True, calibration="platt")
    (result / "r.yaml").write_text(yaml.safe_dump(config))
    assert main(["prepare", str(result / "r.yaml"), "-q"]) == 0
    assert main(["train", str(result / "r.yaml"), "-q"]) == 0
    return result


@pytest.fixture
def trained(root: Path) -> Iterator[TrainedModel]:
    with open_run(root / "run") as trained_run:
        yield trained_run


def probe_of(trained: TrainedModel, samples: int = 4096) -> Probe:
    return Probe(
        trained.model, trained.dataset, draw_samples(trained.dataset, "test", samples, 1), "float32"
    )


def permuted_logits(
    trained: TrainedModel, batch: Batch, column: Column, order: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the logits of samples in which sample i has the column's values of sample
    ``order[i]``.
    """
    dense, bags = batch.dense.clone(), {}
    for row, other in enumerate(order):
        if column.dense is not None:
            dense[row, column.dense] = batch.dense[int(other), column.dense]
    for key in batch.sparse.keys:
        bag = batch.sparse[key]
        assert bag.weights is not None
        ids, weights = bag.to_list(), JaggedTensor(values=bag.weights, offsets=bag.offsets).to_list()
        if key in column.sparse:
            ids, weights = [ids[each] for each in order], [weights[each] for each in order]
        bags[key] = JaggedTensor(
            values=torch.tensor([each for bag in ids for each in bag], dtype=torch.int32),
            offsets=torch.tensor([0, *np.cumsum(list(map(len, ids)))]),
            weights=torch.tensor([each for bag in weights for each in bag]),
        )
    with torch.no_grad():
        actual: np.ndarray[Any, Any] = trained.model.eval()(
            batch.replace(dense=dense, sparse=KeyedJagged.from_features(bags))
        ).numpy()
    return actual


def components(
    label: np.ndarray[Any, Any], score: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]
) -> Any:
    """Return DeLong's structural components, computed pair by pair."""
    wins = (score[:, None] > score[None, :]) + 0.5 * (score[:, None] == score[None, :])
    positive, negative = np.flatnonzero(label == 1), np.flatnonzero(label == 0)
    pairs = wins[np.ix_(positive, negative)]
    return (
        (pairs * weight[negative]).sum(1) / weight[negative].sum(),
        (pairs * weight[positive][:, None]).sum(0) / weight[positive].sum(),
        positive,
        negative,
    )


def test_importance_matches_naive_permutations(trained: TrainedModel) -> None:
    probe = probe_of(trained, 300)
    columns = columns_of(trained.dataset.schema)
    assert [column.name for column in columns] == COLUMNS
    assert next(column for column in columns if column.name == "last").sparse == ("last", "kinds")
    result = importance(probe, columns, repeats=2, seed=4, progress=SilentProgress())
    batch = probe.batch
    assert batch.weight is not None
    assert batch.user is not None
    user = batch.user.numpy()
    base = permuted_logits(trained, batch, Column(name=""), np.arange(batch.size))
    for place, column in enumerate(columns):
        orders = [np.random.default_rng([4, place, repeat]).permutation(batch.size) for repeat in range(2)]
        permuted = [permuted_logits(trained, batch, column, order) for order in orders]
        for number, name in enumerate(("click", "like")):
            label, weight = batch.label[:, number].numpy(), batch.weight.numpy().astype(np.float64)
            known = np.flatnonzero(~np.isnan(label) & (weight > 0))
            label, weight = label[known], weight[known]

            def auc(logit: np.ndarray[Any, Any]) -> float:
                return float(roc_auc_score(label, logit[known, number], sample_weight=weight))  # noqa: B023

            def loss(logit: np.ndarray[Any, Any]) -> float:
                chance = 1 / (1 + np.exp(-logit[known, number].astype(np.float64)))  # noqa: B023
                return float(log_loss(label, chance, sample_weight=weight))  # noqa: B023

            mine = result[name]
            one = next(each for each in mine.columns if each.feature == column.name)
            assert mine.auc == pytest.approx(auc(base), abs=1e-9)
            assert mine.log_loss == pytest.approx(loss(base), abs=1e-6)
            assert one.auc_drop.value == pytest.approx(
                auc(base) - np.mean([auc(each) for each in permuted]), abs=1e-6
            )
            assert one.log_loss_rise.value == pytest.approx(
                np.mean([loss(each) for each in permuted]) - loss(base), abs=1e-6
            )
            before, *after = (components(label, each[known, number], weight) for each in (base, *permuted))
            parts: dict[int, float] = dict.fromkeys(user[known].tolist(), 0.0)
            for side in range(2):
                scale = weight[before[2 + side]] / weight[before[2 + side]].sum()
                away = before[side] - np.mean([each[side] for each in after], axis=0)
                for key, part in zip(
                    user[known][before[2 + side]], scale * (away - (scale * away).sum()), strict=True
                ):
                    parts[int(key)] += float(part)
            variance = sum(part**2 for part in parts.values()) * len(parts) / (len(parts) - 1)
            assert one.auc_drop.margin == pytest.approx(1.959964 * math.sqrt(variance), abs=1e-6)


def test_an_additive_model_is_reported_and_its_curves_match_the_log(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path)
    config = content(tmp_path, {"kind": "lr"}, weights=False)
    schema = config["data"]["source"]["schema"]
    schema |= {"labels": [], "label": "click", "weight": "", "sparse": schema["sparse"][:3]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config))
    for command in ("prepare", "train"):
        assert main([command, str(tmp_path / "r.yaml"), "-q"]) == 0
    run = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["explain", run, str(tmp_path / "log.parquet"), "--row", "5", "-q", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["labels"]["click"]
    assert parts["together"] == pytest.approx(0, abs=1e-5)
    # A log in which one row or all rows have no value take another path to the same result.
    log = pl.read_parquet(tmp_path / "log.parquet")
    other = log.with_columns(item=pl.when(pl.int_range(ROWS) == 4).then(None).otherwise(pl.col("item")))
    logit = np.log(score := predict_log(run, other, tmp_path)) - np.log1p(-score)
    assert parts["logit"] - logit[4] == pytest.approx(parts["parts"]["item"], abs=1e-4)
    capsys.readouterr()
    assert (
        main(["explain", run, "--feature", "x", "--feature", "y", "--samples", "100000", "-q", "--json"])
        == 0
    )
    tested = np.concatenate(list(Dataset.open(tmp_path / "data").row_numbers("test"))) - 1
    for curve in json.loads(capsys.readouterr().out)["numbers"]:
        name, values, means = curve["feature"], curve["values"], curve["predictions"]["click"]
        assert values == sorted(values)
        assert sum(curve["shares"]) == pytest.approx(1)
        for place in (0, len(values) // 2, -1):
            scores = predict_log(run, log.with_columns(pl.lit(float(values[place])).alias(name)), tmp_path)
            assert means[place] == pytest.approx(
                scores[tested].mean(), rel=0.02 if len(tested) > 1024 else 1e-4
            )


def predict_log(run: str, log: pl.DataFrame, root: Path) -> np.ndarray[Any, Any]:
    log.write_parquet(root / "other.parquet")
    assert main(["predict", run, str(root / "other.parquet"), "-q", "-o", str(root / "other.csv")]) == 0
    return pl.read_csv(root / "other.csv")["score"].to_numpy()
