"""Prepared data sets: equal to an obvious reference, the same at any interruption, refused when damaged."""

from __future__ import annotations

import filecmp
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import missing, refuses
from recipes import log_config
from stratarec.data.column_names import LABEL, SESSION, TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError, DataError, DatasetError, StorageError
from stratarec.progress import SilentProgress

HOUR = 3600


def click_log(path: Path, seed: int = 0, clicks: int = 600) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    times = draws.integers(1_600_000_000, 1_600_000_000 + 40 * HOUR, clicks)
    frame = pl.DataFrame(
        {
            "user_id": draws.integers(0, 25, clicks),
            "session_id": draws.integers(0, 60, clicks),
            "item_id": [f"i{int(40 * u**2)}" for u in draws.random(clicks)],
            "timestamp": times,
            "device": draws.integers(0, 3, clicks),
        }
    )
    frame.write_parquet(path, row_group_size=150)
    return frame


def clicks_config(root: Path, **changes: Any) -> PrepareConfig:
    source = ClicksConfig(paths=(str(root / "log.parquet"),), contexts=("device",), history_length=4, negatives=3)
    options: dict[str, Any] = {
        "source": source,
        "path": str(root / "data"),
        "split": SplitConfig(by="time", valid="4h", test="4h"),
        "vocabulary": VocabularyConfig(min_count=1, tail_buckets=2),
        "shard_samples": 700,
        **changes,
    }
    return PrepareConfig(**options)


def decoded(dataset: Dataset, split: str) -> pl.DataFrame:
    """Samples with ids turned back into values."""
    frames = [
        pl.from_arrow(dataset.read_row_group(split, number, group))
        for number, shard in enumerate(dataset.shards(split))
        for group in range(len(shard.row_groups))
    ]
    whole = pl.concat(frames)
    assert isinstance(whole, pl.DataFrame)
    for feature in dataset.schema.sparse:
        table = pl.read_parquet(dataset.path / dataset.vocabularies[feature.vocabulary].path)["value"].to_list()
        if feature.kind == "single":
            values = [None if i < 0 else table[i] for i in whole[feature.name]]
        else:
            values = [[table[i] for i in bag] for bag in whole[feature.name]]
        whole = whole.with_columns(pl.Series(feature.name, values, strict=False))
    return whole


def same_tree(one: Path, other: Path) -> None:
    compared = filecmp.dircmp(one, other)
    assert not compared.left_only
    assert not compared.right_only
    for folder in (".", "vocabulary", "train", "valid", "test"):
        names = [path.name for path in (one / folder).iterdir() if path.is_file()]
        _, mismatch, errors = filecmp.cmpfiles(one / folder, other / folder, names, shallow=False)
        assert not mismatch + errors


def test_clicks_become_samples_that_never_look_ahead(tmp_path: Path) -> None:
    log = click_log(tmp_path / "log.parquet")
    dataset = prepare(clicks_config(tmp_path))
    samples = pl.concat([decoded(dataset, split) for split in ("train", "valid", "test")])
    positives = samples.filter(pl.col(LABEL) == 1)
    ordered = log.sort("timestamp", maintain_order=True)
    last = int(ordered["timestamp"][-1])
    # The split by time of `clicks_config`: four hours each of validation and test.
    left = last - pl.col("timestamp")
    rows = ordered.with_columns(split=(left < 8 * HOUR).cast(pl.Int8) + (left < 4 * HOUR)).rows(named=True)

    def followers(row: dict[str, Any]) -> list[str]:
        return [
            r["item_id"]
            for r in rows
            if row["timestamp"] <= r["timestamp"] <= row["timestamp"] + HOUR
            and r["user_id"] != row["user_id"]
            and r["split"] == row["split"]
        ]

    def history(row: dict[str, Any]) -> tuple[str, ...]:
        earlier = [r for r in rows if r["user_id"] == row["user_id"] and r["timestamp"] < row["timestamp"]]
        return tuple(r["item_id"] for r in earlier[-4:])

    expected = Counter((r["item_id"], r["device"], r["timestamp"], history(r)) for r in rows if followers(r))
    assert len(log) > expected.total() > 0.8 * len(log)
    found = Counter((r["item_id"], r["device"], r[TIME], tuple(r["history"])) for r in positives.rows(named=True))
    assert found == expected
    negatives = samples.filter(pl.col(LABEL) == 0)
    assert len(negatives) == 3 * len(positives)
    for row in negatives.rows(named=True):
        assert any(row["item_id"] in followers(r) for r in rows if r["timestamp"] == row[TIME])


