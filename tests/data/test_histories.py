"""Compare the histories of `prepare`, of scored rows and of later logs with a loop over all rows of
a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.data.column_names import ROW, SPLIT
from stratarec.data.prepare.partition import Partition
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.user_history import Events
from stratarec.errors import ConfigError

FIRST, LAST = -(2**63), 2**63 - 1
TIMES = st.one_of(st.integers(0, 6), st.sampled_from([FIRST, FIRST + 1, LAST - 1, LAST]))
ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, "u", "v", "w"]),
        TIMES,
        st.sampled_from([0, 1, None]),
        st.sampled_from([None, 1, 2, 3]),
    ),
    max_size=25,
)
COLUMNS = {"user": pl.String, "time": pl.Int64, "label": pl.UInt8, "item": pl.Int64}


def schema(length: int, within: str, unit: str = "s") -> Schema:
    history = {"kind": "history", "of": "item"}
    features = (
        SparseFeature(name="item"),
        SparseFeature(name="all", **history),  # type: ignore[arg-type]
        SparseFeature(name="some", **history, max_length=length, within=within),  # type: ignore[arg-type]
    )
    return Schema(sparse=features, user="user", time="time", time_unit=unit)  # type: ignore[arg-type]


def reference(log: list[tuple[Any, ...]], row: tuple[Any, ...], length: int, within: float) -> list[int]:
    """Return the history of a row: the items of events before it, by time and then in the order of
    the log.
    """
    user, time = row[:2]
    earlier = [
        (when, place, item)
        for place, (who, when, label, item) in enumerate(log)
        if who == user is not None
        and label != 0
        and item is not None
        and when < time
        and time - when <= within
    ]
    return [item for _, _, item in sorted(earlier)][-length:]


def references(
    log: list[tuple[Any, ...]], rows: list[tuple[Any, ...]], length: int, within: int | None
) -> Iterator[Any]:
    for row in rows:
        yield (
            reference(log, row, 50, float("inf")),
            reference(log, row, length, float("inf") if within is None else within),
        )


@given(ROWS, ROWS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))
def test_histories_are_those_of_a_loop(
    log: list[tuple[Any, ...]], others: list[tuple[Any, ...]], length: int, within: int | None
) -> None:
    columns = schema(length, "" if within is None else f"{within}s")
    frame, scored = (pl.DataFrame(rows, COLUMNS, orient="row") for rows in (log, others))
    for rows in (frame, scored):
        actual = Events([frame[:3], frame[3:]], columns).histories(rows)
        expected = list(references(log, rows.rows(), length, within))
        assert list(zip(actual["all"].to_list(), actual["some"].to_list(), strict=True)) == expected
    # A partition has only rows with users. Their order in its frame is arbitrary, and their numbers
    # have the log's.
    known = [row for row in log if row[0] is not None]
    numbered = pl.DataFrame(known, COLUMNS, orient="row").with_row_index(ROW).cast({ROW: pl.Int64})
    partition = Partition(
        numbered.sample(fraction=1, shuffle=True, seed=1).with_columns(pl.lit(0).alias(SPLIT)), columns
    )
    expected = list(references(log, [known[row] for row in partition.frame[ROW]], length, within))
    windows = [partition.windows[name].lists(name).to_list() for name in ("all", "some")]
    assert list(zip(*windows, strict=True)) == expected
    # Later rows have the same histories if only the events that a data set stores are known.
    events = partition.events().with_columns(pl.lit(None, pl.UInt8).alias("label"))
    later = scored.filter(pl.col("time") > (frame["time"].max() if len(frame) else FIRST))
    full, stored = (Events([part], columns).histories(later) for part in (frame, events))
    assert all(stored[name].to_list() == full[name].to_list() for name in full)
    most = {"u": 0, "v": 0, "w": 0}
    for user in events["user"]:
        most[user] += 1
    assert max(most.values()) <= 50 + length


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_limit_of_age_is_in_the_unit_of_the_times(unit: str) -> None:
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = [0, 1, 60 * scale - 1, 60 * scale, 60 * scale + 1]
    log = [("u", time, 1, place) for place, time in enumerate(times)]
    frame = pl.DataFrame(log, COLUMNS, orient="row")
    lists = Events([frame], schema(9, "1m", unit)).histories(frame)["some"].to_list()
    assert lists[-2:] == [[0, 1, 2], [1, 2, 3]]


def test_wrong_limits_of_age_name_the_field() -> None:
    feature = schema(1, "1d").histories[1]
    for within, expected in (("30", "90s, 30m"), ("1000000w", "ns")):
        with refuses(ConfigError, f"some within {within} {expected}"):
            schema(1, within, "ns")
    for changes in ({"kind": "sequence"}, {"kind": "multi", "of": ""}):
        with refuses(ConfigError, f"some within {changes['kind']}"):
            replace(feature, **changes)  # type: ignore[arg-type]
    with refuses(ConfigError, "all schema.time"):
        replace(schema(1, "1d"), time="")
    with refuses(ConfigError, "data.source.history_within soon"):
        ClicksConfig(history_within="soon")
    assert schema(1, "1d").inputs() != schema(1, "2d").inputs()
