"""Test click logs that continue each other: wherever a log is cut, the samples and the saved state
equal those of one log.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from stratarec.data.click_memory import ClickMemory
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig

HOUR, FIRST = 3600, 1_600_000_000


def click_log(clicks: int = 1200, hours: int = 30) -> pl.DataFrame:
    draws = np.random.default_rng(7)
    return pl.DataFrame(
        {
            "user_id": draws.integers(0, 25, clicks),
            "session_id": draws.integers(0, 90, clicks),
            "item_id": [f"i{item}" for item in (20 * draws.random(clicks) ** 2).astype(int)],
            "timestamp": np.sort(FIRST + 60 * draws.integers(0, 60 * hours, clicks)),
            "device": [None if value == 3 else int(value) for value in draws.integers(0, 4, clicks)],
        }
    )


def read_samples(
    log: pl.DataFrame, root: Path, before: ClickMemory | None = None, last_window: str = "wait"
) -> tuple[pl.DataFrame, ClickMemory]:
    """Return the samples of a log that continues another one, and the state after it."""
    root.mkdir()
    log.write_parquet(root / "log.parquet")
    config = ClicksConfig(
        paths=(str(root / "log.parquet"),),
        contexts=("device",),
        negatives=2,
        memory="3h",
        last_window=last_window,
    )
    source = ClicksSource(config, "error", SplitConfig(by="fraction", valid=0.0, test=0.0))
    if before is not None:
        source.resume(before)
    (root / "work").mkdir()
    frame = pl.concat([chunk.frame for chunk in source.chunks(root / "work")])
    return frame, source.memory(root / "work")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, ClickMemory]:
    """Return the samples of the log, and the state after it."""
    return read_samples(click_log(), tmp_path_factory.mktemp("log") / "whole")


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 28), min_size=1, max_size=4, unique=True).map(sorted), st.booleans())
def test_a_log_in_pieces_gives_the_samples_of_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    whole: tuple[pl.DataFrame, ClickMemory],
    hours: list[int],
    shuffled: bool,
) -> None:
    root, log, (expected, kept) = tmp_path_factory.mktemp("pieces"), click_log(), whole
    edges = [
        0,
        *(int(log["timestamp"].search_sorted(FIRST + HOUR * hour + 1500)) for hour in hours),
        len(log),
    ]
    parts, before = [], None
    for number, (first, last) in enumerate(pairwise(edges)):
        piece = log[first:last]
        if shuffled:  # clicks at the same time keep their order
            piece = piece.with_columns(pl.col("timestamp").hash(number).alias("at")).sort(
                "at", maintain_order=True
            )
        part, before = read_samples(piece.select(log.columns), root / str(number), before)
        parts.append(part)
    assert_frame_equal(pl.concat(parts), expected)
    assert before is not None
    assert before.clicks == kept.clicks
    for part, frame in kept.frames.items():
        assert_frame_equal(before.frames[part], frame)
    assert kept.waiting["timestamp"].min() >= log["timestamp"][-1] - HOUR
    assert expected["timestamp"].max() < log["timestamp"][-1] - HOUR


def test_negatives_cross_file_boundaries_without_duplicates(tmp_path: Path) -> None:
    log = click_log()
    edge = int(log["timestamp"].search_sorted(FIRST + 10 * HOUR))
    _, before = read_samples(log[:edge], tmp_path / "first")
    items = log[edge:].with_columns(("new-" + pl.col("item_id")).alias("item_id"))
    samples, _ = read_samples(items, tmp_path / "second", before)
    waited = samples.filter(pl.col("timestamp") < FIRST + 10 * HOUR)
    assert len(before.waiting) == waited["label"].eq(1).sum() + waited["label"].null_count()
    late = waited.filter(pl.col("label") == 0)["item_id"].str.starts_with("new-")
    assert 0 < late.sum() < len(late)
