"""Test prepared data sets: they equal a simple reference, do not depend on interruptions, and are
refused when damaged.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import missing, refuses
from recipes import log_config
from stratarec.data.column_names import LABEL, TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare import workspace
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources import clicks
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import DataError
from stratarec.progress import SilentProgress

HOUR = 3600


def click_log(path: Path, seed: int = 0, count: int = 600) -> pl.DataFrame:
    draws = np.random.default_rng(seed)
    times = draws.integers(1_600_000_000, 1_600_000_000 + 40 * HOUR, count)
    frame = pl.DataFrame(
        {
            "user_id": draws.integers(0, 25, count),
            "session_id": draws.integers(0, 60, count),
            "item_id": [f"i{int(40 * u**2)}" for u in draws.random(count)],
            "timestamp": times,
            "device": draws.integers(0, 3, count),
        }
    )
    frame.write_parquet(path, row_group_size=150)
    return frame


def clicks_config(root: Path, **changes: Any) -> PrepareConfig:
    source = ClicksConfig(
        paths=(str(root / "log.parquet"),), contexts=("device",), history_length=4, negatives=3
    )
    options: dict[str, Any] = {
        "source": source,
        "path": str(root / "data"),
        "split": SplitConfig(by="time", valid="4h", test="4h"),
        "vocabulary": VocabularyConfig(min_count=1, tail_buckets=2),
        "shard_samples": 700,
        **changes,
    }
    return PrepareConfig(**options)


def decode_samples(dataset: Dataset, split: str) -> pl.DataFrame:
    """Return samples with ids replaced by values."""
    frames = [
        pl.from_arrow(dataset.read_row_group(split, number, group))
        for number, shard in enumerate(dataset.shards(split))
        for group in range(len(shard.row_groups))
    ]
    samples = pl.concat(frames)
    assert isinstance(samples, pl.DataFrame)
    for feature in dataset.schema.sparse:
        table = pl.read_parquet(dataset.path / dataset.vocabularies[feature.vocabulary].path)[
            "value"
        ].to_list()
        if feature.kind == "single":
            values = [None if i < 0 else table[i] for i in samples[feature.name]]
        else:
            values = [[table[i] for i in bag] for bag in samples[feature.name]]
        samples = samples.with_columns(pl.Series(feature.name, values, strict=False))
    return samples


def test_chunks_may_be_spilled_to_files_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clicks, "_CHUNK_CLICKS", 20)
    fingerprints, files = set(), []
    for size in (1, 20_000, 1 << 30):
        monkeypatch.setattr(workspace, "_FILE_BYTES", size)
        root = tmp_path / str(size)
        root.mkdir()
        click_log(root / "log.parquet")
        stopped = StopAfterSpilling()
        with pytest.raises(KeyboardInterrupt):
            prepare(clicks_config(root), progress=stopped)
        files.append(len(list((root / "data.preparing" / "spilled").glob("*.arrow"))))
        fingerprints.add(prepare(clicks_config(root)).fingerprint)
    assert len(fingerprints) == 1
    assert files[0] > files[1] > files[2] == 1


class StopAfterSpilling(SilentProgress):
    """Interrupt `prepare` after the log is spilled."""

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        if task == "count":
            raise KeyboardInterrupt


def test_clicks_become_samples_that_never_look_ahead(tmp_path: Path) -> None:
    log = click_log(tmp_path / "log.parquet")
    dataset = prepare(clicks_config(tmp_path))
    samples = pl.concat([decode_samples(dataset, split) for split in ("train", "valid", "test")])
    positives = samples.filter(pl.col(LABEL) == 1)
    ordered = log.sort("timestamp", maintain_order=True)
    last = int(ordered["timestamp"][-1])
    # The split of `clicks_config` by time: four hours each for validation and test.
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

    expected = Counter(
        (r["item_id"], r["device"], r["timestamp"], history(r)) for r in rows if followers(r)
    )
    assert len(log) > expected.total() > 0.8 * len(log)
    actual = Counter(
        (r["item_id"], r["device"], r[TIME], tuple(r["history"])) for r in positives.rows(named=True)
    )
    assert actual == expected
    negatives = samples.filter(pl.col(LABEL) == 0)
    assert len(negatives) == 3 * len(positives)
    for row in negatives.rows(named=True):
        assert any(row["item_id"] in followers(r) for r in rows if r["timestamp"] == row[TIME])


def test_clicks_at_the_same_time_keep_the_order_of_the_log(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("a", 1), ("b", 2)):
        log = click_log(tmp_path / f"{name}.parquet", seed)
        logs.append(log.with_columns(pl.col("timestamp") // (2 * HOUR) * (2 * HOUR)))
        logs[-1].write_parquet(tmp_path / f"{name}.parquet", row_group_size=100)
    source = ClicksConfig(
        paths=(str(tmp_path / "[ab].parquet"),), history_length=30, negatives=1, popularity_window="3h"
    )
    dataset = prepare(clicks_config(tmp_path, source=source))
    splits = [decode_samples(dataset, split) for split in dataset.splits]
    samples = pl.concat(splits, how="vertical_relaxed").filter(pl.col(LABEL) == 1)
    rows = pl.concat(logs).sort("timestamp", maintain_order=True).rows(named=True)
    expected: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        earlier = [r for r in rows if r["user_id"] == row["user_id"] and r["timestamp"] < row["timestamp"]]
        expected[(row["item_id"], row["timestamp"], *(r["item_id"] for r in earlier[-30:]))] += 1
    assert Counter((r["item_id"], r[TIME], *r["history"]) for r in samples.rows(named=True)) == expected


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
            log_config(
                tmp_path, schema, frame.with_columns(y=pl.lit(0), d=pl.lit(0.0)), path=str(tmp_path / "one")
            )
        )
