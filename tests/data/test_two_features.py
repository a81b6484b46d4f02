"""Test columns that are both a number and a category: `DenseFeature.column`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fuzzing.seals import seal

from errors import refuses
from stratarec.cli.init.draft import content_of
from stratarec.data.columns.frames import read_frame
from stratarec.data.dataset.manifest import MANIFEST
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DateColumn, DenseFeature, Schema, SparseFeature
from stratarec.data.sources import open_rows
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError, DataError, DatasetError
from stratarec.recipe import Recipe

SCHEMA = Schema(
    label="label",
    dense=(DenseFeature(name="shop.number", column="shop"), DenseFeature(name="price")),
    sparse=(SparseFeature(name="shop", type="integer"),),
)
SHOPS, PRICES = [7, None, -3, 1 << 40], [0.5, 2.0, None, 1.0]
LOG = pl.DataFrame({"shop": SHOPS, "price": PRICES, "label": [0, 1, 0, 1]})


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_both_features_are_read_from_every_format(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"log.{kind}"
    config: Any = ParquetConfig if kind == "parquet" else CsvConfig
    {"csv": LOG.write_csv, "jsonl": LOG.write_ndjson, "parquet": LOG.write_parquet}[kind](path)  # type: ignore[operator]
    chunks = open_rows(config(paths=(str(path),), schema=SCHEMA), "error").chunks(tmp_path)
    frame = pl.concat([chunk.frame for chunk in chunks])
    assert frame["shop"].to_list() == SHOPS
    assert frame["shop.number"].to_list() == SHOPS
    assert frame["shop.number"].dtype == pl.Float64


def test_a_value_that_is_no_number_names_the_column_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("shop,price,label\n7,1,0\nseven,1,1\n")
    source = open_rows(CsvConfig(paths=(str(tmp_path / "log.csv"),), schema=SCHEMA), "error")
    with refuses(DataError, "log.csv line 3 'shop' 'seven'"):
        list(source.chunks(tmp_path))


def test_the_column_is_needed_once() -> None:
    assert SCHEMA.scored_columns == ("shop", "price")
    columns = read_frame({"shop": [3], "price": [1]}, SCHEMA)
    assert (columns["shop.number"].to_list(), columns["shop"].to_list()) == ([3.0], [3])
    with refuses(DataError, "shop"):
        read_frame({"price": [1], "shop.number": [3.0]}, SCHEMA)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"name": "x", "column": "label"}, "label feature"),
        ({"name": "x", "column": "at.hour"}, "x at.hour date"),
        ({"name": "x", "column": "a\nb"}, "schema.dense[0].column control"),
        ({"name": "shop", "column": "price"}, "distinct shop"),
    ],
)
def test_wrong_columns_are_refused(feature: dict[str, str], words: str) -> None:
    dates = (DateColumn(name="at", parts=("hour",)),)
    with refuses(ConfigError, words):
        Schema(dates=dates, dense=(DenseFeature(**feature),), sparse=SCHEMA.sparse)


def drafted(folder: Path, **columns: Any) -> dict[str, str]:
    """Return feature -> column of the dense features that `init` drafts with another column."""
    path, rows = folder / "log.csv", range(4000)
    label, price = [row % 2 for row in rows], [row * 37 % 101 / 8 for row in rows]
    pl.DataFrame({"label": label, "price": price, **columns}).write_csv(path)
    content = content_of((str(path),), "label")
    Recipe.from_dict(content)
    dense = content["data"]["source"]["schema"]["dense"]
    return {each["name"]: each["column"] for each in dense if "column" in each}


def test_ids_that_are_numbers_are_drafted_as_both(tmp_path: Path) -> None:
    shops = [row * 7919 % 613 for row in range(4000)]
    assert drafted(tmp_path, shop_id=shops) == {"shop_id.number": "shop_id"}


@pytest.mark.parametrize(
    "columns",
    [
        {"shop_id": [f"s{row % 613}" for row in range(4000)]},
        {"shop_id": [row % 2 for row in range(4000)]},
        {"shop_id": [(row % 613 - 306) * (1 << 54) for row in range(4000)]},
        {
            "shop_id": [row % 613 for row in range(4000)],
            "shop_id.number": [row % 5 / 4 for row in range(4000)],
        },
        {"x" * 198 + "id": [row * 7919 % 613 for row in range(4000)]},
    ],
    ids=["text", "two values", "hashes", "taken name", "long name"],
)
def test_other_ids_are_categories_only(columns: dict[str, Any], tmp_path: Path) -> None:
    assert drafted(tmp_path, **columns) == {}


def test_a_data_set_from_before_a_field_existed_is_not_prepared_again(tmp_path: Path) -> None:
    pl.concat([LOG] * 50).write_csv(tmp_path / "log.csv")
    source = CsvConfig(paths=(str(tmp_path / "log.csv"),), schema=SCHEMA)
    config = PrepareConfig(source=source, path=str(tmp_path / "data"), split=SplitConfig(by="fraction"))
    prepare(config)
    manifest = tmp_path / "data" / MANIFEST
    content = json.loads(manifest.read_text())
    assert content["about"]["origin"]["settings"]["source"]["schema"]["dense"][1].pop("column") == ""
    seal(manifest, content)
    prepare(config)
    with refuses(DatasetError, "dense[1].column absent shop"):
        dense = (SCHEMA.dense[0], replace(SCHEMA.dense[1], column="shop"))
        prepare(replace(config, source=replace(source, schema=replace(SCHEMA, dense=dense))))
