"""Test that `init` finds the encoding of a log, and that the draft reads the log in it."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

from errors import missing
from stratarec.cli import main
from stratarec.cli.init.draft import content_of
from stratarec.data.prepare.prepare import prepare
from stratarec.recipe import Recipe

NAMES = ("Straße", "Größe")


def text(rows: int = 300, mark: str = "€") -> str:
    lines = [f"user_id;{NAMES[0]};{NAMES[1]};{mark};clicked"]
    lines += [
        f"{row % 50};{'München' if row % 3 else 'Köln'};{row % 7},5;{row % 5};{row % 2}"
        for row in range(rows)
    ]
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        ("cp1252", "€"),
        ("latin-1", "\x81"),
        ("utf-16", "€"),
        ("utf-16-le", "€"),
        ("utf-16-be", "€"),
        ("utf-8-sig", "€"),
    ],
)
def test_a_log_in_another_encoding_is_drafted_and_prepared(
    encoding: str, mark: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"log.{suffix}"
    content = text(mark=mark).encode(encoding)
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    source = content_of((str(path),))["data"]["source"]
    assert source.get("encoding", "utf-8-sig") == encoding
    assert {each["name"] for key in ("dense", "sparse") for each in source["schema"][key]} >= set(NAMES)
    assert main(["init", "-q", str(path), "-o", str(tmp_path / "draft.yaml")]) == 0
    assert ("read as" in capsys.readouterr().out) == (encoding != "utf-8-sig")
    dataset = prepare(
        Recipe.load(tmp_path / "draft.yaml").with_fields({"data.path": str(tmp_path / "data")}).data
    )
    values = {
        value
        for file in (dataset.path / "vocabulary").glob("*.parquet")
        for value in pl.read_parquet(file)["value"].cast(pl.String)
    }
    assert values >= {"München", "Köln"}


def test_the_encoding_is_that_of_the_first_file_with_other_letters_than_ascii(tmp_path: Path) -> None:
    for day, city in enumerate(("Bonn", "Köln", "Bonn")):
        rows = [f"{row % 50};{city};{row % 7};{row % 2}" for row in range(300)]
        (tmp_path / f"{day}.csv").write_bytes(
            "\n".join(["user_id;city;n;clicked", *rows, ""]).encode("cp1252")
        )
    assert content_of((str(tmp_path),))["data"]["source"]["encoding"] == "cp1252"


@pytest.mark.parametrize(
    ("encoding", "city"), [("cp1251", "Москва"), ("gbk", "北京市"), ("cp1253", "Αθήνα")]
)
def test_other_alphabets_are_not_guessed(
    encoding: str, city: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{row % 50};{city};{row % 7};{row % 2}" for row in range(300)]
    path.write_bytes("\n".join(["user_id;city;n;clicked", *rows, ""]).encode(encoding))
    assert main(["init", str(path), "-o", str(tmp_path / "draft.yaml")]) == 2
    assert not missing("log.csv line 2 data.source.encoding", capsys.readouterr().err)


def test_damaged_utf8_is_no_other_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    lines = text().encode().split(b"\n")
    lines[7] = lines[7].replace("ö".encode(), b"\xf6").replace("ü".encode(), b"\xfc")
    path.write_bytes(b"\n".join(lines))
    assert main(["init", str(path), "-o", str(tmp_path / "draft.yaml")]) == 2
    assert not missing("log.csv line 8 UTF-8 latin-1 iconv", capsys.readouterr().err)
    assert not (tmp_path / "draft.yaml").exists()
