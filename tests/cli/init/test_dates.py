"""Test which features of dates a drafted recipe has, and columns of dates that it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from stratarec.cli import main
from stratarec.cli.init import draft, sample
from stratarec.cli.init.date_columns import find_dates
from stratarec.cli.init.events import other_times

ROWS = 3000
FIRST = datetime(2024, 3, 4, tzinfo=timezone.utc)


def times(days: int = 90, seed: int = 0) -> list[datetime]:
    """Return ascending times in a number of days."""
    minutes = np.sort(np.random.default_rng(seed).integers(0, days * 24 * 60, ROWS)).tolist()
    return [FIRST + timedelta(minutes=minute) for minute in minutes]


def write_log(path: Path, at: list[datetime], rate: Any, **columns: Any) -> None:
    """Write a log whose label has the probability `rate` in each row."""
    draws = np.random.default_rng(1)
    label = (draws.random(len(at)) < np.array(rate)).astype(int)
    frame = pl.DataFrame({"clicked": label, "at": at, "item": draws.integers(0, 40, len(at)), **columns})
    if path.suffix == ".csv":
        frame = frame.with_columns(pl.col("at").dt.to_string("%Y-%m-%d %H:%M:%S"))
        frame.write_csv(path)
    else:
        frame.write_parquet(path)


def drafted(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[dict[str, Any], str]:
    """Run `init`; return the schema of the recipe, and the text of the recipe and the command's
    output.
    """
    recipe = path.with_suffix(".yaml")
    assert main(["init", str(path), "--label", "clicked", "-o", str(recipe)]) == 0
    text = recipe.read_text()
    return yaml.safe_load(text)["data"]["source"], capsys.readouterr().out + text


def weekend(at: list[datetime]) -> list[float]:
    return [0.7 if time.weekday() > 4 else 0.2 for time in at]


def test_parts_that_lower_the_validation_loss_are_drafted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "log.csv", times(), weekend(times()))
    source, text = drafted(capsys, tmp_path / "log.csv")
    assert [(date["name"], "weekday" in date["parts"]) for date in source["schema"]["dates"]] == [
        ("at", True)
    ]
    assert not missing("weekday LightGBM", text)


def test_without_signal_no_feature_is_drafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = times()
    joined = [
        f"{time - timedelta(days=int(days)):%d.%m.%Y}" for time, days in zip(at, range(ROWS), strict=True)
    ]
    write_log(tmp_path / "log.csv", at, 0.3, joined=joined)
    source, text = drafted(capsys, tmp_path / "log.csv")
    assert "dates" not in source["schema"]
    assert not missing("joined days since at instead", text)


def test_days_since_another_date_are_drafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some of the dates are missing, and some are before 1970."""
    at, days = times(), np.random.default_rng(2).integers(0, 30_000, ROWS).tolist()
    joined = [
        f"{time - timedelta(days=age):%d.%m.%Y}" if age % 20 else "unknown"
        for time, age in zip(at, days, strict=True)
    ]
    write_log(tmp_path / "log.csv", at, [0.8 if age < 9000 else 0.2 for age in days], joined=joined)
    source, _ = drafted(capsys, tmp_path / "log.csv")
    dates = {date["name"]: date for date in source["schema"]["dates"]}
    assert dates["joined"]["since"] == ["at"]
    assert dates["joined"]["time_format"] == "%d.%m.%Y"
    assert source["nulls"] == ["unknown"]
    assert main(["prepare", "-q", str(tmp_path / "log.yaml"), f"data.path={tmp_path / 'data'}"]) == 0


