"""Test several labels, from columns of the log to the metrics and scores of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from sklearn.metrics import roc_auc_score

from errors import missing, refuses
from recipes import tiny
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DataError
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer

ROWS = 1500


def write_log(root: Path) -> pl.DataFrame:
    draws = np.random.default_rng(4)
    item = draws.integers(0, 30, ROWS)
    click = draws.random(ROWS) < 0.2 + 0.5 * (item % 2)
    like = np.where(click, draws.random(ROWS) < 0.2 + 0.6 * (item % 3 == 0), np.nan)
    frame = pl.DataFrame(
        {
            "click": click.astype(int),
            "like": pl.Series(like).fill_nan(None).cast(pl.Int64),
            "stars": np.where(draws.random(ROWS) < 0.3, np.nan, draws.integers(1, 6, ROWS)),
            "who": np.arange(ROWS) // 5,
            "at": np.arange(ROWS),
            "item": item,
            "weight": draws.integers(0, 3, ROWS).astype(float),
        }
    ).with_columns(pl.col("stars").fill_nan(None))
    frame.write_parquet(root / "log.parquet")
    frame.write_csv(root / "log.csv")
    return frame


def content(root: Path, **changes: Any) -> dict[str, Any]:
    config = tiny(
        root,
        epochs=1,
        max_steps=8,
        report=True,
        loss_weights={"like": 0.5},
        early_stopping={"patience": 5},
        calibration="none",
    )
    schema = {
        "labels": ["click", "like", {"column": "stars", "at_least": 4}],
        "user": "who",
        "time": "at",
        "weight": "weight",
        "sparse": [
            {"name": "item"},
            {"name": "who"},
            {"name": "before", "kind": "history", "of": "item", "max_length": 3},
        ],
    }
    source = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema | changes}
    config["data"] |= {"source": source, "split": {"by": "fraction", "valid": 0.2, "test": 0.3}}
    config["model"] |= {"heads": {"kind": "mmoe", "experts": 2, "expert_mlp": [8], "tower_mlp": [4]}}
    return config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on three labels."""
    root = tmp_path_factory.mktemp("labels")
    write_log(root)
    (root / "r.yaml").write_text(yaml.safe_dump(content(root)))
    assert main(["prepare", str(root / "r.yaml"), "-q"]) == 0
    assert main(["train", str(root / "r.yaml"), "-q"]) == 0
    return root


