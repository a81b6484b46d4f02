"""Test sample weights: a sample of weight w counts as w samples in the training loss and in every
metric.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from training.test_losses import batch_of

from errors import missing, refuses
from recipes import assert_same_model, last, tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DataError
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.reporting.progress import LineProgress
from stratarec.training.evaluate import evaluate_split
from stratarec.training.raw_logs import RawLogs, evaluate_logs
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.loss import Objective
from stratarec.training.trainer import Trainer

ROWS = 1500


def write_log(path: Path, weight: Any) -> None:
    draws = np.random.default_rng(1)
    item = draws.integers(0, 30, ROWS)
    frame = pl.DataFrame(
        {
            "click": (draws.random(ROWS) < 0.2 + 0.5 * (item % 2)).astype(int),
            "who": draws.integers(0, 60, ROWS),
            "weight": weight,
            "item": item,
            "shop": draws.integers(0, 9, ROWS),
        }
    )
    frame.write_parquet(path)


def make_recipe(root: Path, *, weight: str = "weight", groups: str = "auto", **source: Any) -> Recipe:
    content = tiny(root, epochs=1, max_steps=9)
    schema = {
        "label": "click",
        "user": "who",
        "weight": weight,
        "sparse": [{"name": "item"}, {"name": "shop"}],
    }
    schema["sparse"][0]["group"] = "g"  # type: ignore[index]
    content["data"] |= {
        "source": {
            "kind": "parquet",
            "paths": [str(root.parent / "log.parquet")],
            "schema": schema,
            **source,
        },
        "split": {"by": "fraction", "valid": 0.1, "test": 0.4},
        "shard_samples": 700,
        "groups": groups,
    }
    return Recipe.from_dict(content)


def train_run(recipe: Recipe) -> Dataset:
    dataset = prepare(recipe.data)
    Trainer(recipe, dataset).train()
    return dataset


def weighted(rows: int = 300, seed: int = 0) -> tuple[np.ndarray, ...]:
    draws = np.random.default_rng(seed)
    logit = draws.normal(size=rows).round(1)
    label = (draws.random(rows) < 1 / (1 + np.exp(-logit))).astype(float)
    return label, logit, draws.integers(0, 20, rows), draws.integers(0, 5, rows).astype(float)


def test_weighted_metrics_agree_with_scikit_learn() -> None:
    label, logit, _, weight = weighted()
    weight *= 0.37
    metrics, probability = evaluate_logits(label, logit, weight=weight), 1 / (1 + np.exp(-logit))
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, logit, sample_weight=weight), rel=1e-12)
    assert metrics["log_loss"] == pytest.approx(
        log_loss(label, probability, sample_weight=weight), rel=1e-9
    )
    rate = np.average(label, weights=weight)
    base = log_loss(label, np.full(len(label), rate), sample_weight=weight)
    assert metrics["normalized_entropy"] == pytest.approx(metrics["log_loss"] / base, rel=1e-9)
    assert metrics["calibration"] == pytest.approx(np.average(probability, weights=weight) / rate, rel=1e-9)


def test_a_weight_counts_as_that_many_rows() -> None:
    label, logit, user, weight = weighted()
    actual = evaluate_logits(label, logit, user, weight).to_dict()
    repeated = [np.repeat(column, weight.astype(int)) for column in (label, logit, user)]
    expected = evaluate_logits(*repeated).to_dict()
    for name in ("auc", "log_loss", "normalized_entropy", "calibration", "grouped_auc"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-12)
    assert (actual["samples"], actual["positives"]) == (len(label), label.sum())


def test_weights_of_1_change_no_bit_of_a_metric_and_weights_of_0_leave_none() -> None:
    label, logit, user, _ = weighted()
    assert evaluate_logits(label, logit, user, np.ones(len(label))) == evaluate_logits(label, logit, user)
    nothing = evaluate_logits(label, logit, user, np.zeros(len(label))).to_dict()
    assert [name for name in nothing if nothing[name] is not None] == ["samples", "positives"]


def gradient(
    loss: Any, label: torch.Tensor, logit: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    leaf = logit.clone().requires_grad_()
    loss(leaf, batch_of(label, weight)).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_loss_of_a_weighted_batch_matches_repeated_rows() -> None:
    label, logit, weight = (torch.tensor(weighted(37)[place]).float() for place in (0, 1, 3))
    rows = torch.repeat_interleave(torch.arange(37), weight.long())
    actual = gradient(Objective().mean, label, logit, weight)
    expected = torch.zeros(37).index_add(
        0, rows, gradient(Objective().mean, label[rows], logit[rows], None)
    )
    torch.testing.assert_close(actual, expected)
    (total,) = Objective().weights(batch_of(label, weight))
    torch.testing.assert_close(gradient(Objective().sums, label, logit, weight) / total, expected)
    # Neither the unit of weights nor a batch with total weight 0 matters.
    torch.testing.assert_close(gradient(Objective().mean, label, logit, weight / 7), expected)
    assert not gradient(Objective().mean, label, logit, torch.zeros(37)).any()
    assert torch.equal(
        gradient(Objective().mean, label, logit, torch.ones(37)),
        gradient(Objective().mean, label, logit, None),
    )


def test_weights_of_1_train_the_same_bits_as_no_weights(tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", 1)
    ones, none = (
        make_recipe(tmp_path / name, weight=weight) for name, weight in (("ones", "weight"), ("none", ""))
    )
    train_run(ones), train_run(none)
    assert_same_model(last(ones.run), last(none.run))
    write_log(tmp_path / "log.parquet", np.random.default_rng(2).choice([0.5, 3.0], ROWS))
    other = make_recipe(tmp_path / "other")
    dataset = train_run(other)
    with pytest.raises(AssertionError):
        assert_same_model(last(other.run), last(none.run))
    with open_run(other.run) as run:
        whole, scored = evaluate_split(
            run.model, dataset, "test", precision="float32", progress=SilentProgress()
        )
        assert whole["click"]["auc"] == pytest.approx(
            roc_auc_score(scored.label, scored.logit, sample_weight=scored.weight)
        )
        # Raw logs have them too, but need no weights for scoring.
        log = RawLogs(run, [str(tmp_path / "log.parquet")], labelled=True, keep=["shop"])
        evaluation = evaluate_logs(log, SilentProgress(), by=["shop"])
        metrics, slices = evaluation.overall, evaluation.slices
        rows = pl.read_parquet(tmp_path / "log.parquet")
        scores = np.concatenate([part.logits for part in log.scored(SilentProgress())])
        assert metrics["click"]["auc"] == pytest.approx(
            roc_auc_score(rows["click"], scores, sample_weight=rows["weight"])
        )
        value, part = slices["shop"][0]
        chosen = rows["shop"] == int(value)
        known = [column.filter(chosen) for column in (rows["click"], pl.Series(scores), rows["weight"])]
        assert part["click"]["auc"] == pytest.approx(roc_auc_score(*known[:2], sample_weight=known[2]))
        rows.drop("weight").write_parquet(tmp_path / "bare.parquet")
        bare = RawLogs(run, [str(tmp_path / "bare.parquet")])
        assert np.array_equal(
            np.concatenate([part.logits for part in bare.scored(SilentProgress())]), scores
        )
        with refuses(DataError, "weight"):
            RawLogs(run, [str(tmp_path / "bare.parquet")], labelled=True)


def test_held_out_weights_of_0_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = np.where(np.arange(ROWS) < 1200, 1.0, 0.0)
    write_log(tmp_path / "log.parquet", weight)
    path = tmp_path / "log.parquet"
    pl.read_parquet(path).with_columns(time=1_700_000_000 + 60 * pl.int_range(ROWS)).write_parquet(path)
    recipe = make_recipe(tmp_path / "a", groups="none")
    schema = replace(recipe.data.source.schema, time="time")  # type: ignore[union-attr]
    split = replace(recipe.data.split, by="time", valid="1h", test="1h")
    fields = {"data.source.schema": schema, "data.split": split}
    Trainer(recipe := recipe.with_fields(fields), prepare(recipe.data, progress=LineProgress())).train()
    assert not missing("'weight' valid is 0 metric test", capsys.readouterr().err)
    assert main(["evaluate", "-q", recipe.train.run]) == 0
    assert not missing("weights are 0", output := capsys.readouterr().out)
    assert "single class" not in output


@pytest.mark.parametrize("bad", [-1.0, None, float("nan"), float("inf"), 1e39])
def test_a_bad_weight_is_a_bad_row(tmp_path: Path, bad: float | None) -> None:
    write_log(tmp_path / "log.parquet", pl.Series([1.0] * 700 + [bad] + [2.0] * (ROWS - 701)))
    with refuses(DataError, "row 701 weight number 0"):
        prepare(make_recipe(tmp_path / "a").data)
