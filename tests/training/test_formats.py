"""A run reads logs of any format: a file that it scores or continues with need not be written as its own log was."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from recipes import assert_same_model, tiny
from stratarec import Scorer
from stratarec.cli import main
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.user_history import Events
from stratarec.training.run import periods

FORMATS = ["csv", "semicolons", "no_header", "parquet", "jsonl"]
COLUMNS = ["click", "who", "at", "item", "price", "words", "seen"]


def log(day: int, rows: int = 1500) -> pl.DataFrame:
    """Numbers of users and items, times, and lists: each format writes them in its own way."""
    random = np.random.default_rng(day)
    item = random.integers(0, 40, rows)
    seconds = np.sort(random.integers(day * 86_400, (day + 1) * 86_400, rows)).tolist()
    return pl.DataFrame(
        {
            "click": (random.random(rows) < 0.2 + 0.5 * (item % 2)).astype(int),
            "who": random.integers(0, 30, rows),
            "at": [datetime(2026, 5, 1) + timedelta(seconds=each) for each in seconds],
            "item": item,
            "price": np.where(random.random(rows) < 0.1, np.nan, random.normal(5, 2, rows).round(2)),
            "words": [random.choice(list("abcdef"), random.integers(0, 4)).tolist() for _ in range(rows)],
            "seen": [random.integers(0, 40, random.integers(0, 4)).tolist() for _ in range(rows)],
        },
        nan_to_null=True,
    )


def write(frame: pl.DataFrame, folder: Path, form: str) -> Path:
    """Write a log as a file of a format."""
    folder.mkdir(parents=True, exist_ok=True)
    text = frame.with_columns(pl.col("words", "seen").cast(pl.List(pl.String)).list.join("|"))
    text = text.with_columns(pl.col("at").dt.strftime("%Y-%m-%d %H:%M:%S"))
    path = folder / f"log.{form if form in ('parquet', 'jsonl') else 'csv'}"
    match form:
        case "parquet":
            frame.write_parquet(path)
        case "jsonl":
            frame.with_columns(text["at"]).write_ndjson(path)
        case _:
            text.write_csv(path, separator=";" if form == "semicolons" else ",", include_header=form != "no_header")
    return path


def recipe(root: Path, form: str, path: Path) -> dict[str, Any]:
    content = tiny(root, max_steps=12, epochs=1)
    sparse = [
        {"name": "who"},
        {"name": "item"},
        {"name": "words", "kind": "multi", "separator": "|"},
        {"name": "seen", "kind": "multi", "separator": "|", "vocabulary": "item"},
        {"name": "before", "kind": "history", "of": "item", "max_length": 5},
    ]
    schema = {"label": "click", "user": "who", "time": "at", "dense": [{"name": "price"}], "sparse": sparse}
    source: dict[str, Any] = {"kind": "parquet" if form == "parquet" else "csv", "paths": [str(path)], "schema": schema}
    if form == "no_header":
        source["columns"] = COLUMNS
    if form == "semicolons":
        source["delimiter"] = ";"
    content["data"] |= {"source": source, "split": {"by": "fraction", "valid": 0.1, "test": 0.1}}
    return content


@pytest.fixture(scope="module", params=["csv", "no_header", "parquet"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp(request.param)
    content = recipe(root, request.param, write(log(0), root / "first", request.param))
    (root / "r.yaml").write_text(yaml.safe_dump(content))
    for command in ("prepare", "train"):
        assert main([command, "-q", str(root / "r.yaml")]) == 0
    (root / "form").write_text(request.param)
    return root / "run"


def readable(run: Path, form: str) -> bool:
    """Whether the columns of a file have names: those of a file without a header are in the recipe, or nowhere."""
    return form != "no_header" or (run.parent / "form").read_text() == "no_header"


def predict(run: Path, path: Path, *options: str) -> pl.DataFrame:
    output = run.parent / "scores.parquet"
    assert main(["predict", "-q", str(run), str(path), "-o", str(output), *options]) == 0
    return pl.read_parquet(output)


def test_a_log_has_the_same_scores_in_every_format(run: Path, tmp_path: Path) -> None:
    frame, scores = log(1, 400), []
    earlier = write(log(0), tmp_path / "earlier", "jsonl")
    for form in filter(lambda form: readable(run, form), FORMATS):
        path = write(frame, tmp_path / form, form)
        scores.append(predict(run, path)["score"].to_numpy())
        scores.append(predict(run, path, "--history", str(earlier), "--top", "500")["score"].to_numpy())
    for given, with_history in zip(scores[2::2], scores[3::2], strict=True):
        np.testing.assert_array_equal(given, scores[0])
        np.testing.assert_array_equal(with_history, scores[1])
    assert np.unique(scores[0]).size > 100
    assert not np.array_equal(np.sort(scores[0]), np.sort(scores[1]))


def test_a_frame_has_the_scores_of_the_log(run: Path, tmp_path: Path) -> None:
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "export")]) == 0
    frame = log(1, 400).drop("click")
    expected = predict(run, write(frame, tmp_path, "parquet"))["score"].to_numpy()
    scorer, nothing = Scorer.open(tmp_path / "export"), pl.lit([], dtype=pl.List(pl.Int64)).alias("before")
    text = frame.with_columns(pl.col("words", "seen").cast(pl.List(pl.String)).list.join("|"))
    for form in (frame, text, text.cast({"item": pl.String, "who": pl.String})):
        np.testing.assert_allclose(scorer.score(form.with_columns(nothing)), expected, rtol=2e-6)
    few = frame[:5].with_columns(nothing).to_dict(as_series=False)
    np.testing.assert_allclose(scorer.score(few), expected[:5], rtol=2e-6)


def test_a_run_continues_with_the_same_rows_in_another_format_to_the_same_model(run: Path, tmp_path: Path) -> None:
    models = []
    assert main(["export", "-q", str(run), "-o", str(tmp_path / "before")]) == 0
    for form in filter(lambda form: readable(run, form), FORMATS):
        copy = Path(shutil.copytree(run, tmp_path / form))
        # The second period begins with a recipe that the first one wrote.
        for day, other in ((1, form), (2, "csv")):
            assert main(["continue", "-q", str(copy), str(write(log(day), tmp_path / f"{form}-{day}", other))]) == 0
        # Types that another format names are no other schema.
        since = ["--since", str(tmp_path / "before")]
        assert main(["export", "-q", str(copy), "-o", str(copy / "after"), *since]) == 0
        models.append(periods.only_checkpoint(periods.of_number(copy, 2)))
    for model in models[1:]:
        assert_same_model(models[0], model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pl.col("at") + timedelta(milliseconds=250), "'at'"),
        (pl.col("at").dt.epoch("ms"), "'at'"),
    ],
)
def test_times_that_the_unit_of_the_run_loses_are_refused_with_advice_about_the_file(
    run: Path, tmp_path: Path, change: pl.Expr, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log(1, 50).with_columns(change).write_parquet(tmp_path / "log.parquet")
    assert main(["predict", "-q", str(run), str(tmp_path / "log.parquet"), "-o", str(tmp_path / "s.csv")]) == 2
    text = capsys.readouterr().err
    assert not missing(message, text)
    assert text.count("\n") == 1


def test_a_user_has_one_history_in_logs_of_integers_and_of_text() -> None:
    history = SparseFeature(name="before", kind="history", of="item", max_length=2)
    schema = Schema(label="label", user="who", time="at", sparse=(SparseFeature(name="item"), history))
    events = pl.DataFrame(
        {"label": [1, 1, 0, 1], "who": ["7", "7", "7", "8"], "at": [1, 2, 3, 4], "item": [5, 6, 7, 8]}
    )
    rows = pl.DataFrame({"who": [7, 8, 9], "at": [9, 9, 9]})
    assert Events([events], schema).histories(rows)["before"].to_list() == [[5, 6], [8], []]
