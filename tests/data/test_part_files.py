"""Logs in many part files: some without rows, some with other columns, in directories of directories."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stratarec.cli import main
from stratarec.data.dataset.dataset import Dataset
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
    # As Spark does, a part without rows is a compressed file of nothing.
    path.write_bytes(gzip.compress(frame.write_csv().encode() if frame.height else b""))


def write_typeless(frame: pl.DataFrame, path: Path) -> None:
    """As pandas does: the columns of a file without rows have other types, or are not there."""
    (frame if frame.height else pl.DataFrame(schema={"item": pl.Float64, "label": pl.Null})).write_parquet(path)


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
        (tmp_path / "parts" / f"dt={day}").mkdir(parents=True)
        WRITERS[kind](part, tmp_path / "parts" / f"dt={day}" / f"part-0.{kind}")
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
def test_columns_that_not_every_file_has_are_left_out(
    kind: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for day in range(3):
        part = log()[day * 400 : day * 400 + 400]
        part = part.with_columns(new=pl.lit("x")).drop("price") if day == odd else part
        WRITERS[kind](part, tmp_path / f"{day}.{kind}")
    files = [f"{day}.{kind}" for day in range(3)]
    assert main(["init", *files, "-o", "r.yaml"]) == 0
    said = capsys.readouterr().out
    for column, lacking in (("price", {odd}), ("new", {0, 1, 2} - {odd})):
        (line,) = [line for line in said.splitlines() if line.startswith(column)]
        assert "left out" in line
        assert any(line.endswith(f"{day}.{kind}") for day in lacking)
    schema = Recipe.load("r.yaml").data.source.schema
    assert [feature.name for feature in (*schema.dense, *schema.sparse)] == ["item"]
    assert main(["prepare", "-q", "r.yaml"]) == 0
