"""Changes from day to day against counts by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recipes import log_config
from stratarec.data.column_names import TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.hot.reuse import measure_drift

DAY, FIRST = 86_400, 19_000


def made(root: Path, days: np.ndarray) -> Dataset:
    """Items that come and go within some days, a constant, and a number that moves half way."""
    draws = np.random.default_rng(1)
    size = len(days)
    frame = pl.DataFrame(
        {
            "label": draws.integers(0, 2, size),
            "when": (FIRST + days) * DAY + draws.integers(0, DAY, size),
            "item": 40 * days + draws.integers(0, 100, size),
            "one": np.ones(size, np.int64),
            "x": draws.normal(size=size) + 2.0 * (days >= 3),
        }
    )
    schema = Schema(
        time="when",
        sparse=(SparseFeature(name="item"), SparseFeature(name="one")),
        dense=(DenseFeature(name="x", transform="none"),),
    )
    limits = VocabularyConfig(min_count=1, tail_buckets=4)
    return prepare(log_config(root, schema, frame, vocabulary=limits))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    # Nobody came on the third day.
    return made(tmp_path_factory.mktemp("days"), np.repeat([0, 1, 3, 4, 5], 1500))


def by_hand(dataset: Dataset) -> tuple[list[int], list[float], list[float]]:
    """Days, shares of lookups of items that the day before had not, and shifts of the number."""
    groups = [
        dataset.read_row_group("train", shard, group)
        for shard, stored in enumerate(dataset.shards("train"))
        for group in range(len(stored.row_groups))
    ]
    frame = pl.concat([pl.DataFrame(pl.from_arrow(each)) for each in groups])
    frame = frame.with_columns(day=pl.col(TIME) // DAY)
    days = sorted(frame["day"].unique().to_list())
    parts = [frame.filter(pl.col("day") == day) for day in days]
    pairs = list(itertools.pairwise(parts))
    unseen = [float((~now["item"].is_in(before["item"].unique().to_list())).mean()) for before, now in pairs]  # type: ignore[arg-type]
    deviation = float(np.std(frame["x"].to_numpy().astype(np.float64)))
    shift = [float(now["x"].mean() - before["x"].mean()) / deviation for before, now in pairs]  # type: ignore[operator]
    return days, unseen, shift


def test_changes_are_those_of_counts_by_hand(dataset: Dataset) -> None:
    found = measure_drift(dataset)
    assert found is not None
    days, unseen, shift = by_hand(dataset)
    assert found.days == 1
    assert found.starts.tolist() == days
    np.testing.assert_allclose(found.unseen["item"][1:], unseen)
    np.testing.assert_allclose(found.shift["x"][1:], shift, atol=1e-4)
    assert min(unseen) > 0.2
    assert found.unseen["one"][1:].max() == 0
    assert found.shift["x"][2] > 1
