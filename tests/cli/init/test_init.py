"""Test `stratarec init`: it drafts a valid recipe with reasons, reports what it cannot guess, and
overwrites nothing.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import check_refusal
from stratarec.cli import main
from stratarec.cli.init import sample as sample_module
from stratarec.cli.init.draft import draft
from stratarec.cli.init.guess import guess
from stratarec.cli.init.sample import read_sample
from stratarec.cli.init_command import shipped_names
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import LabelRule
from stratarec.recipe import Recipe

ROWS = 3000


def log(rows: int = ROWS) -> pl.DataFrame:
    random = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "row": np.arange(rows),
            "is_click": random.integers(0, 2, rows),
            "customer_id": [f"c{value}" for value in random.integers(0, 200, rows)],
            "visit": np.sort(random.integers(10**9, 10**9 + 900, rows)),
            "created_at": 1_577_836_800 + np.sort(random.integers(0, 30 * 86_400, rows)),
            "product": random.integers(0, 400, rows),
            "price": np.round(random.normal(50, 10, rows), 2),
            "age": random.integers(18, 80, rows),
            "weekday": random.choice(["mon", "tue", "wed"], rows),
            "tags": [
                "|".join(sorted(random.choice(list("abcdefg"), 3, replace=False))) for _ in range(rows)
            ],
            "comment": [f"{'so good ' * 9}{value}" for value in range(rows)],
            "store": ["main"] * rows,
        }
    )


def roles(path: Path, **options: str) -> dict[str, str]:
    return {each.name: each.role for each in guess(read_sample((str(path),)), **options).columns}


EXPECTED = {
    "row": "ignored", "is_click": "label", "customer_id": "user", "visit": "session", "created_at": "time",
    "product": "sparse", "price": "dense", "age": "dense", "weekday": "sparse", "tags": "list", "comment": "ignored",
    "store": "ignored",
}  # fmt: skip


def test_a_number_whose_values_predict_more_than_its_order_is_an_id(tmp_path: Path) -> None:
    draws = np.random.default_rng(3)
    student, age = draws.integers(1, 101, ROWS), draws.integers(18, 98, ROWS)
    taste = draws.normal(0, 1.5, 101)[student] + (age - 58) / 20
    frame = pl.DataFrame(
        {
            "good": (draws.random(ROWS) < 1 / (1 + np.exp(-taste))).astype(int),
            "student": student,
            "age": age,
        }
    )
    result = roles(write(frame, tmp_path / "log.csv"), label="good")
    assert result == {"good": "label", "student": "sparse", "age": "dense"}
    # Random labels say nothing about either.
    frame = frame.with_columns(pl.col("good").shuffle(seed=1))
    assert roles(write(frame, tmp_path / "log.csv"), label="good") == {**result, "student": "dense"}


def write(frame: pl.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    elif path.suffix == ".jsonl":
        frame.write_ndjson(path)
    elif path.name == "semicolons.csv":
        frame.write_csv(path, separator=";")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(frame.write_csv(separator="\t").encode()))
    else:
        frame.write_csv(path)
    return path


@pytest.mark.parametrize("name", ["log.csv", "semicolons.csv", "log.tsv.gz", "log.jsonl", "log.parquet"])
def test_a_draft_is_a_recipe_that_prepares(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(log(), tmp_path / name)
    assert roles(path) == EXPECTED
    assert main(["init", name, "-o", "mine.yaml"]) == 0
    recipe = Recipe.load("mine.yaml")
    schema = recipe.data.source.schema  # type: ignore[union-attr]
    assert (schema.label, schema.user, schema.session, schema.time) == (
        "is_click",
        "customer_id",
        "visit",
        "created_at",
    )
    # Users and products have too few positive rows.
    assert schema.histories == ()
    assert "product_history: a history of the user; " in Path("mine.yaml").read_text()
    assert (recipe.data.split.by, recipe.data.split.test) == ("time", "3d")
    dataset = prepare(recipe.data)
    assert sum(dataset.samples(split) for split in dataset.splits) == ROWS
    assert dataset.about.bad_rows == 0


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_list_of_earlier_items_is_a_sequence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(1)
    last = [draws.integers(0, 400, draws.integers(0, 6)).tolist() for _ in range(ROWS)]
    texts = ["|".join(map(str, items)) for items in last]
    more = {
        "last_products": last if name != "log.csv" else texts,
        "last_words": [["x", "y"][: row % 3] for row in range(ROWS)],
    }
    frame = log().with_columns(pl.Series("last_products", more["last_products"]))
    if name != "log.csv":
        frame = frame.with_columns(pl.Series("last_words", more["last_words"], dtype=pl.List(pl.String)))
    write(frame, tmp_path / name)
    assert main(["init", name, "-o", "mine.yaml"]) == 0
    recipe = Recipe.load("mine.yaml")
    features = {each.name: each for each in recipe.data.source.schema.sparse}  # type: ignore[union-attr]
    result = features["last_products"]
    assert (result.kind, result.of, result.vocabulary) == ("sequence", "product", "product")
    assert "last_words" not in features or features["last_words"].kind == "multi"
    dataset = prepare(recipe.data)
    assert dataset.about.bad_rows == 0
    assert dataset.samples("train")


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("rating", [1, 2, 3, 4, 5], LabelRule(column="rating", at_least=4)),
        ("stars", [0.5, 1.0, 4.5, 5.0], LabelRule(column="stars", at_least=4.5)),
        ("bought", [True, False], "bought"),
        ("odd", [0, 1], "odd"),
        ("click", [-1, 1], LabelRule(column="click", at_least=1)),
    ],
)
def test_labels_are_detected(column: str, values: list[Any], expected: object, tmp_path: Path) -> None:
    frame = pl.DataFrame({"item": (list(range(7)) * 15)[:100], column: (values * 100)[:100]})
    assert guess(read_sample((str(write(frame, tmp_path / "log.csv")),))).label == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--recipe avazu_x1 criteo_x1 criteo_x4"),
        (["--recipe", "dmeo"], "--recipe dmeo"),
        (["none.csv"], "none.csv"),
        (["clicks.csv"], "label column"),
        (["ones-clicked.csv"], "label click"),
        (["array.json"], "array.json line 1 JSON"),
        (["flags.csv"], "label columns"),
        (["log.csv", "--label", "clik"], "--label clik is_click"),
        (["log.csv", "--label", "weekday"], "--label weekday"),
        (["log.csv", "--label", "weekday=fri"], "--label weekday=fri"),
        (["ones.csv", "--label", "c=5"], "--label c=5 Int64"),
        (["infinite.csv", "--label", "a"], "--label 'a'"),
        (["twice.csv"], "twice.csv 2 'a'"),
        (["colons.dat"], "colons.dat '::'"),
        (["ones.csv", "clicks.csv"], "clicks.csv ones.csv"),
        (["flags.csv", "ones.csv", "--label", "b"], "--label 'b'"),
        (["log.csv", "log.parquet"], "log.parquet Parquet log.csv"),
        (["ones.csv", "--label", "a"], "--label 'a'"),
        (["picture.png"], "picture.png line 3 byte 1 UTF-8"),
        (["bare.csv"], "label"),
        (["there.yaml", "-o", "new.yaml"], "there.yaml YAML"),
        (["cut.jsonl"], "cut.jsonl line 2 JSON"),
        (["mixed.jsonl"], "mixed.jsonl line 2 'a'"),
        (["lists.parquet", "numbers.parquet"], "'a' lists.parquet Int64"),
        (["head.csv"], "head.csv"),
        (["log.csv", "-o", "there.yaml"], "there.yaml --output"),
    ],
)
def test_a_log_that_cannot_be_drafted_is_one_line_and_nothing_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    log().write_csv("log.csv")
    Path("clicks.csv").write_text("user,item\n1,2\n2,3\n")
    Path("ones-clicked.csv").write_text("user,click\n1,1\n2,1\n")
    Path("array.json").write_text('[{"a": 1, "click": 0},\n {"a": 2, "click": 1}]\n')
    Path("flags.csv").write_text("a,b,c\n1,0,5\n0,1,6\n")
    Path("bare.csv").write_text("label,day\n0,x\n1,x\n")
    Path("ones.csv").write_text("a,c\n1,5\n1,6\n")
    Path("picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    Path("infinite.csv").write_text("a,c\n1,5\n-inf,6\n0,5\n")
    Path("twice.csv").write_text("a,b,a\n1,5,2\n0,6,2\n")
    Path("colons.dat").write_text("1::1193::5::978300760\n1::661::3::978302109\n")
    Path("cut.jsonl").write_text('{"a": 1, "click": 0}\n{"a": 2, "click": 1\n')
    Path("mixed.jsonl").write_text('{"a": 1, "click": 0}\n{"a": [2], "click": 1}\n')
    pl.DataFrame({"a": [[1]], "click": [0]}).write_parquet("lists.parquet")
    pl.DataFrame({"a": [1], "click": [0]}).write_parquet("numbers.parquet")
    log().write_parquet("log.parquet")
    Path("head.csv").write_text("label,item\n")
    Path("there.yaml").write_text("mine\n")
    before = sorted(tmp_path.iterdir())
    assert main(["init", *arguments]) == 2
    errors = capsys.readouterr().err
    check_refusal(message, errors)
    assert errors.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert Path("there.yaml").read_text() == "mine\n"


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_recipes_are_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--recipe", name]) == 0
    assert Recipe.load(f"{name}.yaml").name == name
    assert main(["init", "--recipe", name, "-o", f"more/{name}.yaml"]) == 0


def days(directory: Path, form: str) -> tuple[str, int]:
    """Write a log with a file for each of ten days; return the directory and the number of rows."""
    directory.mkdir()
    draws, ids = np.random.default_rng(0), iter(range(10_000))
    for day in range(10):
        rows = 80 + 10 * day
        frame = pl.DataFrame(
            {
                "event": [f"e{next(ids):05d}" for _ in range(rows)],
                "ts": np.sort(draws.integers(0, 86_400, rows)) + 1_700_006_400 + 86_400 * day,
                "item": draws.integers(0, 9, rows),
                "click": draws.integers(0, 2, rows),
            }
        )
        frame = frame.select(sorted(frame.columns, reverse=bool(day % 2)))
        path = directory / f"day={day}{form}"
        if form == ".csv.gz":
            path.write_bytes(gzip.compress(frame.write_csv().encode()))
        else:
            {".csv": frame.write_csv, ".jsonl": frame.write_ndjson, ".parquet": frame.write_parquet}[form](
                path
            )
    return str(directory), next(ids)


FORMS = (".csv", ".csv.gz", ".jsonl", ".parquet")


@pytest.mark.parametrize("form", FORMS)
def test_a_small_log_of_many_files_is_read_as_a_whole(form: str, tmp_path: Path) -> None:
    path, rows = days(tmp_path / "log", form)
    sample = read_sample((path,))
    assert sample.is_complete
    assert sample.frame["event"].n_unique() == len(sample.frame) == rows
    text = draft((path,), tmp_path / "log.yaml")[0].read_text()
    assert yaml.safe_load(text)["data"]["split"] == {"by": "time", "valid": "16h", "test": "19h"}


@pytest.mark.parametrize("head", [1 << 12, 1 << 13, 24_000])
@pytest.mark.parametrize("form", FORMS)
def test_a_sample_shows_the_end_of_a_log_and_has_no_row_twice(
    form: str, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_module, "_HEAD_BYTES", head)
    monkeypatch.setattr(sample_module, "_TAIL_BYTES", 1 << 12)
    monkeypatch.setattr(sample_module, "_ROWS", head // 16)
    path, rows = days(tmp_path / "log", form)
    frame = read_sample((path,)).frame
    assert frame["event"].n_unique() == len(frame) < rows or head > 1 << 13
    assert int(frame["ts"].max()) // 86_400 - int(frame["ts"].min()) // 86_400 == 9  # type: ignore[arg-type, operator]