def test_dates_after_the_event_are_reported_as_a_leak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A date that only positive rows have is a leak by that alone."""
    at, rate = times(), weekend(times())
    end = [
        time + timedelta(days=3) if place % 5 else time - timedelta(days=9) for place, time in enumerate(at)
    ]
    write_log(
        tmp_path / "log.parquet", at, rate, shipped=end, born=[time - timedelta(days=9999) for time in at]
    )
    frame = pl.read_parquet(tmp_path / "log.parquet")
    frame = frame.with_columns(paid=pl.when(pl.col("clicked") == 1).then(pl.col("born")))
    frame.write_parquet(tmp_path / "log.parquet")
    source, text = drafted(capsys, tmp_path / "log.parquet")
    assert not {"shipped", "paid"} & {date["name"] for date in source["schema"]["dates"]}
    assert not missing("shipped 80% after at", text)
    (line,) = [line for line in text.splitlines() if "dates: - {name: shipped" in line]
    assert yaml.safe_load(line.partition(" - ")[2])["parts"] == ["month"]
    assert any("dates: - {name: paid" in line and "clicked is 1" in line for line in text.splitlines())


def test_zones_of_columns_are_drafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = pl.Series(times()).dt.convert_time_zone("America/New_York")
    rate = [0.8 if time.hour < 5 else 0.2 for time in at]
    write_log(tmp_path / "log.parquet", at.to_list(), rate)
    frame = pl.read_parquet(tmp_path / "log.parquet").with_columns(at.alias("at"))
    paid = (at - timedelta(days=5)).dt.convert_time_zone("Asia/Tokyo").alias("began")
    frame.with_columns(paid).write_parquet(tmp_path / "log.parquet")
    source, text = drafted(capsys, tmp_path / "log.parquet")
    dates = {date["name"]: date for date in source["schema"]["dates"]}
    assert dates["at"]["zone"] == "America/New_York"
    assert "hour" in dates["at"]["parts"]
    assert not missing("began days since at", text)


def test_a_part_of_a_log_cannot_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features of a large log are categories, because its model is no ensemble."""
    monkeypatch.setattr(sample, "_HEAD_BYTES", 1 << 15)
    monkeypatch.setattr(sample, "_TAIL_BYTES", 1 << 13)
    monkeypatch.setattr(draft, "_ENSEMBLE_ROWS", 100)
    write_log(tmp_path / "log.csv", times(), 0.3)
    source, text = drafted(capsys, tmp_path / "log.csv")
    assert source["schema"]["dates"] == [{"name": "at", "parts": ["hour", "weekday"]}]
    assert {"name": "at.hour"} in source["schema"]["sparse"]
    assert not missing("not tested", text)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (["2024-05-01", "2024-05-02"] * 19 + ["soon", "2024-05-03"], "soon 2.5% not date"),
        (["1931-05-01", "2024-05-02", "9999-12-31"], ""),
        (["1931-05-01", "1957-05-02"], ""),
        (["1931-05-01", "2024-05-02", None, "n/a"] * 5 + ["2024-05-02"] * 80, ""),
        ([datetime(1931, 5, 1), None, datetime(2150, 5, 1)], ""),
    ],
)
def test_columns_of_dates_are_recognized(column: list[Any], reason: str) -> None:
    dates, text = find_dates(pl.Series("joined", column))
    assert (dates is None) == bool(reason)
    assert not missing(reason, text)


@pytest.mark.parametrize(
    "values", [["soon", "later"], ["red", None], ["2024-05-01", "red", "blue"], ["12", "13"]]
)
def test_other_columns_are_no_dates(values: list[str | None]) -> None:
    assert find_dates(pl.Series("color", values)) == (None, "")


def test_a_constant_date_and_a_single_day_give_no_feature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = [FIRST + timedelta(seconds=second) for second in range(ROWS)]
    write_log(tmp_path / "log.parquet", at, 0.3, began=[FIRST - timedelta(days=30)] * ROWS)
    source, _ = drafted(capsys, tmp_path / "log.parquet")
    assert "dates" not in source["schema"]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("order_date", range(46_082, 46_142), "write 46082 as 2026-03-01"),
        ("event_date", range(20_513, 20_573), "write 20513 as 2026-03-01"),
        (
            "born",
            [f"{1930 + number}-05-26" for number in range(60)],
            "not from 1990 to 2099, such as '1930-05-26'",
        ),
        (
            "ts",
            ["1970-01-01 00:00:00", *(f"2026-03-01 10:00:{second:02}" for second in range(59))],
            "such as '1970-01",
        ),
    ],
    ids=["serial days", "days since 1970", "early", "zero"],
)
def test_dates_that_are_no_times_are_left_out_with_the_reason(
    name: str, values: Sequence[Any], reason: str
) -> None:
    assert reason in other_times(pl.Series(name, [values[row // 30] for row in range(1800)]))


@pytest.mark.parametrize(
    ("name", "first"), [("size", 46_082), ("zip_at", 60_001), ("date", 700), ("data", 20_513)]
)
def test_other_whole_numbers_are_no_days(name: str, first: int) -> None:
    numbers = pl.Series(name, np.repeat(np.arange(first, first + 60), 30))
    assert not other_times(numbers)
    assert not other_times(numbers.cast(pl.String))
