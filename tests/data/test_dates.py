"""Test numbers that are computed from dates: against Python's datetime and zoneinfo, and refused
columns.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import Any, get_args
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.dates import PARTS, read_plain_date
from stratarec.data.columns.frames import read_column, read_frame
from stratarec.data.schema import DateColumn, DatePart, DenseFeature, LabelRule, Schema, SparseFeature
from stratarec.errors import ConfigError, DataError

EPOCH = datetime(1970, 1, 1)
ALL: tuple[DatePart, ...] = get_args(DatePart)
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Africa/Monrovia",
    "Asia/Kathmandu",
)
"""Zones with daylight saving in both hemispheres, of half an hour, and with offsets of minutes and
seconds.
"""
# Python cannot convert all times of the first and the last day to other zones.
TIMES = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)) | st.datetimes(
    datetime(1960, 1, 1), datetime(2140, 1, 1)
)
CHANGES = st.builds(
    lambda change, shift: change + timedelta(seconds=shift),
    st.sampled_from(
        [datetime(2024, 3, 31, 1), datetime(2023, 11, 5, 6), datetime(2096, 2, 29), datetime(1972, 1, 7)]
    ),
    st.integers(-90_000, 90_000),
)


def expected(time: datetime, zone: str) -> dict[str, int]:
    local = time.replace(microsecond=0, tzinfo=timezone.utc).astimezone(ZoneInfo(zone))
    return {
        "hour": local.hour,
        "weekday": local.isoweekday(),
        "day": local.day,
        "month": local.month,
        "days": (local.date() - date(1970, 1, 1)).days,
    }


def read(column: Any, **options: Any) -> dict[str, list[float | None]]:
    """Return the parts of a frame's column of dates, by part."""
    schema = Schema(dates=(DateColumn(name="at", parts=ALL, **options),))
    return {
        name.removeprefix("at."): part.to_list()
        for name, part in read_frame({"at": column}, schema).items()
    }


def test_every_part_is_computed() -> None:
    assert tuple(PARTS) == ALL


@given(st.lists(TIMES | CHANGES, min_size=1, max_size=40), st.sampled_from(ZONES))
def test_parts_are_those_of_python(times: list[datetime], zone: str) -> None:
    """Test few times, whose offsets are looked up one by one, and many."""
    parts = read(times, zone=zone)
    rows = [expected(time, zone) for time in times]
    assert parts == {part: [row[part] for row in rows] for part in ALL}


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5))
def test_days_between_dates_are_those_of_python(pairs: list[tuple[datetime, datetime]]) -> None:
    schema = Schema(dates=(DateColumn(name="end", since=("begin",)), DateColumn(name="begin")))
    begin, end = ([time.replace(microsecond=0) for time in times] for times in zip(*pairs, strict=True))
    columns = read_frame({"begin": begin, "end": end}, schema)
    assert columns["end.since.begin"].to_list() == [
        (b - a) / timedelta(days=1) for a, b in zip(begin, end, strict=True)
    ]
    assert list(columns) == ["end.since.begin"]


TEXTS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", " %Y-%m-%d %H:%M:%SZ", "%Y-%m-%dT%H:%M+05:30")
FORMATS = ("%d/%m/%Y", "%Y%m%d", "%Y.%m.%d %H", "%H:%M:%S, %d. %m. %Y")


def in_column(cell: Any, unit: str, form: str) -> float | None:
    """Return the seconds since 1970 of a value in a column; None if the column is refused."""
    schema = Schema(
        dates=(
            DateColumn(name="at", since=("zero",), time_unit=unit, time_format=form),  # type: ignore[arg-type]
            DateColumn(name="zero"),
        )
    )
    bad = BadRows(None)
    try:
        frame = pl.DataFrame([read_column("at", [cell]), pl.Series("zero", [0])])
        days = Converter("log", np.arange(1), bad).columns(frame, schema)["at.since.zero"][0]
    except DataError:
        return None
    return None if bad.count else days * 86_400


@given(
    st.datetimes(datetime(1000, 1, 3), datetime(9999, 12, 29))
    | st.datetimes(datetime(1990, 1, 1), datetime(2099, 1, 1)),
    st.sampled_from([*TEXTS, *FORMATS, "date", "time", "zoned", "s", "ms"]),
)
def test_single_values_are_read_as_in_columns(time: datetime, kind: str) -> None:
    form, unit = kind if kind in FORMATS else "", "ms" if kind == "ms" else "s"
    time = time.replace(microsecond=0)
    cells = {
        "date": time.date(),
        "time": time,
        "zoned": time.replace(tzinfo=ZoneInfo("Asia/Kathmandu")),
        "s": (time - EPOCH) // timedelta(seconds=1),
        "ms": (time - EPOCH) // timedelta(milliseconds=1),
    }
    cell: Any = cells.get(kind, time.strftime(kind))
    seconds = read_plain_date(cell, unit, form)  # type: ignore[arg-type]
    if seconds is not None or kind not in ("s", "ms"):
        assert seconds == pytest.approx(in_column(cell, unit, form), abs=1e-3)
    else:
        assert not 1990 <= time.year < 2100, "left to the columns, which compare it with other units"


