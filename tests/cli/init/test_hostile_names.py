"""Test drafts of logs with hostile names and values: none adds a field, a line, or a word of a
command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import missing
from stratarec.cli import main
from stratarec.cli.init.draft import content_of
from stratarec.io.names import visible
from stratarec.recipe import Recipe

OWN = ("clicked", "user_id", "item")
FIELDS = {
    "": {"name", "data", "model", "train", "memory"},
    "data": {"path", "source", "split", "vocabulary", "on_bad_row"},
    "source": {"kind", "paths", "delimiter", "columns", "nulls", "format", "schema"},
    "schema": {"label", "time", "time_unit", "time_format", "user", "session", "dense", "sparse"},
    "feature": {"name", "kind", "max_length", "separator", "type", "of", "decimal"},
}
HOSTILE = (
    "x\nshard_samples: 7 #", "Price\n(EUR)", "a\u2028b", "0?", "^a$", "user\nid", "(column 1)", "--option", "../..",
    "'\"", "{{ 7*7 }}", "#", "a: b", "pa\u202eth", "x" * 195, "!!python/object:x", "12:30", "yes", "&a", "é" * 200, "*",
    "@label", "a\x1b[31m", "[", "x\x85groups: 1",
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=6)), max_size=4).map("".join)
NAMES = st.one_of(TEXTS, TEXTS.map("{}\0".format), TEXTS.map(lambda text: text * 70), st.text(max_size=250))


def log(names: list[str], value: str) -> pl.DataFrame:
    """Write a log with columns of these names. Every other column has texts that begin with
    `value`.
    """
    rows = range(400)
    columns: dict[str, list[Any]] = {
        name: [f"{value}{row * 7 % 5}" if place % 2 else row * 7 % 9 / 2 for row in rows]
        for place, name in enumerate(names)
    }
    own = [
        [row * 13 % 7 // 4 for row in rows],
        [row % 80 for row in rows],
        [f"i{row % 30}" for row in rows],
    ]
    return pl.DataFrame({**columns, **dict(zip(OWN, own, strict=True))})


def write(frame: pl.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.write_csv(path)
    else:
        frame.write_parquet(path)
    return path


def features_of(text: str) -> set[str]:
    """Return the features of a draft and check that it has only fields that `init` writes."""
    assert all(visible(line) == line for line in text.split("\n"))
    content = yaml.safe_load(text)
    data = content["data"]
    schema = data["source"]["schema"]
    features = [*schema.get("dense", ()), *schema.get("sparse", ())]
    sections = [("", content), ("data", data), ("source", data["source"]), ("schema", schema)]
    for where, section in (*sections, *(("feature", each) for each in features)):
        assert set(section) <= FIELDS[where]
    assert schema["label"] == "clicked"
    return {each["name"] for each in features}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("value", ["v", "v\n  path: x  #"])
def test_hostile_names_stay_names(kind: str, value: str, tmp_path: Path) -> None:
    frame = log([*HOSTILE, "constant\nkeep_rows: true #"], value)
    frame = frame.with_columns(pl.lit("v").alias(frame.columns[len(HOSTILE)]))
    path = write(frame, tmp_path / f"log.{kind}")
    assert main(["init", str(path), "-o", str(tmp_path / "draft.yaml")]) == 0
    features = features_of((tmp_path / "draft.yaml").read_text())
    ordinary = {
        name for name in HOSTILE if len(name.encode()) <= 200 and not set(name) & set("\n\x1b\x85^@")
    }
    assert features - set(OWN) == ordinary


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    value=TEXTS,
    kind=st.sampled_from(["csv", "pq"]),
)
def test_any_log_gives_a_draft_or_one_error(
    names: list[str], value: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    frame = log([name for name in names if name not in OWN], value)
    path = write(frame, folder / f"log.{'csv' if kind == 'csv' else 'parquet'}")
    draft = folder / "draft.yaml"
    code = main(["init", str(path), "-o", str(draft)])
    assert code == 0 or (
        code == 2 and kind == "csv" and not draft.exists()
    )  # a CSV header may not be recognized as one
    if code == 0:
        known = {name.strip() if kind == "csv" else name for name in frame.columns}
        assert features_of(draft.read_text()) <= {*known, *(f"{name}_history" for name in known)}
        assert Recipe.load(draft).name == "log"


@pytest.mark.parametrize("value", ["v", "v|w", "2017-01-02 00:00:00", "[1, 2]"])
@pytest.mark.parametrize("name", ["", "^item_code$", "à\0", "\0"])
def test_a_parquet_column_without_a_usable_name_is_left_out(name: str, value: str, tmp_path: Path) -> None:
    path = write(log(["(column 1)", name], value), tmp_path / "log.parquet")
    schema = content_of((str(path),))["data"]["source"]["schema"]
    assert [each["name"] for key in ("dense", "sparse") for each in schema.get(key, ())] == [
        "(column 1)",
        "item",
        "user_id",
    ]


def test_two_parquet_columns_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = log([], "v").to_arrow()
    pq.write_table(table.append_column("item", table["item"]), tmp_path / "log.parquet")
    assert main(["init", str(tmp_path / "log.parquet")]) == 2
    assert not missing("2 item", capsys.readouterr().err)
