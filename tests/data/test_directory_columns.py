"""Test columns that directories such as ``day=2024-03-01`` give, as Spark and Hive write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import yaml

from stratarec.cli import main
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources import open_rows
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.sources.files import expand
from stratarec.errors import DataError

SCHEMA = Schema(
    label="click",
    time="day",
    dense=(DenseFeature(name="price"),),
    sparse=(
        SparseFeature(name="item"),
        SparseFeature(name="country"),
        SparseFeature(name="shop", type="integer"),
    ),
)
PARTS = [("2024-03-01", "fr", 7), ("2024-03-02", "a/b=c", 30), ("2024-03-03", None, 7)]
FORMATS: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "csv": pl.DataFrame.write_csv,
    "jsonl": pl.DataFrame.write_ndjson,
    "parquet": pl.DataFrame.write_parquet,
    "arrow": pl.DataFrame.write_ipc,
}


def part(number: int, rows: int = 40) -> pl.DataFrame:
    """Return the columns that are in the files."""
    ids = pl.Series(range(number, number + rows))
    columns = {"click": ids % 2, "price": ids / 4, "item": "i" + (ids * 7 % 11).cast(pl.String)}
    return pl.DataFrame(columns)


def folder_of(day: str | None, country: str | None, shop: int) -> str:
    country = "__HIVE_DEFAULT_PARTITION__" if country is None else country.replace("/", "%2F")
    return f"day={day}/country={country}/shop={shop}"


def write(root: Path, suffix: str) -> Path:
    """Write a log whose directories have three columns."""
    for number, values in enumerate(PARTS):
        folder = root / "log" / folder_of(*values)
        folder.mkdir(parents=True)
        FORMATS[suffix](part(number), folder / f"part.{suffix}")
    return root / "log"


def frame_of(log: Path) -> pl.DataFrame:
    config = CsvConfig(paths=(str(log),), schema=SCHEMA)
    return pl.concat([chunk.frame for chunk in open_rows(config, None).chunks(log)])


@pytest.mark.parametrize("suffix", FORMATS)
def test_values_of_directories_equal_values_in_files(tmp_path: Path, suffix: str) -> None:
    log, flat = write(tmp_path, suffix), tmp_path / "flat"
    flat.mkdir()
    for number, (day, country, shop) in enumerate(PARTS):
        given = {"day": pl.lit(day), "country": pl.lit(country, pl.String), "shop": pl.lit(shop)}
        FORMATS[suffix](part(number).with_columns(**given), flat / f"{number}.{suffix}")
    assert frame_of(log).equals(frame_of(flat))
    assert frame_of(log)["country"].null_count() == 40


def test_a_column_of_the_file_wins(tmp_path: Path) -> None:
    log = write(tmp_path, "csv")
    path = log / folder_of(*PARTS[0]) / "part.csv"
    part(0).with_columns(country=pl.lit("es")).write_csv(path)
    assert set(frame_of(log)["country"]) == {"es", "a/b=c", None}


def test_a_file_outside_the_directories_is_named(tmp_path: Path) -> None:
    log = write(tmp_path, "csv")
    part(0).write_csv(log / "stray.csv")
    with pytest.raises(DataError, match=r"stray\.csv.*(country|day)"):
        frame_of(log)


def test_a_directory_that_cannot_be_read_is_named_with_the_row(tmp_path: Path) -> None:
    log = write(tmp_path, "parquet")
    (log / folder_of(*PARTS[0])).rename(log / "day=2024-03-01" / "country=fr" / "shop=x")
    with pytest.raises(DataError, match=r"shop=x.*row 1.*'shop'|shop=x.*'shop'"):
        frame_of(log)


def test_values_are_part_of_the_content(tmp_path: Path) -> None:
    log = write(tmp_path, "csv")
    config = CsvConfig(paths=(str(log),), schema=SCHEMA)
    before = open_rows(config, None).fingerprint()
    moved = log.rename(log.with_name("month=3"))
    config = CsvConfig(paths=(str(moved),), schema=SCHEMA)
    assert open_rows(config, None).fingerprint() == before
    (moved / "day=2024-03-01").rename(moved / "day=2024-03-09")
    assert open_rows(config, None).fingerprint() != before


@pytest.mark.parametrize(
    ("folder", "columns"),
    [
        ("a=1/b=x%20y", {"a": "1", "b": "x y"}),
        ("a=", {"a": None}),
        ("=1/plain", {}),
        ("^x$=1/%5Ex$=2", {}),
        ("a=1/a=2", {"a": "2"}),
        (
            "year=2024/month=3/day=__HIVE_DEFAULT_PARTITION__",
            {"year": "2024", "month": "3", "day": None, "year-month-day": None},
        ),
        (
            "year=2024/month=3/day=05",
            {"year": "2024", "month": "3", "day": "05", "year-month-day": "2024-03-05"},
        ),
    ],
)
def test_names_and_values(tmp_path: Path, folder: str, columns: dict[str, str | None]) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "log.csv").write_text("x\n1\n")
    (file,) = expand((str(tmp_path / folder),))
    assert file.directory_columns(()) == columns
    assert file.directory_columns(columns) == {}


def test_a_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """JSON files cannot contain it."""
    (tmp_path / "a=\udcff").mkdir()
    (tmp_path / "a=\udcff/log.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"a=\\xff/log\.csv'.*not UTF-8; rename it"):
        expand((str(tmp_path),))


def clicks(day: int) -> pl.DataFrame:
    rows = pl.Series(range(day, day + 200))
    users = "u" + (rows * 31 % 50).cast(pl.String)
    return pl.DataFrame({"user_id": users, "item_id": rows * 17 % 40, "click": rows * rows % 5 % 2})


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("parts", [False, True])
def test_init_splits_by_the_day_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, parts: bool
) -> None:
    """The first directory is above all files: it is no column."""
    monkeypatch.chdir(tmp_path)
    for day in range(1, 11):
        name = f"year=2024/month=03/day={day:02}" if parts else f"dt=2024-03-{day:02}"
        folder = tmp_path / "run=3" / "log" / name
        folder.mkdir(parents=True)
        FORMATS[suffix](clicks(day), folder / f"part.{suffix}")
    assert main(["init", "run=3/log", "-o", "log.yaml"]) == 0
    drafted = yaml.safe_load(Path("log.yaml").read_text())["data"]
    schema = drafted["source"]["schema"]
    assert (schema["time"], drafted["split"]["by"]) == ("year-month-day" if parts else "dt", "time")
    used = {feature["name"] for role in ("dense", "sparse") for feature in schema.get(role, ())}
    assert not used & {"run", "year", "month", "day", "dt"}
    assert main(["prepare", "-q", "log.yaml"]) == 0
