"""Test columns of sample weights: they are detected by name and values, and a draft with one
predicts the right rate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from stratarec.cli import main
from stratarec.cli.init.guess import guess
from stratarec.cli.init.sample import read_sample
from stratarec.recipe import Recipe

ROWS = 3000
DRAWS = np.random.default_rng(0)
CLICKS = (DRAWS.random(ROWS) < 0.1).astype(np.int64)
Values = Callable[[NDArray[np.int64]], object]


def write(path: Path, click: NDArray[np.int64], **columns: object) -> str:
    item = np.random.default_rng(1).integers(0, 30, len(click))
    pl.DataFrame({"item": [f"i{x}" for x in item], "click": click, **columns}).write_csv(path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("weight", lambda click: np.where(click, 1, 10), "weight"),
        ("w_weight", lambda click: np.where(click, 1.0, 7.5), "weight"),
        # rates of several days
        ("weight", lambda click: np.where(click, 1, DRAWS.integers(5, 20, ROWS)), "weight"),
        ("sample_weight", lambda click: DRAWS.integers(1, 9, ROWS), "weight"),
        ("sampleWeight", lambda click: DRAWS.random(ROWS), "weight"),
        ("weight", lambda click: DRAWS.integers(100, 900, ROWS), "dense"),  # of parcels
        ("parcel_weight_kg", lambda click: DRAWS.random(ROWS) * 9, "dense"),
        ("weight", lambda click: np.where(click, -1, 10), "ignored"),
        ("weight", lambda click: 1 - click, "ignored"),
        ("weight", lambda click: np.full(ROWS, 2), "ignored"),
        ("stage", lambda click: np.where(click, 1, 10), "ignored"),
        ("sample_weight", lambda click: [None, *[1.5, 2.0] * (ROWS // 2 - 1), 2.5], "dense"),
    ],
)
def test_a_weight_is_detected_by_its_name_and_values(
    name: str, values: Values, role: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "log.csv", CLICKS, **{name: values(CLICKS)})
    result = guess(read_sample((path,)))
    assert {each.name: each.role for each in result.columns} == {
        "item": "sparse",
        "click": "label",
        name: role,
    }


@pytest.mark.slow
def test_scores_are_rates_before_negatives_were_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    click = draws.random(60_000) < 0.01
    kept = click | (draws.random(len(click)) < 0.1)
    write(tmp_path / "log.csv", click[kept].astype(np.int64), weight=np.where(click, 1, 10)[kept])
    assert main(["init", "log.csv"]) == 0
    assert Recipe.load("log.yaml").data.source.schema.weight == "weight"
    assert main(["prepare", "-q", "log.yaml"]) == 0
    assert main(["train", "-q", "log.yaml", "train.run=run", "train.report=false", "model.members=2"]) == 0
    assert main(["predict", "-q", "run"]) == 0
    scores = pl.read_parquet("run/predictions-test.parquet")["score"]
    assert 0.007 < float(scores.mean()) < 0.014  # type: ignore[arg-type]
