"""Test copies of rows across splits:

`prepare` counts them and every report names them, but not rows that are equal by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recipes import log_config
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.splits import SplitConfig

SCHEMA = Schema(
    label="click",
    dense=(DenseFeature(name="price"),),
    sparse=(SparseFeature(name="*"), SparseFeature(name="tags", kind="multi", max_length=3)),
)


def rows(count: int, values: int = 10_000, rate: float = 0.3, seed: int = 0) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    tags = [[f"t{value}"] * (value % 3) for value in draws.integers(0, values, count)]
    return pl.DataFrame(
        {
            "*": draws.integers(0, values, count),
            "price": draws.integers(0, values, count).astype(np.float64),
            "tags": pl.Series(tags, dtype=pl.List(pl.String)),
            "click": (draws.random(count) < rate).astype(np.int64),
        }
    )


def copied(frame: pl.DataFrame, times: int) -> pl.DataFrame:
    return pl.concat([frame] * times).sample(fraction=1, shuffle=True, seed=2)


def shares(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema = SCHEMA, **options: Any
) -> dict[str, float]:
    return dict(
        prepare(
            log_config(tmp_path, schema, frame, shard_samples=500, **{"split": SplitConfig(), **options})
        ).about.repeated
    )


def test_copies_are_counted_exactly(tmp_path: Path) -> None:
    frame = copied(rows(1000), 3)
    dataset = prepare(log_config(tmp_path, SCHEMA, frame, shard_samples=500, split=SplitConfig()))
    frame.columns = ["a", "price", "tags", "click"]
    placed = pl.concat(
        frame[samples(dataset, split)].with_columns(split=pl.lit(split)) for split in dataset.splits
    )
    trained = placed.filter(pl.col("split") == "train")
    for split in ("valid", "test"):
        chosen = placed.filter(pl.col("split") == split)
        expected = len(chosen.join(trained, on=["a", "price", "click"], how="semi")) / len(chosen)
        assert 0.8 < expected < 1
        assert dataset.about.repeated[split] == pytest.approx(expected, abs=1e-4)  # type: ignore[index]
    assert [line.partition("?")[0] for line in dataset.suspicions] == ["duplicates"]


def samples(dataset: Dataset, split: str) -> list[int]:
    """Return the rows of the log in a split, counted from 0."""
    tables = [pl.read_parquet(dataset.path / shard.path) for shard in dataset.shards(split)]
    # A shard of one row group stores the distance of each row from the previous one.
    return [row - 1 for table in tables for row in table["@row"].cum_sum()]


def random_rows(count: int) -> pl.DataFrame:
    """Return rows with few distinct values, whose labels depend on the values."""
    frame = rows(count, values=4)
    rate = 0.05 + 0.2 * frame["*"].to_numpy()
    return frame.with_columns(
        click=pl.Series((np.random.default_rng(5).random(count) < rate).astype(np.int64))
    )


BY_TIME = SplitConfig(by="time", valid="2d", test="2d")


def timed(frame: pl.DataFrame) -> pl.DataFrame:
    times = np.sort(np.random.default_rng(7).integers(0, 20 * 86_400, len(frame)))
    return frame.with_columns(ts=pl.Series(1_700_000_000 + times))


@pytest.mark.parametrize(
    ("frame", "schema", "split", "reported"),
    [
        (lambda: copied(rows(800), 4), SCHEMA, SplitConfig(), {"valid", "test"}),
        (lambda: copied(rows(2000, rate=0.05), 2), SCHEMA, SplitConfig(), {"valid", "test"}),
        (lambda: copied(rows(800), 4), SCHEMA, SplitConfig(valid=0.0), {"test"}),
        (
            lambda: pl.concat([copied(rows(300), 2), rows(2700, seed=1)]),
            SCHEMA,
            SplitConfig(),
            {"valid", "test"},
        ),
        (lambda: rows(3000), SCHEMA, SplitConfig(), set()),
        # equal by chance, and their labels differ
        (lambda: rows(3000, values=4), SCHEMA, SplitConfig(), set()),
        (lambda: random_rows(3000), SCHEMA, SplitConfig(), set()),
        (lambda: copied(rows(10), 3), SCHEMA, SplitConfig(valid=0.0, test=0.5), set()),  # too few to decide
        # Copies at other times, as a retried upload or a join makes them, and rows of users who
        # repeat themselves.
        (lambda: timed(copied(rows(800), 4)), replace(SCHEMA, time="ts"), BY_TIME, {"valid", "test"}),
        (
            lambda: timed(copied(rows(800), 4)),
            replace(SCHEMA, time="ts", user="*"),
            BY_TIME,
            {"valid", "test"},
        ),
        (lambda: timed(random_rows(3000)), replace(SCHEMA, time="ts"), BY_TIME, set()),
        (lambda: timed(rows(3000)), replace(SCHEMA, time="ts"), BY_TIME, set()),
    ],
)
def test_copies_are_distinguished_from_chance(
    frame: Callable[[], pl.DataFrame],
    schema: Schema,
    split: SplitConfig,
    reported: set[str],
    tmp_path: Path,
) -> None:
    assert set(shares(tmp_path, frame(), schema, split=split)) == reported