@given(st.text("0123456789-/: T.+Z%", max_size=20), st.sampled_from(["", *FORMATS]))
def test_text_that_a_column_refuses_is_not_read_as_a_single_value(text: str, form: str) -> None:
    seconds, column = read_plain_date(text, "s", form), in_column(text, "s", form)
    assert seconds is None or seconds == pytest.approx(column, abs=1e-3)


def test_a_missing_date_gives_missing_numbers() -> None:
    dates = (DateColumn(name="a", parts=("month",), since=("b",)), DateColumn(name="b"))
    for count in (1, 3, 2000):
        columns = read_frame(
            {"a": ["2024-02-29", None, None] * count, "b": [None, None, 0] * count}, Schema(dates=dates)
        )
        assert columns["a.month"].to_list() == [2, None, None] * count
        assert columns["a.since.b"].to_list() == [None, None, None] * count


def test_a_zone_of_the_column_and_offsets_are_converted_to_the_zone_of_the_schema() -> None:
    """A time in a summer night of Berlin, in a column with the zone of New York, in text with an
    offset, and in UTC.
    """
    summer = datetime(2024, 6, 30, 22, 30, tzinfo=timezone.utc)
    columns = (
        pl.Series([summer]).dt.convert_time_zone("America/New_York"),
        ["2024-06-30T18:30:00-04:00"],
        ["2024-06-30 22:30"],
        [summer],
        pl.Series([summer]).dt.cast_time_unit("ns").dt.replace_time_zone(None),
    )
    for column in columns:
        assert read(column, zone="Europe/Berlin") == {
            "hour": [0],
            "weekday": [1],
            "day": [1],
            "month": [7],
            "days": [19905],
        }


def test_times_finer_than_a_second_are_rounded_down() -> None:
    times = pl.Series(
        [datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime(2024, 1, 1, 0, 59, 59, 999_999)]
    )
    for column in (times, times.dt.to_string("%Y-%m-%d %H:%M:%S%.6f")):
        parts = read(column)
        assert (parts["hour"], parts["days"]) == ([23, 0], [-1, 19723])


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["2024-01-31", "soon"], "at soon row 2"),
        (["2024-01-31", "31/01/2024"], "at time_format"),
        ([10**14, 5], "at 9999"),
        ([-(10**14), 5], "at 9999"),
        ([1_700_000_000_000, 1_700_000_000_001], "at time_unit ms"),
        (pl.Series([True, False]), "at Boolean"),
        ([["2024-01-31"], []], "at List"),
        ([datetime(2024, 1, 1), "2024-01-31"], "at"),
    ],
)
def test_bad_dates_are_refused(column: list[Any], words: str) -> None:
    with refuses(DataError, words):
        read(column)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dates": [{"name": "a", "parts": ["hour"], "zone": "Europe/Atlantis"}]}, "zone Europe/Atlantis"),
        ({"dates": [{"name": "a", "zone": "/etc/passwd"}]}, "zone /etc/passwd"),
        ({"dates": [{"name": "a", "parts": ["hour", "hour"]}]}, "parts hour"),
        ({"dates": [{"name": "a"}, {"name": "a"}]}, "a several"),
        ({"dates": [{"name": "a", "since": ["b"]}]}, "since b"),
        ({"dates": [{"name": "a", "since": ["a"]}]}, "since a"),
        ({"dates": [{"name": "label", "parts": ["hour"]}]}, "label"),
        ({"dates": [{"name": "t", "parts": ["hour"], "time_unit": "ms"}], "time": "t"}, "schema.time_unit"),
        ({"dates": [{"name": "a" * 200, "parts": ["hour"]}]}, "200"),
        ({"dates": [{"name": "a", "parts": ["hour"]}], "label": "a.hour"}, "a.hour"),
        (
            {"dates": [{"name": "a", "parts": ["day"]}], "sparse": [{"name": "a.day", "kind": "multi"}]},
            "a.day single",
        ),
    ],
)
def test_wrong_entries_are_refused(options: dict[str, Any], words: str) -> None:
    options |= {"dates": tuple(DateColumn(**date) for date in options["dates"])}
    options |= {"sparse": tuple(SparseFeature(**feature) for feature in options.get("sparse", ()))}
    with refuses(ConfigError, words):
        Schema(**options)


def test_features_are_dense_unless_the_schema_names_them() -> None:
    dates = (DateColumn(name="a", parts=("hour", "month", "day"), since=("b",)), DateColumn(name="b"))
    dense, sparse = (DenseFeature(name="a.month"), DenseFeature(name="x")), (SparseFeature(name="a.hour"),)
    schema = Schema(dates=dates, dense=dense, sparse=sparse, label=LabelRule(column="y", at_least=1))
    assert [(feature.name, feature.transform) for feature in schema.dense] == [
        ("a.month", "log1p"),
        ("x", "log1p"),
        ("a.day", "none"),
        ("a.since.b", "none"),
    ]
    assert schema.scored_columns == ("x", "a", "b")
    assert replace(schema) == schema
    assert not schema.reduced().names
    columns = read_frame({"x": [1], "a": ["2024-05-31 13:00"], "b": [0], "y": [1]}, schema)
    assert columns["a.hour"].to_list() == [13]
    assert columns["a.hour"].dtype == pl.Int64