def truth(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select("click", "like", stars=(pl.col("stars") >= 4).cast(pl.Int64))


def test_batches_have_every_label_of_their_samples(place: Path) -> None:
    frame, dataset = pl.read_parquet(place / "log.parquet"), Dataset.open(place / "data")
    expected = {row[0]: row[1:] for row in frame.select("at", *truth(frame)).iter_rows()}
    rows = np.concatenate(list(dataset.row_numbers("train")))
    batches = list(Loader(dataset, "train", LoaderConfig(batch_size=100, shuffle=False)).epoch(0))
    label = np.concatenate([batch.label.numpy() for batch in batches])
    assert label.shape == (len(rows), 3)
    for row, actual in zip(rows, label, strict=True):
        assert [None if np.isnan(each) else each for each in actual] == list(expected[row - 1])
    for split in dataset.splits:
        counts = dataset.label_counts(split)
        numbers = np.concatenate(list(dataset.row_numbers(split))) - 1
        chosen = truth(frame)[numbers]
        for name, count in counts.items():
            known = chosen[name].drop_nulls()
            assert (count.known, count.positives) == (len(known), known.sum()), (split, name)


@pytest.fixture(scope="module")
def scores(place: Path) -> pl.DataFrame:
    """Return what the run reports for its test split."""
    assert main(["predict", str(place / "run"), "-o", str(place / "test.parquet"), "-q"]) == 0
    return pl.read_parquet(place / "test.parquet")


def test_each_label_has_its_metrics_and_scores(
    place: Path, scores: pl.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads((place / "run" / "result.json").read_text())
    actual, log = scores, pl.read_parquet(place / "log.parquet")
    names = ["click", "like", "stars"]
    assert actual.columns == [
        "file",
        "row",
        *(f"label_{name}" for name in names),
        *(f"score_{name}" for name in names),
    ]
    rows = actual["row"].to_numpy() - 1
    weight = log["weight"].to_numpy()[rows]
    for name in names:
        label = truth(log)[name].to_numpy()[rows]
        known = ~np.isnan(label.astype(float))
        np.testing.assert_array_equal(actual[f"label_{name}"].to_numpy(), label)
        score = actual[f"score_{name}"].to_numpy()
        expected = roc_auc_score(label[known], score[known], sample_weight=weight[known])
        figures = result["test"]["labels"][name]
        # Two logits may round to the same probability.
        assert figures["auc"] == pytest.approx(expected, abs=2e-4)
        assert figures["samples"] == known.sum()
    assert {key: result["test"][key] for key in figures} == result["test"]["labels"]["click"]
    page = (place / "run" / "report.html").read_text()
    assert all(text in page for text in ("test, stars AUC", "Calibration, like", "validation, click"))
    # Raw logs without and with labels have the same scores.
    capsys.readouterr()
    log.drop("like", "stars", "weight").write_parquet(place / "bare.parquet")
    bare = [
        "predict",
        str(place / "run"),
        str(place / "bare.parquet"),
        "--history",
        str(place / "log.parquet"),
    ]
    assert main([*bare, "-o", str(place / "bare.csv"), "-q"]) == 0
    fresh = pl.read_csv(place / "bare.csv")
    assert [name for name in fresh.columns if name.startswith("label")] == []
    for name in names:
        np.testing.assert_allclose(
            fresh[f"score_{name}"].to_numpy()[rows], actual[f"score_{name}"], rtol=1e-4
        )
    capsys.readouterr()
    assert main(["evaluate", str(place / "run"), str(place / "log.parquet"), "--by", "item", "-q"]) == 0
    lines = capsys.readouterr().out
    assert all(text in lines for text in ("log, click: 1,500 samples", "log, like:", "item (stars)"))
    assert main(["evaluate", str(place / "run"), str(place / "bare.parquet"), "-q"]) == 2
    assert not missing("like", capsys.readouterr().err)
    assert main(["evaluate", str(place / "run"), "--split", "test", "-q"]) == 0
    assert "test, like:" in capsys.readouterr().out


def test_an_export_scores_each_label(place: Path, scores: pl.DataFrame) -> None:
    assert main(["export", str(place / "run"), "-o", str(place / "export"), "-q"]) == 0
    frame, log = scores, pl.read_parquet(place / "log.parquet")
    scorer = Scorer.open(place / "export")
    assert scorer.labels == ("click", "like", "stars")
    rows = frame["row"].to_numpy() - 1
    chosen = log[rows]
    histories = [
        log.filter((pl.col("who") == row["who"]) & (pl.col("at") < row["at"]) & (pl.col("click") == 1))[
            "item"
        ].to_list()
        for row in chosen.iter_rows(named=True)
    ]
    scores = scorer.score({"item": chosen["item"], "who": chosen["who"], "before": histories})
    for place_, name in enumerate(scorer.labels):
        np.testing.assert_allclose(scores[:, place_], frame[f"score_{name}"], rtol=1e-4)
    assert scorer.score({"item": [], "who": [], "before": []}).shape == (0, 3)


def test_a_run_resumes_bit_for_bit(place: Path) -> None:
    uninterrupted = json.loads((place / "run" / "result.json").read_text())["test"]
    change = [f"train.run={place / 'half'}", "train.max_steps=4"]
    assert main(["train", str(place / "r.yaml"), "-q", *change]) == 0
    assert main(["train", str(place / "r.yaml"), "-q", "--resume", change[0]]) == 0
    assert json.loads((place / "half" / "result.json").read_text())["test"] == uninterrupted


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_rows_without_labels_or_with_invalid_labels_are_bad(tmp_path: Path, kind: str) -> None:
    frame = write_log(tmp_path)
    ending, first = ("parquet", 1) if kind == "parquet" else ("csv", 2)
    config = content(tmp_path)
    config["data"]["source"] |= {"kind": kind, "paths": [str(tmp_path / f"log.{ending}")]}
    other = frame.with_row_index().with_columns(
        pl.when(pl.col("index") != 40).then(pl.col(name)).alias(name) for name in ("click", "like", "stars")
    )
    getattr(other, f"write_{ending}")(tmp_path / f"log.{ending}")
    with refuses(DataError, f"{40 + first} click"):
        prepare(Recipe.from_dict(config).data)
    other = frame.with_row_index().with_columns(
        like=pl.when(pl.col("index") == 7).then(2).otherwise(pl.col("like"))
    )
    getattr(other, f"write_{ending}")(tmp_path / f"log.{ending}")
    with refuses(DataError, f"{7 + first} like 2 0 1"):
        prepare(Recipe.from_dict(config).data)
