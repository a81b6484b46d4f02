"""Small data sets with known hot rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig

SAMPLES = 12_000
ROW_BYTES = 68


def log(path: Path) -> Path:
    """Write a log whose items and shops are both popular or both rare for a user, in sessions of
    four.

    `place` is random.
    """
    draws = np.random.default_rng(1)
    session = np.arange(SAMPLES) // 4
    popular = draws.random(SAMPLES) < 0.6
    item = np.where(popular, draws.integers(0, 20, SAMPLES), 1000 + draws.integers(0, 3000, SAMPLES))
    shop = np.where(popular, draws.integers(0, 10, SAMPLES), 1000 + draws.integers(0, 2000, SAMPLES))
    place = draws.integers(0, 1500, len(session) // 4 + 1)[session]
    tags = [item[row : row + 1 + row % 3].tolist() for row in range(SAMPLES)]
    pl.DataFrame(
        {
            "label": (item + shop) % 2,
            "session": session,
            "user": session // 5,
            "time": np.arange(SAMPLES),
            "item": item,
            "shop": shop,
            "place": place,
            "tags": tags,
        }
    ).write_parquet(path)
    return path


def prepared(root: Path, groups: str, place: bool = True, **vocabulary: object) -> Dataset:
    """Prepare the log as a data set with four features and three vocabularies, or without
    `place`.
    """
    names = ("item", "shop", "place") if place else ("item", "shop")
    schema = Schema(
        sparse=(
            *(SparseFeature(name=name) for name in names),
            SparseFeature(name="tags", kind="multi", vocabulary="item"),
            SparseFeature(name="past", kind="history", of="item", max_length=5),
        ),
        session="session",
        user="user",
        time="time",
    )
    return prepare(
        PrepareConfig(
            source=ParquetConfig(paths=(str(log(root / "log.parquet")),), schema=schema),
            path=str(root / f"data-{groups}"),
            groups=groups,  # type: ignore[arg-type]
            split=SplitConfig(valid=0.1, test=0.0),
            vocabulary=VocabularyConfig(min_count=1, **vocabulary),  # type: ignore[arg-type]
            shard_samples=2000,
        )
    )