def test_clicks_of_one_moment_keep_the_order_of_the_log(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("a", 1), ("b", 2)):
        log = click_log(tmp_path / f"{name}.parquet", seed)
        logs.append(log.with_columns(pl.col("timestamp") // (2 * HOUR) * (2 * HOUR)))
        logs[-1].write_parquet(tmp_path / f"{name}.parquet", row_group_size=100)
    source = ClicksConfig(
        paths=(str(tmp_path / "[ab].parquet"),), history_length=30, negatives=1, popularity_window="3h"
    )
    dataset = prepare(clicks_config(tmp_path, source=source))
    splits = [decoded(dataset, split) for split in dataset.splits]
    samples = pl.concat(splits, how="vertical_relaxed").filter(pl.col(LABEL) == 1)
    rows = pl.concat(logs).sort("timestamp", maintain_order=True).rows(named=True)
    expected: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        earlier = [r for r in rows if r["user_id"] == row["user_id"] and r["timestamp"] < row["timestamp"]]
        expected[(row["item_id"], row["timestamp"], *(r["item_id"] for r in earlier[-30:]))] += 1
    assert Counter((r["item_id"], r[TIME], *r["history"]) for r in samples.rows(named=True)) == expected


class Stop(Exception):
    """Stands for a process that dies."""


class StopAfter(SilentProgress):
    def __init__(self, steps: int) -> None:
        self.left = steps

    def advance(self, amount: int, note: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop


@pytest.mark.parametrize("steps", [20, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 43, 45))])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, steps: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    click_log(tmp_path / "a" / "log.parquet")
    shutil.copy2(tmp_path / "a" / "log.parquet", tmp_path / "b" / "log.parquet")
    config = clicks_config(tmp_path / "a")
    prepare(config)
    (tmp_path / "a" / "data").rename(tmp_path / "whole")
    try:
        prepare(config, progress=StopAfter(steps))
    except Stop:
        assert not (tmp_path / "a" / "data").exists()
    dataset = prepare(config)
    same_tree(tmp_path / "whole", dataset.path)
    assert not (tmp_path / "a" / "data.preparing").exists()


def test_a_finished_data_set_is_kept_or_refused(tmp_path: Path) -> None:
    click_log(tmp_path / "log.parquet")
    first = prepare(clicks_config(tmp_path))
    assert prepare(clicks_config(tmp_path)).fingerprint == first.fingerprint
    other = clicks_config(tmp_path, vocabulary=VocabularyConfig(min_count=3))
    with refuses(DatasetError, "--overwrite"):
        prepare(other)
    assert prepare(other, overwrite=True).fingerprint != first.fingerprint
    (tmp_path / "occupied").mkdir()
    with refuses(DatasetError, "data"):
        prepare(clicks_config(tmp_path, path=str(tmp_path / "occupied")))
    (tmp_path / "file").touch()
    with pytest.raises((StorageError, DatasetError)):
        prepare(clicks_config(tmp_path, path=str(tmp_path / "file")))


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    click_log(tmp_path / "log.parquet")
    dataset = prepare(clicks_config(tmp_path))
    for path in sorted(dataset.path.rglob("*.*")):
        content = path.read_bytes()
        for damaged in (content[:-2], bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            with pytest.raises(DatasetError, match=path.name):
                Dataset.open(dataset.path)
        path.write_bytes(content)
    Dataset.open(dataset.path)


def test_bad_rows_are_counted_and_one_class_is_refused(tmp_path: Path) -> None:
    schema = Schema(label="y", dense=(DenseFeature(name="d"),), sparse=(SparseFeature(name="c"),))
    frame = pl.DataFrame(
        {"y": [0, 1, 2, 1] * 10, "d": [1.0, float("inf"), 2.0, None] * 10, "c": ["a", "b", None, "c"] * 10}
    )
    dataset = prepare(log_config(tmp_path, schema, frame, split=SplitConfig(), on_bad_row="skip"))
    assert dataset.about.bad_rows == 20
    for example, expected in zip(
        dataset.about.bad_examples, ("2: column 'd': got inf", "3: column 'y': got 2"), strict=False
    ):
        assert not missing(f"row {expected}", example)
    with refuses(DataError, "row finite 2 'd' inf"):
        prepare(log_config(tmp_path, schema, path=str(tmp_path / "strict")))
    with refuses(DataError, "classes"):
        prepare(
            log_config(tmp_path, schema, frame.with_columns(y=pl.lit(0), d=pl.lit(0.0)), path=str(tmp_path / "one"))
        )


def test_the_split_by_fraction_keeps_sessions_whole(tmp_path: Path) -> None:
    config = PrepareConfig(source=SyntheticConfig(samples=4000, scale=0.001), path=str(tmp_path / "data"))
    dataset = prepare(config)
    sessions = {split: set(decoded(dataset, split)[SESSION]) for split in dataset.splits}
    assert not sessions["train"] & sessions["test"]
    assert not sessions["train"] & sessions["valid"]
    assert 0.05 < dataset.samples("test") / 4000 < 0.15
    frame, schema = pl.DataFrame({"label": [0, 1], "c": [1, 2]}), Schema(sparse=(SparseFeature(name="c"),))
    with refuses(ConfigError, "data.split.by time"):
        prepare(log_config(tmp_path, schema, frame, split=SplitConfig(by="time", valid="1h", test="1h")))
