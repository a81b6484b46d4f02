"""Test that the files of a log are named, listed and opened as the recipe says."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from errors import refuses
from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.sources.files import expand
from stratarec.errors import DataError
from stratarec.recipe import Recipe

ROWS = 1200


def log() -> pl.DataFrame:
    draws = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "item": [f"i{value}" for value in draws.integers(0, 50, ROWS)],
            "price": draws.normal(size=ROWS),
            "label": draws.integers(0, 2, ROWS),
        }
    )


def write_csv(frame: pl.DataFrame, path: Path) -> None:
    path.write_text(frame.write_csv())


def write_gzip(frame: pl.DataFrame, path: Path) -> None:
    # Like Spark, write a part without rows as a compressed empty file.
    path.write_bytes(gzip.compress(frame.write_csv().encode() if frame.height else b""))


def write_typeless(frame: pl.DataFrame, path: Path) -> None:
    """Write a file as pandas does: if it has no rows, its columns have other types or are
    missing.
    """
    (frame if frame.height else pl.DataFrame(schema={"item": pl.Float64, "label": pl.Null})).write_parquet(
        path
    )


WRITERS: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "csv": write_csv,
    "csv.gz": write_gzip,
    "jsonl": pl.DataFrame.write_ndjson,
    "parquet": write_typeless,
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_part_files_without_rows_change_nothing(
    kind: str, empty: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [log()[: ROWS // 2], log()[ROWS // 2 :]]
    parts.insert(empty, log()[:0])
    for day, part in enumerate(parts):
        (tmp_path / "parts" / f"day-{day}").mkdir(parents=True)
        WRITERS[kind](part, tmp_path / "parts" / f"day-{day}" / f"part-0.{kind}")
    (tmp_path / "parts" / "_SUCCESS").write_text("")
    assert main(["init", "parts"]) == 0
    assert {feature.name for feature in Recipe.load("parts.yaml").data.source.schema.sparse} == {"item"}
    assert main(["prepare", "-q", "parts.yaml"]) == 0
    dataset = Dataset.open("data/parts")
    assert sum(dataset.samples(split) for split in dataset.splits) == ROWS
    positives = sum(dataset.label_counts(split)["label"].positives for split in dataset.splits)
    assert positives == log()["label"].sum()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_columns_missing_in_some_files_are_left_out(
    kind: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for day in range(3):
        part = log()[day * 400 : day * 400 + 400]
        part = part.with_columns(new=pl.lit("x")).drop("price") if day == odd else part
        WRITERS[kind](part, tmp_path / f"{day}.{kind}")
    files = [f"{day}.{kind}" for day in range(3)]
    assert main(["init", *files, "-o", "r.yaml"]) == 0
    output = capsys.readouterr().out
    for column, lacking in (("price", {odd}), ("new", {0, 1, 2} - {odd})):
        (line,) = [line for line in output.splitlines() if line.startswith(column)]
        assert "ignored" in line
        assert any(line.endswith(f"{day}.{kind}") for day in lacking)
    schema = Recipe.load("r.yaml").data.source.schema
    assert [feature.name for feature in (*schema.dense, *schema.sparse)] == ["item"]
    assert main(["prepare", "-q", "r.yaml"]) == 0


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two files and another name of the first, and make their folder the working
    directory.
    """
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "a.tsv")
    os.link(tmp_path / "a.tsv", tmp_path / "hard")
    (tmp_path / "folder").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("first", ["a.tsv", "*.tsv"])
@pytest.mark.parametrize(
    "again", ["a.tsv", "./a.tsv", "folder/a.tsv", "link", "hard", "[a].tsv", "?.tsv", "file://{}"]
)
def test_a_file_named_twice_is_refused(logs: Path, first: str, again: str) -> None:
    with refuses(DataError, "named twice") as caught:
        expand((first, again.format(logs / "a.tsv")))
    assert str(logs / "a.tsv") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["[ab].tsv", "zip::a"])
def test_a_file_name_with_special_characters_is_that_file(logs: Path, name: str) -> None:
    (logs / name).write_text("c")
    (path,) = expand((str(logs / name),))
    with path.open() as file:
        assert (path.path, file.read()) == (str(logs / name), b"c")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://bucket/*.gz", "foo://bucket/*.gz s3://"),
        ("none.parquet", "none.parquet no such file"),
        ("none-*.parquet", "file"),
        ("ftp://127.0.0.1:9/log", "file://"),
        ("a\0b", r"a\x00b"),
        ("data:text/plain,hi", "data:text/plain,hi"),
        ("memory://a.tsv", "protocol memory"),
        ("simplecache::s3://bucket/log.gz", "file"),
        ("reference://log::file://none", "file"),
        ("zip://a.tsv::none.zip", "file:// http:// s3:// hf://"),
        ("", "'' empty name"),
    ],
)
def test_an_unreadable_path_is_a_one_line_error(url: str, message: str) -> None:
    with refuses(DataError, message) as caught:
        expand((url,))
    assert "\n" not in str(caught.value)


def test_templates_of_a_reference_file_never_run(logs: Path) -> None:
    run = "{{ cycler.__init__.__globals__.os.system('touch owned') }}"
    content = {
        "version": 1,
        "gen": [{"key": run, "url": "x", "dimensions": {"i": [0]}}],
        "refs": {"log": "a,b"},
    }
    (logs / "made.json").write_text(json.dumps(content))
    with refuses(DataError, "file"):
        expand((f"reference://log::{logs}/made.json",))
    assert not (logs / "owned").exists()


def test_a_directory_means_all_files_in_it(tmp_path: Path) -> None:
    root = tmp_path / "_log" / ".x"
    for name in (
        "dt=2/part-0",
        "dt=1/part-0",
        "dt=1/_SUCCESS",
        ".part-0.crc",
        "_delta_log/0.json",
        "dt=3/empty",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name in ("dt=1/_SUCCESS", "dt=3/empty") else "x")
    (root / "dt=1" / "up").symlink_to(root)
    (root / "dt=4").symlink_to(root / "_delta_log" / "0.json")
    expected = [str(root / name) for name in ("dt=1/part-0", "dt=2/part-0", "dt=4")]
    for pattern in (str(root), f"{root}/", f"file://{root}", f"{root}/dt=*"):
        assert [file.path for file in expand((pattern,))] == expected, pattern
    (tmp_path / "empty").mkdir()
    for pattern, message in (("empty", "no file matches"), ("_log/.x/dt=3", "the file is empty")):
        with pytest.raises(DataError, match=message):
            expand((str(tmp_path / pattern),))
