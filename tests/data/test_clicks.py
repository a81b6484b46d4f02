"""Compare samples of click logs, in chunks of any size, with a reference that looks at every
earlier click.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from errors import refuses
from stratarec.data.sources import clicks
from stratarec.data.sources.base import ChunkShare
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig
from stratarec.errors import DataError
from stratarec.kernels.click_counts import FEATURES, Click, reference_features

HOUR = 3600


def click_log(path: Path, clicks: int = 300) -> pl.DataFrame:
    draws = np.random.default_rng(5)
    frame = pl.DataFrame(
        {
            "user_id": draws.integers(0, 12, clicks),
            "session_id": draws.integers(0, 40, clicks),
            "item_id": (12 * draws.random(clicks) ** 2).astype(np.int64),
            # Times are multiples of two minutes, so many clicks have the same time.
            "timestamp": 1_600_000_000 + 120 * draws.integers(0, 12 * 30, clicks),
            "device": [None if value == 3 else int(value) for value in draws.integers(0, 4, clicks)],
        }
    )
    frame.write_parquet(path)
    return frame.sort("timestamp", maintain_order=True)


def samples(
    path: Path, workspace: Path, start: int = 0, dense: tuple[str, ...] | None = None
) -> list[pl.DataFrame]:
    config = ClicksConfig(paths=(str(path),), contexts=("device",), negatives=2, memory="3h", dense=dense)
    source = ClicksSource(config, "error", SplitConfig(by="time", valid="2h", test="2h"))
    return [chunk.frame for chunk in source.chunks(workspace, ChunkShare(done=frozenset(range(start))))]


def test_dense_features_depend_on_earlier_clicks_only(tmp_path: Path) -> None:
    log = click_log(tmp_path / "log.parquet")
    samples_frame = pl.concat(samples(tmp_path / "log.parquet", tmp_path / "work"))
    lines = [
        Click(
            time=row["timestamp"],
            user=row["user_id"],
            session=row["session_id"],
            item=row["item_id"],
            contexts=(0 if row["device"] is None else row["device"] + 1,),
        )
        for row in log.rows(named=True)
    ]
    assert samples_frame["label"].eq(1).sum() + samples_frame["label"].null_count() == len(log)
    assert samples_frame["label"].eq(0).sum() == 2 * samples_frame["label"].eq(1).sum() > 1.8 * len(log)
    place = -1
    for row in samples_frame.rows(named=True):
        place += row["label"] != 0
        click, item = lines[place], row["item_id"]
        assert (row["timestamp"], row["user_id"]) == (click.time, click.user)
        expected = reference_features(
            lines, click, item, recent=HOUR // 6, window=HOUR, memory=3 * HOUR, second=1
        )
        names = (*FEATURES, "device_popularity")
        got = [np.nan if row[name] is None else row[name] for name in names]
        np.testing.assert_array_equal(np.float32(got), np.float32(expected), str(names))


@pytest.mark.parametrize("name", ["user_id", "session_id", "item_id"])
def test_a_click_with_nan_as_user_session_or_item_is_a_bad_row(tmp_path: Path, name: str) -> None:
    log = click_log(tmp_path / "log.parquet").with_columns(pl.col(name).cast(pl.Float64))
    log[5, name] = float("nan")
    log.write_parquet(tmp_path / "log.parquet")
    with refuses(DataError, f"log.parquet row 6 {name} nan"):
        samples(tmp_path / "log.parquet", tmp_path / "work")


def test_chunks_may_have_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    click_log(tmp_path / "log.parquet")
    large_chunks = samples(tmp_path / "log.parquet", tmp_path / "one")
    monkeypatch.setattr(clicks, "_CHUNK_CLICKS", 7)
    small_chunks = samples(tmp_path / "log.parquet", tmp_path / "two")
    assert len(small_chunks) > len(large_chunks)
    assert_frame_equal(pl.concat(small_chunks), pl.concat(large_chunks))
    assert_frame_equal(
        pl.concat(samples(tmp_path / "log.parquet", tmp_path / "two", 20)), pl.concat(small_chunks[20:])
    )


def test_clicks_without_a_following_click_are_counted_and_kept_as_events(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"user_id": [1, 2, 1, 1], "session_id": 1, "item_id": [5, 6, 7, 8], "timestamp": [0, 10, 20, 9000]}
    )
    frame.write_parquet(tmp_path / "log.parquet")
    config = ClicksConfig(paths=(str(tmp_path / "log.parquet"),), negatives=1)
    source = ClicksSource(config, "error", SplitConfig(by="time", valid="1h", test="1h"))
    chunks = list(source.chunks(tmp_path / "work"))
    samples_frame = pl.concat([chunk.frame for chunk in chunks])
    # The last two clicks are not followed by a click of another user.
    assert samples_frame["item_id"].to_list() == [5, 6, 6, 7, 7, 8]
    assert samples_frame["label"].to_list() == [1, 0, 1, 0, None, None]
    assert "2 of 4 clicks" in chunks[-1].note
    assert "data.source.negative_window" in chunks[-1].note
