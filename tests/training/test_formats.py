"""Test that a run reads a later log in any format, independent of the format of its first log."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

from errors import check_refusal
from recipes import assert_same_model, tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.training.run import periods

FORMATS = ("csv", "semicolons", "parquet", "jsonl")


def log(day: int, rows: int) -> pl.DataFrame:
    """Draw users and items as integers, times, missing numbers and lists. Each format writes them
    differently.
    """
    draws = np.random.default_rng(day)
    item = draws.integers(0, 40, rows)
    seconds = np.sort(draws.integers(day * 86_400, (day + 1) * 86_400, rows)).tolist()
    return pl.DataFrame(
        {
            "click": (draws.random(rows) < 0.2 + 0.5 * (item % 2)).astype(int),
            "who": draws.integers(0, 30, rows),
            "at": [datetime(2026, 5, 1) + timedelta(seconds=each) for each in seconds],
            "item": item,
            "price": np.where(draws.random(rows) < 0.1, np.nan, draws.normal(5, 2, rows).round(2)),
            "words": [draws.choice(list("abcdef"), draws.integers(0, 4)).tolist() for _ in range(rows)],
            "seen": [draws.integers(0, 40, draws.integers(0, 4)).tolist() for _ in range(rows)],
        },
        nan_to_null=True,
    )


def as_text(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("words", "seen").cast(pl.List(pl.String)).list.join("|"))


def write(frame: pl.DataFrame, path: Path, form: str) -> str:
    """Write a log in a format and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(f".{form if form in ('parquet', 'jsonl') else 'csv'}")
    times = pl.col("at").dt.strftime("%Y-%m-%d %H:%M:%S")
    if form == "parquet":
        frame.write_parquet(path)
    elif form == "jsonl":
        frame.with_columns(times).write_ndjson(path)
    else:
        as_text(frame).with_columns(times).write_csv(path, separator=";" if form == "semicolons" else ",")
    return str(path)


@pytest.fixture(scope="module", params=["csv", "parquet"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp(request.param)
    content = tiny(root, max_steps=12, epochs=1)
    sparse = [
        {"name": "who"},
        {"name": "item"},
        {"name": "words", "kind": "multi", "separator": "|"},
        {"name": "seen", "kind": "multi", "separator": "|", "vocabulary": "item"},
        {"name": "before", "kind": "history", "of": "item", "max_length": 5},
    ]
    schema = {"label": "click", "user": "who", "time": "at", "dense": [{"name": "price"}], "sparse": sparse}
    path = write(log(0, 1500), root / "log", request.param)
    content["data"] |= {"source": {"kind": request.param, "paths": [path], "schema": schema}}
    (root / "r.yaml").write_text(yaml.safe_dump(content))
    for command in ("prepare", "train"):
        assert main([command, "-q", str(root / "r.yaml")]) == 0
    return root / "run"


def predict(run: Path, path: str, *options: str) -> np.ndarray:
    output = run.parent / "scores.parquet"
    assert main(["predict", "-q", str(run), path, "-o", str(output), *options]) == 0
    return pl.read_parquet(output)["score"].to_numpy()


def test_a_log_has_the_same_scores_in_every_format_and_as_a_frame(run: Path, tmp_path: Path) -> None:
    frame = log(1, 400)
    earlier = ["--history", write(log(0, 1500), tmp_path / "earlier", "jsonl")]
    paths = [write(frame, tmp_path / form / "log", form) for form in FORMATS]
    scores, with_history = (predict(run, paths[0], *options) for options in ([], earlier))
    assert np.unique(scores).size > 100
    assert not np.array_equal(scores, with_history)
    for path in paths[1:]:
        np.testing.assert_array_equal(predict(run, path), scores)
        np.testing.assert_array_equal(predict(run, path, *earlier), with_history)
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "export")]) == 0
    frame = frame.drop("click")  # a log without labels adds nothing to histories
    scores = predict(run, write(frame, tmp_path / "unlabelled", "parquet"))
    scorer, without = Scorer.open(tmp_path / "export"), pl.lit([], dtype=pl.List(pl.Int64)).alias("before")
    text = as_text(frame)
    for rows in (frame, text, text.cast({"item": pl.String, "who": pl.String}), frame[:5]):
        np.testing.assert_allclose(scorer.score(rows.with_columns(without)), scores[: len(rows)], rtol=2e-6)


def test_a_run_continued_with_the_same_rows_in_another_format_gives_the_same_model(
    run: Path, tmp_path: Path
) -> None:
    models = []
    for form in FORMATS:
        copy = Path(shutil.copytree(run, tmp_path / form))
        for day, other in ((1, form), (2, "csv")):
            later = write(log(day, 600), tmp_path / f"{form}-{day}" / "log", other)
            assert main(["continue", "-q", str(copy), later]) == 0
        models.append(periods.only_checkpoint(periods.of_number(copy, 2)))
    for model in models[1:]:
        assert_same_model(models[0], model)


@pytest.mark.parametrize(
    "change", [pl.col("at") + timedelta(milliseconds=250), pl.col("at").dt.epoch("ms")]
)
def test_times_finer_than_the_unit_of_the_run_are_refused(
    run: Path, tmp_path: Path, change: pl.Expr, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(log(1, 50).with_columns(change), tmp_path / "log", "parquet")
    assert main(["predict", "-q", str(run), path, "-o", str(tmp_path / "s.csv")]) == 2
    check_refusal("'at'", capsys.readouterr().err)
