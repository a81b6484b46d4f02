"""Test that `init` reads logs in the shape of public logs as their owners would, or says what it
cannot know.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pydantic
import pytest
from cli.logs.corpus import LOGS
from cli.logs.report import judge, table

from errors import refuses
from stratarec.cli.init.draft import content_of
from stratarec.cli.init.guess import Guesses, guess
from stratarec.cli.init.sample import LogSample
from stratarec.cli.init.times import as_times
from stratarec.data.data_quality import alone
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError, DataError

ROWS = 2000
RIGHT = 0.95
"""Minimum share of columns that are read as their owner would."""


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_roles_are_those_that_owners_give(tmp_path: Path, every: int) -> None:
    assert len(LOGS) >= 80
    verdicts = [verdict for log in LOGS[::every] for verdict in judge(log, tmp_path)]
    wrong = [verdict for verdict in verdicts if verdict.outcome == "wrong"]
    assert not wrong, "\n".join(
        f"{each.log}: {each.column} is {each.role}, read as {each.read}" for each in wrong
    )
    assert sum(verdict.outcome == "right" for verdict in verdicts) >= RIGHT * len(verdicts), "\n".join(
        table(verdicts)
    )


def guesses_of(label: str = "click", **columns: object) -> Guesses:
    """Guess the roles of columns of a log of clicks."""
    draw = np.random.default_rng(0)
    log = {
        "user_id": draw.integers(0, 300, ROWS),
        "item_id": draw.integers(0, 90, ROWS),
        "click": draw.integers(0, 2, ROWS),
    }
    frame = pl.DataFrame({**log, **columns})
    return guess(LogSample(paths=("log.csv",), kind="csv", frame=frame, total=ROWS), label)


def reason(guesses: Guesses, name: str) -> str:
    return next(each.reason for each in guesses.columns if each.name == name)


def role(guesses: Guesses, name: str) -> str:
    return next(each.role for each in guesses.columns if each.name == name)


DRAW = np.random.default_rng(1)
EVENTS = 1_700_000_000 + np.sort(DRAW.integers(0, 20 * 86_400, ROWS))
OWNERS = np.random.default_rng(0).integers(0, 300, ROWS)
"""The users in `guesses_of`."""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("file_bytes", np.exp(DRAW.uniform(8, 21.5, ROWS)).astype(int)),
        ("followers", np.exp(DRAW.normal(9, 3, ROWS)).astype(int)),
        ("micros", np.where(DRAW.random(ROWS) < 0.6, 0, np.exp(DRAW.normal(16, 2, ROWS))).astype(int)),
        ("x", np.where(DRAW.random(ROWS) < 0.999, DRAW.integers(0, 100, ROWS), 2**40)),
        ("x", DRAW.integers(1_000_000_000, 1_900_000_000, ROWS)),
        ("views_ms", DRAW.integers(700_000_000_000, 1_900_000_000_000, ROWS)),
    ],
)
def test_amounts_are_no_times(name: str, values: np.ndarray) -> None:
    guesses = guesses_of(**{name: values})
    assert guesses.time is None
    assert role(guesses, name) in ("dense", "sparse")


@pytest.mark.parametrize("form", ["seconds", "%Y-%m-%d", "%Y%m%d"])
@pytest.mark.parametrize("with_events", [False, True])
def test_a_property_of_users_is_not_the_time_of_rows(form: str, with_events: bool) -> None:
    joined = np.datetime64("2019-01-01", "s") + DRAW.integers(0, 10**8, 300)[OWNERS]
    values = [str(day)[:10] for day in joined] if form == "%Y-%m-%d" else joined.astype(np.int64)
    values = [int(str(day)[:10].replace("-", "")) for day in joined] if form == "%Y%m%d" else values
    guesses = guesses_of(created_at=values, **({"ts": EVENTS} if with_events else {}))
    assert role(guesses, "created_at") in ("ignored", "date")
    assert "a property of user_id" in reason(guesses, "created_at")
    assert [each.name for each in guesses.of("time")] == ["ts"] * with_events


@pytest.mark.parametrize("name", ["t", "column_5", "x"])
def test_numbers_are_times_by_the_order_of_rows_or_the_rhythm_of_days(name: str) -> None:
    hours = DRAW.choice(
        24, ROWS, p=np.repeat([0.01, 0.07, 0.045], 8) / np.repeat([0.01, 0.07, 0.045], 8).sum()
    )
    shuffled = (
        1_700_006_400 + DRAW.integers(0, 30, ROWS) * 86_400 + hours * 3600 + DRAW.integers(0, 3600, ROWS)
    )
    for values in (EVENTS, shuffled):
        assert [each.name for each in guesses_of(**{name: values}).of("time")] == [name]
    assert "in order of time" in reason(guesses_of(**{name: EVENTS}), name)


def test_of_equal_times_the_finest_is_chosen() -> None:
    days = [str(np.datetime64(int(each), "s"))[:10] for each in EVENTS]
    assert [each.name for each in guesses_of(date=days, time_ms=EVENTS * 1000).of("time")] == ["time_ms"]


@pytest.mark.parametrize(
    "name",
    ["visitor_id", "visitorid", "memberid", "ClientId", "reviewerID", "user_id:token", "household_key"],
)
def test_ids_of_users_are_users_however_they_are_written(name: str, tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {name: OWNERS, "item": DRAW.integers(0, 90, ROWS), "label": DRAW.integers(0, 2, ROWS)}
    )
    sample = LogSample(paths=("log.csv",), kind="csv", frame=frame, total=ROWS)
    assert [each.name for each in guess(sample).of("user")] == [name]


def test_a_second_id_that_returns_is_a_category_and_one_that_does_not_is_left_out() -> None:
    guesses = guesses_of(
        account_id=DRAW.integers(0, 100, ROWS),
        visit_id=np.arange(ROWS) // 4,
        ts=EVENTS,
        request_id=np.arange(ROWS) // 3,
    )
    assert role(guesses, "account_id") == "sparse"
    assert [each.name for each in guesses.of("session")] == ["visit_id"]
    assert role(guesses, "request_id") == "ignored"
    assert "do not return" in reason(guesses, "request_id")


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("%A, %d-%b-%y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT"),
        ("%Y%m%dT%H%M%SZ", "%Y%m%dT%H%M%SZ"),
        ("%d/%m/%Y", "%d/%m/%Y"),
        ("%m-%d-%y", "%m-%d-%y"),
        ("%Y:%m:%d %H:%M:%S", "%Y:%m:%d %H:%M:%S"),
        ("[%d/%b/%Y:%H:%M:%S +0000]", "[%d/%b/%Y:%H:%M:%S %z]"),
        ("%Y-%m-%d %H:%M:%S,250", "%Y-%m-%d %H:%M:%S,%3f"),
        ("%Y-%m-%d %H:%M:%S+02", "%Y-%m-%d %H:%M:%S%#z"),
        ("%d.%m.%Y %H Uhr", "%d.%m.%Y %H Uhr"),
        ("%Y-%m-%dT%H:%M:%S[Europe/Berlin]", "%Y-%m-%dT%H:%M:%S[Europe/Berlin]"),
        ("%Y/%m/%d", "%Y/%m/%d"),
        ("%a %b %d %H:%M:%S +0000 %Y", "%a %b %d %H:%M:%S %z %Y"),
        ("%I:%M %p, %d %B %Y", "%I:%M %p, %d %B %Y"),
        ("%Y-%m-%d %H:%M:%S", ""),
        ("%Y%m%d%H%M%S250", "%Y%m%d%H%M%S%3f"),
    ],
)
def test_forms_are_built_from_the_fields_of_dates(form: str, read: str) -> None:
    moments = [np.datetime64(int(each), "s").astype(object) for each in EVENTS]
    odd = ["29/02/2023", "never", "0000-00-00"]
    text = [moment.strftime(form) for moment in moments]
    for values in (text, [*text[:500], *odd, *text[500:]]):
        times = as_times(pl.Series("x", values))
        assert times is not None
        assert times.form == read
        assert times.unread == len(values) - ROWS
        assert all(part in times.odd for part in (odd[0], "3 rows are no times")) == (len(values) > ROWS)
        assert (
            abs(times.span.last - times.span.first - 20 * 86_400 * (1000 if "250" in form else 1)) < 10**8
        )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("time", "%H:%M:%S"),
        ("date", "%Y-%m"),
        ("x", "%d. %b %Y um %H:%M Uhr früh"),
        ("at", "%d. Maerz %Y"),
        ("x", "%Y-%m-%d %H:%M:%S {zone}"),
        ("day", "%Y-W%W"),
    ],
)
def test_what_looks_like_times_and_cannot_be_read_is_left_out_with_the_form_to_write(
    name: str, form: str
) -> None:
    moments = [np.datetime64(int(each), "s").astype(object) for each in EVENTS]
    text = [f"{moment:{form}}".format(zone=("CET", "CEST")[moment.day % 2]) for moment in moments]
    text = [each.replace("Maerz", ("März", "Mai")[row % 2]) for row, each in enumerate(text)]
    guesses = guesses_of(**{name: text})
    assert guesses.time is None or "um %H" in guesses.time.form
    assert role(guesses, name) == ("ignored" if guesses.time is None else "time")
    if guesses.time is None:
        assert "write them as 2023-11-14 22:13:20" in reason(guesses, name)


@pytest.mark.parametrize(("odd", "last"), [(0, ""), (2_790_000_000, "2023-12-04"), (None, "")])
def test_one_odd_stamp_leaves_the_split_by_time(
    odd: int | None, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    times = EVENTS.copy()
    times[7] = times[7] if odd is None else odd
    frame = pl.DataFrame(
        {"time": times, "item": DRAW.integers(0, 9, ROWS), "click": DRAW.integers(0, 2, ROWS)}
    )
    frame.write_csv("log.csv")
    content = content_of(("log.csv",))
    split = content["data"]["split"]
    assert split["by"] == "time"
    assert split.get("last", "")[:10] == last
    dataset: Dataset = prepare(pydantic.TypeAdapter(PrepareConfig).validate_python(content["data"]))
    counts = [dataset.samples(name) for name in ("train", "valid", "test")]
    assert sum(counts) == ROWS - bool(last)
    assert min(counts) > 0.05 * ROWS


def test_the_last_time_of_a_split_is_checked() -> None:
    for wrong in (
        {"by": "fraction", "last": "2023-11-14"},
        {"by": "time", "valid": "1d", "test": "1d", "last": "now"},
    ):
        with pytest.raises(ConfigError, match=r"data\.split\.last"):
            SplitConfig(**wrong)  # type: ignore[arg-type]


def test_an_auc_of_a_column_with_gaps_is_at_most_one() -> None:
    positive = pl.Series(np.arange(400) % 4 > 0)
    assert (
        0.5
        <= alone(pl.Series([f"words {'9' if row == 3 else ''} {row:x}" for row in range(400)]), positive)
        <= 1
    )


def test_codes_that_begin_with_three_letters_are_no_amounts_of_a_currency(tmp_path: Path) -> None:
    songs = DRAW.integers(0, 300, ROWS)
    columns = {
        "user_id": DRAW.integers(0, 300, ROWS),
        "isrc": [f"TWA{song % 90:02d}{2000 + song % 17}{song:05d}" for song in songs],
        "song_len": 120_000 + songs * 523,
        "lang": np.array([3.0, 17.0, 31.0, -1.0])[songs % 4],
        "price": [f"EUR{song}.50" for song in songs],
        "click": DRAW.integers(0, 2, ROWS),
    }
    pl.DataFrame(columns).write_csv(tmp_path / "log.csv")
    schema = content_of((str(tmp_path / "log.csv"),))["data"]["source"]["schema"]
    assert [each["name"] for each in schema["dense"]] == ["song_len", "price", "lang.number"]
    assert [each["name"] for each in schema["sparse"]] == ["isrc", "lang", "user_id"]


def test_small_numbers_are_not_the_items_of_a_history() -> None:
    viewed = [(DRAW.zipf(1.4, 9) % 350).tolist() for _ in range(ROWS)]
    guesses = guesses_of(
        level=DRAW.integers(0, 9, ROWS), sku=DRAW.integers(0, 350, ROWS), viewed_skus=viewed
    )
    assert "values of sku" in reason(guesses, "viewed_skus")
    assert "values of" not in reason(
        guesses_of(level=DRAW.integers(0, 9, ROWS), viewed_skus=viewed), "viewed_skus"
    )


def test_a_flag_is_no_label_beside_a_column_of_events(tmp_path: Path) -> None:
    events = np.array(["view", "view", "cart", "purchase"])[DRAW.integers(0, 4, ROWS)]
    frame = pl.DataFrame({"user_id": DRAW.integers(0, 300, ROWS), "is mobile": DRAW.random(ROWS) < 0.6})
    path = tmp_path / "log.parquet"
    frame.with_columns(event_type=events).write_parquet(path)
    with refuses(DataError, "is mobile event_type --label event_type=purchase"):
        content_of((str(path),))
    frame.write_parquet(path)
    assert content_of((str(path),))["data"]["source"]["schema"]["label"] == "is mobile"
