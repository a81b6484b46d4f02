"""Test that every way of scoring makes the same numbers of dates and of columns with two features:
to 1e-6.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import refuses
from stratarec import ClickModel, Scorer
from stratarec.cli import main
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DataError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, leaves
from stratarec.training.export.export import export
from stratarec.training.predict import predict, predict_logs
from stratarec.training.raw_logs import RawLogs
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

ROWS = 900
SCHEMA: dict[str, Any] = {
    "time": "at", "time_format": "%d/%m/%Y %H:%M",
    "dates": [
        {"name": "at", "parts": ["hour", "weekday", "days"], "zone": "Europe/Berlin"},
        {"name": "arrival", "parts": ["month", "day"], "since": ["at", "born"], "zone": "America/New_York"},
        {"name": "born", "time_unit": "ms"},
    ],
    "dense": [{"name": "price"}, {"name": "item.number", "column": "item", "transform": "none"}],
    "sparse": [{"name": "item"}, {"name": "at.hour"}],
}  # fmt: skip


def write_log(path: Path, first: int) -> pl.DataFrame:
    """Write a log of 40 days from day `first`, with clicks at weekends and for arrivals in July and
    August.
    """
    draws = np.random.default_rng(first)
    minutes = np.sort(draws.integers(0, 40 * 24 * 60, ROWS))
    at = [datetime(2024, 5, 1) + timedelta(days=first, minutes=int(minute)) for minute in minutes]
    arrival = [
        time + timedelta(days=int(days), seconds=7)
        for time, days in zip(at, draws.integers(0, 90, ROWS), strict=True)
    ]
    rate = [
        0.1 + 0.4 * (time.weekday() > 4) + 0.4 * (end.month in (7, 8))
        for time, end in zip(at, arrival, strict=True)
    ]
    hidden = pl.Series(draws.random(ROWS) < 0.1)
    frame = pl.DataFrame(
        {
            "label": (draws.random(ROWS) < rate).astype(np.int64),
            "at": [time.strftime("%d/%m/%Y %H:%M") for time in at],
            "arrival": pl.Series([time.replace(tzinfo=timezone.utc) for time in arrival])
            .dt.convert_time_zone("Asia/Tokyo")
            .set(hidden, None),
            "born": pl.Series(draws.integers(-(10**12), 10**12, ROWS)).set(
                hidden.shift(1, fill_value=False), None
            ),
            "price": draws.gamma(2.0, 3.0, ROWS),
            "item": draws.integers(0, 30, ROWS),
        }
    )
    frame.write_parquet(path)
    return frame


def content(root: Path) -> dict[str, Any]:
    return {
        "name": "dates",
        "data": {
            "path": str(root / "data"),
            "source": {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": SCHEMA},
            "split": {"by": "time", "valid": "4d", "test": "4d"},
        },
        "model": {"kind": "ensemble", "members": 2, "embedding_dim": 3, "member_mlp": [4], "trees": 1000},
        "train": {"run": str(root / "run"), "epochs": 2, "report": False, "threads": 1},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dates")
    write_log(root / "log.parquet", 0)
    recipe = Recipe.from_dict(content(root))
    Trainer(recipe, prepare(recipe.data), named=leaves(content(root))).train()
    return root


def check_all_scores(root: Path, log: pl.DataFrame, exported: Path) -> None:
    """Compare scores of the raw log by `predict` with those of both runtimes of a scorer, for many
    and single rows.
    """
    with open_run(root / "run") as trained:
        export(trained, exported)
        log.write_parquet(root / "raw.parquet")
        predict_logs(
            RawLogs(trained, [str(root / "raw.parquet")]), root / "raw-scores.parquet", SilentProgress()
        )
    expected = pl.read_parquet(root / "raw-scores.parquet")["score"].to_numpy()
    assert len(np.unique(expected)) > ROWS / 2
    # Python objects are read without Polars if they are few.
    objects = log.with_columns(arrival=pl.col("arrival").dt.convert_time_zone("UTC")).to_dicts()
    for runtime in ("torch", "onnxruntime"):
        scorer = Scorer.open(exported, runtime=runtime)  # type: ignore[arg-type]
        np.testing.assert_allclose(scorer.score(log), expected, atol=1e-6)
        for row in range(0, ROWS, 97):
            one = {name: [objects[row][name]] for name in log.columns}
            np.testing.assert_allclose(scorer.score(one), expected[row], atol=1e-6)
        np.testing.assert_allclose(
            scorer.score(log[:50].to_dict(as_series=False)), expected[:50], atol=1e-6
        )


def test_scores_are_the_same_everywhere(root: Path) -> None:
    log = pl.read_parquet(root / "log.parquet")
    check_all_scores(root, log, root / "export")
    scores = []
    with open_run(root / "run") as trained:
        for split in ("train", "valid", "test"):
            predict(trained, split, root / "scores.parquet", SilentProgress())
            scores.append(pl.read_parquet(root / "scores.parquet"))
    prepared = pl.concat(scores).sort("row")["score"].to_numpy()
    np.testing.assert_allclose(Scorer.open(root / "export").score(log), prepared, atol=1e-6)


def test_a_continued_run_scores_the_same_everywhere(root: Path) -> None:
    later = write_log(root / "later.parquet", 40)
    assert main(["continue", "-q", str(root / "run"), str(root / "later.parquet")]) == 0
    check_all_scores(root, later, root / "continued")


def test_a_click_model_scores_as_its_export(root: Path, tmp_path: Path) -> None:
    log = pl.read_parquet(root / "log.parquet")
    model = ClickModel(content(root), train__epochs=1, model__trees=0).fit(
        log, label="label", valid=log[-90:]
    )
    positive = model.predict_proba(log.drop("label"))[:, 1]
    assert len(np.unique(positive)) > ROWS / 2
    scorer = Scorer.open(model.save(tmp_path / "model") / "export")
    np.testing.assert_allclose(positive, scorer.score(log), atol=1e-6)
    again = ClickModel.load(tmp_path / "model").predict_proba(log)[:, 1]
    np.testing.assert_allclose(positive, again, atol=1e-6)


def test_a_row_without_its_time_is_refused(root: Path) -> None:
    """A missing date of another column is a missing number."""
    log = pl.read_parquet(root / "log.parquet")
    if not (root / "export").exists():
        with open_run(root / "run") as trained:
            export(trained, root / "export")
    scorer, rows = Scorer.open(root / "export"), log[:3].to_dict(as_series=False)
    with refuses(DataError, "at"):
        scorer.score({name: column for name, column in rows.items() if name != "at"})
    with refuses(DataError, "at 2 nothing"):
        scorer.score(rows | {"at": [rows["at"][0], None, rows["at"][2]]})
    with refuses(DataError, "arrival"):
        scorer.score({name: column for name, column in rows.items() if name != "arrival"})
    with refuses(DataError, "item"):
        scorer.score({name: column for name, column in rows.items() if name != "item"})
    assert scorer.score(rows | {"arrival": [None] * 3}).shape == (3,)
