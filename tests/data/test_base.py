"""Test data sets with a base: they keep its ids and moments, and every id can be computed from the
manifest alone.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import xxhash

from stratarec.cli.checks.artifacts import check
from stratarec.data.dataset.compatibility import feature_difference, input_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig, VocabularyOverride

SCHEMA = Schema(
    sparse=(
        SparseFeature(name="item"),
        SparseFeature(name="tags", kind="multi"),
        SparseFeature(name="place"),
    ),
    dense=(DenseFeature(name="age"),),
)
VOCABULARY = VocabularyConfig(
    min_count=3, tail_buckets=5, overrides={"place": VocabularyOverride(kind="hash", buckets=7)}
)


def log(day: int, rows: int = 300) -> pl.DataFrame:
    """Return a log whose items change over time; items of a day are around `day * 10`."""
    random = np.random.default_rng(day)
    items = (day * 10 + random.geometric(0.08, rows)).tolist()
    return pl.DataFrame(
        {
            "label": random.integers(0, 2, rows),
            "item": items,
            "tags": [[f"t{item % 11}", f"é{item // 3}"] for item in items],
            "place": random.integers(-9, 9, rows),
            "age": random.gamma(2.0, 10.0 * (day + 1), rows),
        }
    )


def day_config(root: Path, day: int, base: str = "", **vocabulary: Any) -> PrepareConfig:
    path = root / f"log-{day}.parquet"
    if not path.exists():
        log(day).write_parquet(path)
    return PrepareConfig(
        source=ParquetConfig(paths=(str(path),), schema=SCHEMA),
        path=str(root / f"day-{day}"),
        split=SplitConfig(valid=0.0, test=0.2),
        vocabulary=replace(VOCABULARY, base=base and str(root / base), **vocabulary),
    )


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare three data sets. Each except the first is based on the previous one."""
    root = tmp_path_factory.mktemp("days")
    for day in range(3):
        prepare(day_config(root, day, f"day-{day - 1}" if day else ""))
    return root


def training_counts(root: Path, day: int, column: str) -> Counter[Any]:
    """Count how often the training rows look up each value."""
    dataset = Dataset.open(root / f"day-{day}")
    rows = np.concatenate(list(dataset.row_numbers("train")))
    values = log(day)[column][rows - 1]
    return Counter((values.explode() if values.dtype == pl.List else values).to_list())


def values_of(dataset: Dataset, name: str) -> list[Any]:
    return dataset.vocabulary(name).values.to_list()


@pytest.mark.parametrize("name", ["item", "tags"])
def test_values_keep_their_ids_and_new_ones_follow_by_frequency(days: Path, name: str) -> None:
    expected: list[Any] = []
    counts: Counter[Any] = Counter()
    for day in range(3):
        dataset, counts = Dataset.open(days / f"day-{day}"), counts + training_counts(days, day, name)
        info = dataset.vocabularies[name]
        assert info.inherited == len(expected)
        new = [value for value in counts if value not in expected and counts[value] >= 3]
        assert not day or new
        expected += sorted(new, key=lambda value: (-counts[value], value))
        assert values_of(dataset, name) == expected
        access_counts = dataset.access_counts(name)
        assert access_counts[info.tail_buckets :].tolist() == [counts[value] for value in expected]
        assert access_counts.sum() == counts.total()


def test_moments_are_inherited_from_the_base(days: Path) -> None:
    first, last = (Dataset.open(days / f"day-{day}") for day in (0, 2))
    assert last.about.moments == first.about.moments
    assert last.inputs()["dense"] == first.inputs()["dense"]
    assert input_difference(last, first.inputs()).startswith("vocabulary 'item' has")
    assert not feature_difference(last, first.inputs())
    for same in (feature_difference, input_difference):
        assert same(first, {**first.inputs(), "labels": ["like", "click"]}).startswith(
            "labels is absent, and was"
        )


def test_counts_may_rise_only_among_the_values_of_the_base(days: Path) -> None:
    dataset = Dataset.open(days / "day-2")
    info = dataset.vocabularies["item"]
    counts = dataset.access_counts("item")[info.tail_buckets :]
    assert (np.diff(counts[: info.inherited]) > 0).any()
    assert (np.diff(counts[info.inherited : info.values]) <= 0).all()
    assert any("every value within its range" in line for line in check(dataset.path))


def reference_ids(ids: Mapping[str, Any], values: list[Any], file: list[Any]) -> list[int]:
    """Compute ids from a manifest, the values in its file and the formulas in the README of an
    export.
    """
    places = {value: place for place, value in enumerate(file) if place >= ids["tail_buckets"]}
    return [places.get(value, reference_hash(value) % ids["tail_buckets"]) for value in values]


def reference_hash(value: Any) -> int:
    if isinstance(value, str):
        return xxhash.xxh3_64_intdigest(value.encode())
    z = (value + 0x5DEECE66D) % (1 << 64)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
    return z ^ z >> 31


@pytest.mark.parametrize("name", ["item", "tags", "place"])
def test_ids_follow_from_the_manifest_alone(days: Path, name: str) -> None:
    root = days / "day-1"
    entry = json.loads((root / "dataset.json").read_text())["vocabularies"][name]
    file = pl.read_parquet(root / entry["path"])["value"].to_list()
    dataset = Dataset.open(root).complete()  # the ids that are stored
    rows = np.concatenate(list(dataset.row_numbers("test")))
    tables = [
        dataset.read_row_group("test", 0, group).column(name)
        for group in range(len(dataset.shards("test")[0].row_groups))
    ]
    actual = pl.concat([pl.Series(table.to_pylist()) for table in tables])
    raw = log(1)[name][rows - 1]
    lists = raw.dtype == pl.List
    expected = reference_ids(entry, (raw.explode() if lists else raw).to_list(), file)
    assert (actual.explode() if lists else actual).to_list() == expected


def test_max_rows_keeps_the_values_of_the_base(days: Path, tmp_path: Path) -> None:
    shutil.copytree(days / "day-0", tmp_path / "day-0")
    dataset = prepare(day_config(tmp_path, 1, "day-0", max_rows=2))
    assert values_of(dataset, "item") == values_of(Dataset.open(days / "day-0"), "item")
