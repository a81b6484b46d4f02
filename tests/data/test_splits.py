"""Test splits by file, fraction and time: every sample is in its split, and an empty split is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import refuses
from recipes import log_config
from stratarec.data.column_names import TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.durations import TimeUnit
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError, DataError
from stratarec.recipe import Recipe

HOUR = 3600


def column(dataset: Dataset, split: str, name: str) -> list[Any]:
    """Return a column of a split as stored."""
    return [
        value
        for number, shard in enumerate(dataset.shards(split))
        for group in range(len(shard.row_groups))
        for value in dataset.read_row_group(split, number, group)[name].to_pylist()
    ]


def values(dataset: Dataset, split: str, name: str) -> list[Any]:
    """Return a categorical column of a split with ids replaced by values."""
    known = pl.read_parquet(dataset.path / dataset.vocabularies[name].path)["value"].to_list()
    return [known[i] for i in column(dataset, split, name)]


def timed_config(root: Path, times: list[int], split: SplitConfig, unit: TimeUnit = "s") -> PrepareConfig:
    frame = pl.DataFrame(
        {"label": [i % 2 for i in range(len(times))], "time": times, "c": [i % 3 for i in times]}
    )
    frame.write_parquet(root / "log.parquet", row_group_size=7)
    schema = Schema(sparse=(SparseFeature(name="c"),), time="time", time_unit=unit)
    return log_config(root, schema, split=split, shard_samples=20)


def test_by_file_all_rows_of_a_file_are_in_its_split(tmp_path: Path) -> None:
    for day, rows in enumerate((30, 40, 20, 50)):
        lines = ["label\tC1", *(f"{i % 2}\tday{day}" for i in range(rows))]
        (tmp_path / f"day_{day}.tsv").write_text("\n".join(lines))
    split = SplitConfig(by="file", valid="day_0*", test=("none", str(tmp_path / "day_[23].tsv")))
    source = CsvConfig(
        paths=(str(tmp_path / "day_*.tsv"),), schema=Schema(sparse=(SparseFeature(name="C1"),))
    )
    limits = VocabularyConfig(min_count=1)
    config = PrepareConfig(
        source=source, path=str(tmp_path / "data"), split=split, vocabulary=limits, shard_samples=60
    )
    dataset = prepare(config)
    assert {name: dataset.samples(name) for name in dataset.splits} == {
        "train": 40,
        "valid": 30,
        "test": 70,
    }
    assert set(values(dataset, "train", "C1")) == {"day1"}
    # Other days are not in the training vocabulary, so they share its tail buckets.
    assert dataset.vocabularies["C1"].values == 1
    assert min(column(dataset, "test", "C1")) > 0


@pytest.mark.parametrize(
    ("valid", "test", "message"),
    [
        ("none*", "c.parquet", "data.split.valid 3"),
        ("*.parquet", "*.parquet", "data.split.valid"),
        ("[ab].parquet", "c.parquet", "file"),
    ],
)
def test_patterns_that_leave_a_split_empty_are_refused_before_any_work(
    tmp_path: Path, valid: Any, test: Any, message: str
) -> None:
    for name in ("a", "b", "c"):
        pl.DataFrame({"label": [0, 1], "c": [1, 2]}).write_parquet(tmp_path / f"{name}.parquet")
    split = SplitConfig(by="file", valid=valid, test=test)
    with refuses(ConfigError, message):
        prepare(log_config(tmp_path, Schema(sparse=(SparseFeature(name="c"),)), split=split))
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1000)])
def test_by_time_the_boundaries_are_exact(tmp_path: Path, unit: TimeUnit, scale: int) -> None:
    hours = np.random.default_rng(0).permutation(100).tolist()
    split = SplitConfig(by="time", valid="10h", test="5h")
    dataset = prepare(timed_config(tmp_path, [hour * HOUR * scale for hour in hours], split, unit))
    hours_by_split = {
        name: sorted(time // HOUR // scale for time in column(dataset, name, TIME))
        for name in dataset.splits
    }
    assert hours_by_split == {
        "train": list(range(85)),
        "valid": list(range(85, 95)),
        "test": list(range(95, 100)),
    }


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"by": "time", "valid": "1h", "test": "60h"}, "training split 0"),
        ({"by": "time", "valid": "1m", "test": "90m"}, "data.split.valid '1m'"),
        ({"by": "fraction", "valid": 0.1, "test": 1e-9}, "data.split.test 1e-09"),
        ({"by": "fraction", "valid": 0.4999999, "test": 0.5}, "training split 0"),
    ],
)
def test_an_empty_split_is_refused(tmp_path: Path, split: dict[str, Any], message: str) -> None:
    with refuses(DataError, message):
        prepare(timed_config(tmp_path, [hour * HOUR for hour in range(50)], SplitConfig(**split)))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("later", "is_odd"), [(0.5, True), (0.15, False)])
def test_a_split_by_time_whose_share_of_positives_changes_is_reported(
    tmp_path: Path, later: float, is_odd: bool
) -> None:
    draws, times = np.random.default_rng(0), np.arange(3000)
    rate = np.where(times < 2000, 0.1, later)
    frame = pl.DataFrame(
        {"label": (draws.random(3000) < rate).astype(int), "item": times % 7, "time": times}
    )
    schema = Schema(label="label", time="time", sparse=(SparseFeature(name="item"),))
    for by_time in (True, False):
        split = SplitConfig(by="time", valid="1s", test="1000s") if by_time else SplitConfig()
        root = tmp_path / str(by_time)
        root.mkdir()
        dataset = prepare(log_config(root, schema, frame, split=split))
        assert bool(dataset.odd_split) == (is_odd and by_time)
        assert any("times?" in line and "'time'" in line for line in dataset.suspicions) == (
            is_odd and by_time
        )


def column_config(root: Path, split: list[str | None], **fields: Any) -> PrepareConfig:
    rows = len(split)
    frame = pl.DataFrame(
        {"label": [i % 2 for i in range(rows)], "c": [i % 3 for i in range(rows)], "part": split}
    )
    frame.write_parquet(root / "log.parquet", row_group_size=7)
    config = SplitConfig(**{"by": "column", "column": "part", "valid": ("val*",), "test": "TEST", **fields})
    return log_config(root, Schema(sparse=(SparseFeature(name="c"),)), split=config, shard_samples=20)


def test_by_column_rows_are_in_the_split_that_their_value_matches(tmp_path: Path) -> None:
    split = ["train", "Validation", "test ", "other"] * 25
    dataset = prepare(column_config(tmp_path, list(split)))
    assert {name: dataset.samples(name) for name in dataset.splits} == {
        "train": 50,
        "valid": 25,
        "test": 25,
    }
    assert sorted(values(dataset, "test", "c")) == sorted(i % 3 for i in range(2, 100, 4))
    assert "part" not in dataset.schema.names


def test_a_row_without_its_split_is_refused(tmp_path: Path) -> None:
    split: list[str | None] = ["train", "val", "test", "train"] * 25
    split[57] = None
    with refuses(DataError, "log.parquet, row 58: column 'part' is empty, expected the split of the row"):
        prepare(column_config(tmp_path, split))
    with refuses(DataError, "the test split has no samples"):
        prepare(column_config(tmp_path, ["train", "train", "val"] * 30))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column": ""}, "data.split.column is ''"),
        (
            {"by": "fraction", "valid": 0.1, "test": 0.1},
            "data.split.column is 'part' and data.split.by is fraction",
        ),
        ({"test": 0.2}, "data.split.test is 0.2, expected values of data.split.column"),
        ({"valid": 1.5}, "data.split.valid is 1.5, expected values of data.split.column, or a share"),
        ({"column": "label"}, "data.split.column is 'label', which has a role"),
        ({"column": "c"}, "data.split.column is 'c', which has a role"),
    ],
)
def test_wrong_settings_of_a_split_by_column_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with refuses(ConfigError, message):
        prepare(column_config(tmp_path, ["train", "val", "test"] * 30, **fields))


def test_samples_of_clicks_have_no_column_of_splits(tmp_path: Path) -> None:
    source = {"kind": "clicks", "paths": [str(tmp_path / "clicks.parquet")]}
    pl.DataFrame({"user_id": [1], "item_id": [1], "timestamp": [1]}).write_parquet(
        tmp_path / "clicks.parquet"
    )
    data = {
        "path": str(tmp_path / "data"),
        "source": source,
        "split": {"by": "column", "column": "part", "test": "test"},
    }
    with refuses(ConfigError, "data.source.kind is clicks"):
        prepare(Recipe.from_dict({"name": "a", "data": data, "model": {"kind": "dlrm"}}).data)
