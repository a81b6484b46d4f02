"""How long a log is: said by `prepare`, and held against the durations of a split by time."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from recipes import log_config
from stratarec.data.durations import as_text
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature, TimeUnit
from stratarec.data.splits import Span, SplitConfig
from stratarec.errors import DataError
from stratarec.progress import SilentProgress

START = 1_506_826_800  # 2017-10-01 03:00:00


class Said(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


def config(root: Path, times: list[int], unit: TimeUnit, split: SplitConfig) -> PrepareConfig:
    rows = range(len(times))
    frame = pl.DataFrame({"label": [i % 2 for i in rows], "c": [i % 3 for i in rows], "t": times})
    frame.write_parquet(root / "log.parquet", row_group_size=10)
    schema = Schema(sparse=(SparseFeature(name="c"),), time="t", time_unit=unit)
    return log_config(root, schema, split=split)


@pytest.mark.parametrize(
    ("length", "unit", "text"),
    [
        (0, "s", "0s"), (59, "s", "59s"), (3600, "s", "1h"), (3661, "s", "1h 1m"),
        (86_400 * 12 + 3600 * 9, "s", "12d 9h"),
        (1_500, "ms", "1s"), (250, "ms", "250 ms"), (90_000_000, "us", "1m 30s"), (7, "ns", "7 ns"),
    ],
)  # fmt: skip
def test_lengths_of_time_are_read_easily(length: int, unit: TimeUnit, text: str) -> None:
    assert as_text(length, unit) == text


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1000), ("ns", 10**9)])
def test_prepare_says_the_span(tmp_path: Path, unit: TimeUnit, scale: int) -> None:
    said, times = Said(), [(START + 3600 * (i * 7 % 40)) * scale for i in range(40)]
    prepare(config(tmp_path, times, unit, SplitConfig(by="time", valid="4h", test="4h")), progress=said)
    assert said.lines[0] == "times span 1d 15h (2017-10-01 03:00:00 to 2017-10-02 18:00:00 UTC)"


def test_times_from_another_beginning_are_shown_as_they_are() -> None:
    assert str(Span(first=-5, last=7195, unit="s")) == "2h (-5 to 7195 in s)"


def test_a_split_longer_than_the_log_says_how_long_the_log_is(tmp_path: Path) -> None:
    times = [START + 3600 * i for i in range(40)]
    made = config(tmp_path, times, "s", SplitConfig(by="time", valid="1d", test="1d"))
    with pytest.raises(DataError) as caught:
        prepare(made)
    assert str(caught.value) == (
        "the training split has 0 samples: data.split.valid (1d) and data.split.test (1d) take all of the log, which "
        "spans 1d 15h (2017-10-01 03:00:00 to 2017-10-02 18:00:00 UTC); shorten them, or check time_unit"
    )
    prepare(config(tmp_path, times, "s", SplitConfig(by="time", valid="19h", test="19h")))
