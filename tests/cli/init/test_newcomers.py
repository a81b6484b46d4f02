"""Test `init` on realistic logs: each draft can be prepared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from errors import missing
from stratarec.cli import main
from stratarec.cli.init.draft import draft
from stratarec.cli.init.guess import guess
from stratarec.cli.init.sample import read_sample
from stratarec.cli.init.times import as_times
from stratarec.data.data_quality import find_leak
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DataError
from stratarec.recipe import Recipe

ROWS = 1200
START = datetime(2023, 11, 1)
Columns = dict[str, Sequence[Any]]


def moments(form: str, seconds: int = 30 * 86_400) -> list[str]:
    """Return times in order."""
    steps = np.sort(np.random.default_rng(1).integers(0, seconds, ROWS))
    return [(START + timedelta(seconds=int(step))).strftime(form) for step in steps]


def picks(values: Sequence[Any], seed: int = 2) -> list[Any]:
    return [values[place] for place in np.random.default_rng(seed).integers(0, len(values), ROWS)]


def skewed(most: int, seed: int = 3) -> list[int]:
    """Return codes in no particular order, some of them frequent."""
    draws = np.random.default_rng(seed)
    return draws.permutation(most)[np.minimum(draws.zipf(1.3, ROWS), most - 1)].tolist()  # type: ignore[no-any-return]


CLICKS = (np.random.default_rng(0).random(ROWS) < 0.3).astype(int).tolist()
WORDS = [("no", "yes")[click] for click in CLICKS]


def coupons() -> Columns:
    sent = moments("%d.%m.%Y")
    return {
        "customer_id": picks(range(300)),
        "coupon_id": picks(range(60), 5),
        "sent": sent,
        "redeemed_on": [day if click else "" for day, click in zip(sent, CLICKS, strict=True)],
        "paid": [f"{1 + row % 50}.5" if click else "" for row, click in enumerate(CLICKS)],
        "basket": [f"{value:.2f}" for value in np.random.default_rng(4).gamma(3, 20, ROWS)],
        "redeemed": CLICKS,
    }


def census() -> Columns:
    return {
        "age": picks(range(17, 90)),
        "workclass": picks(["Private", "State-gov", "?"]),
        "fnlwgt": np.random.default_rng(5).integers(12_285, 60_000, ROWS).tolist(),
        "sex": picks(["Male", "Female"], 6),
        "income": [("<=50K", ">50K")[click] for click in CLICKS],
    }


def talking() -> Columns:
    return {
        "ip": picks(range(1, 5000), 7),
        "app": skewed(400),
        "os": skewed(500, 8),
        "channel": skewed(300, 9),
        "click_time": moments("%Y-%m-%d %H:%M:%S"),
        "attributed_time": [("", "2023-12-01 10:00:00")[click] for click in CLICKS],
        "is_attributed": CLICKS,
    }


def avazu() -> Columns:
    return {
        "id": [str(10**19 + row * 7) for row in range(ROWS)],
        "click": CLICKS,
        "hour": moments("%y%m%d%H"),
        "C14": skewed(300),
        "device": [str(2**64 + value) for value in picks(range(80))],
    }


def money() -> Columns:
    draws = np.random.default_rng(6)
    return {
        "shop": picks(range(50)),
        "price": [f"${value:,.2f}" for value in draws.gamma(2, 900, ROWS)],
        "sold": [f"{value:,}" for value in draws.integers(0, 9000, ROWS)],
        "wait": [
            "NA" if row % 5 == 0 else f"{value:.1f}" for row, value in enumerate(draws.gamma(2, 9, ROWS))
        ],
        "country": picks(["NL", "NA", "DE"]),
        "charges": [" " if row % 9 == 0 else str(row) for row in range(ROWS)],
        "clicked": CLICKS,
    }


# Name, separator, columns and options; then the expected roles, and texts in the draft or in the
# output.
CASES: list[tuple[str, str, Callable[[], Columns], list[str], dict[str, str], list[str]]] = [
    ("coupons", ",", coupons, [],
     {"customer_id": "user", "coupon_id": "sparse", "sent": "time", "redeemed_on": "ignored", "paid": "ignored",
      "basket": "dense", "redeemed": "label"},
     ["time_format: '%d.%m.%Y'", "#   dense: - {name: paid}  # filled only where redeemed is "
                                 "1: known only afterwards?",
      "#   dates: - {name: redeemed_on, parts: [month], time_format: '%d.%m.%Y'}  # filled "
      "only where redeemed is 1",
      "coupon_id_history"]),
    ("census", ", ", census, [],
     {"age": "dense", "workclass": "sparse", "fnlwgt": "dense", "sex": "sparse", "income": "label"},
     ["label: {column: income, equals: '>50K'}", "is taken as 1, '<=50K' as 0"]),
    ("census", ", ", census, ["--label", "income=<=50K"],
     {"age": "dense", "workclass": "sparse", "fnlwgt": "dense", "sex": "sparse", "income": "label"},
     ["label: {column: income, equals: <=50K}"]),
    ("bank", ";", lambda: {"job": picks(["admin.", "retired"]), "rate": picks([1.1, -1.8]), "y": WORDS}, [],
     {"job": "sparse", "rate": "dense", "y": "label"}, ["label: {column: y, equals: 'yes'}", "'yes' ("]),
    ("talking", ",", talking, [],
     {"ip": "sparse", "app": "sparse", "os": "sparse", "channel": "sparse", "click_time": "time",
      "attributed_time": "ignored", "is_attributed": "label"}, ["filled only where is_attributed is 1"]),
    ("avazu", ",", avazu, [],
     {"id": "ignored", "click": "label", "hour": "time", "C14": "sparse", "device": "sparse"},
     ["time_format: '%y%m%d%H'", "{name: device}"]),
    ("hours", ",", lambda: {"ts": moments("%Y%m%d%H"), "ad": picks(range(70)), "label": CLICKS}, [],
     {"ts": "time", "ad": "sparse", "label": "label"}, ["time_format: '%Y%m%d%H'", " (2023-11-01 "]),
    ("european", ",", lambda: {"when": moments("%d/%m/%Y %H:%M"), "customer": picks(["new", "vip", "back"]),
                               "page": picks(range(90)), "label": CLICKS}, [],
     {"when": "time", "customer": "sparse", "page": "sparse", "label": "label"}, ["time_format: '%d/%m/%Y "
                                                                                  "%H:%M'"]),
    ("words", ",", lambda: {"day": moments("%b %d, %Y"), "page": picks(range(90)), "label": CLICKS}, [],
     {"day": "time", "page": "sparse", "label": "label"}, ["time_format: '%b %d, %Y'"]),
    ("index", ",", lambda: {"": range(ROWS), "user_id": picks(range(99)), "clicked": CLICKS, "x": picks([1, 2])}, [],
     {"(column 1)": "ignored", "user_id": "user", "clicked": "label", "x": "sparse"},
     ["no usable name in the header; numbers the rows like an index"]),
    ("money", ",", money, [],
     {"shop": "sparse", "price": "dense", "sold": "dense", "wait": "dense", "country": "sparse",
      "charges": "dense", "clicked": "label"},
     ["nulls: [' ', NA]  # mean a missing value, in every column", "{name: price, decimal: "
                                                                   ".}  # numbers written as"]),
    ("titanic", ",", lambda: {"Ticket Class": picks([1, 2, 3]), "Fare Paid": picks([7.25, 8.5, 71.3]),
                              "Survived Trip": [("False ", " True")[click] for click in CLICKS]}, [],
     {"Ticket Class": "sparse", "Fare Paid": "dense", "Survived Trip": "label"}, ["label: Survived Trip"]),
    ("alone", ",", lambda: {"page": picks(range(90)), "label": CLICKS}, [], {"page": "sparse", "label": "label"},
     ["kind: ensemble"]),
    ("gaps", ",", lambda: {"item": picks(range(40)), "label": ["NA", *CLICKS[1:]]}, ["--label", "label"],
     {"item": "sparse", "label": "label"}, ["on_bad_row: skip  # sampled rows without a label: 1"]),
]  # fmt: skip


def write(path: Path, mark: str, columns: Columns) -> None:
    quoted = {
        name: [f'"{cell}"' if mark in str(cell) else str(cell) for cell in cells]
        for name, cells in columns.items()
    }
    lines = [mark.join(columns), *(mark.join(row) for row in zip(*quoted.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0], *case[3]]))
def test_a_new_users_log_is_drafted_and_prepared(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, mark, columns, options, expected, texts = case
    monkeypatch.chdir(tmp_path)
    write(tmp_path / f"{name}.csv", mark, columns())
    assert {
        each.name: each.role for each in guess(read_sample((f"{name}.csv",)), *options[1:]).columns
    } == expected
    assert main(["init", f"{name}.csv", *options]) == 0
    draft = Path(f"{name}.yaml").read_text() + capsys.readouterr().out
    for text in texts:
        assert text in draft
    assert main(["prepare", "-q", f"{name}.yaml"]) == 0
    dataset = Dataset.open(f"data/{name}")
    counts = [dataset.label_counts(split)[dataset.schema.label_column] for split in dataset.splits]
    other = any("<=" in option for option in options)
    known = len(CLICKS) - (name == "gaps")
    ones = sum(CLICKS[len(CLICKS) - known :])
    assert sum(count.positives for count in counts) == (known - ones if other else ones)
    assert sum(count.known for count in counts) == known


@pytest.mark.parametrize(
    ("values", "form", "first", "reason"),
    [
        (["14/11/2023 22:13", "01/12/2023 08:05"], "%d/%m/%Y %H:%M", "2023-11-14 22:13:00", ""),
        (["11/14/2023 10:13 PM", "12/1/2023 8:05 am"], "%m/%d/%Y %I:%M %p", "2023-11-14 22:13:00", ""),
        (["14.11.23", "1.12.23"], "%d.%m.%y", "2023-11-14 00:00:00", ""),
        (
            ["2023-11-14 22:13:00 UTC", "2023-12-01 08:05:00 UTC"],
            "%Y-%m-%d %H:%M:%S UTC",
            "2023-11-14 22:13:00",
            "",
        ),
        (["November 14, 2023", "Dec 1, 2023"], "%B %d, %Y", "2023-11-14 00:00:00", ""),
        (["14-Nov-2023", "01-Dec-2023"], "%d-%b-%Y", "2023-11-14 00:00:00", ""),
        (
            ["14/Nov/2023:22:13:00 +0100", "14/Nov/2023:22:14:00 +0100"],
            "%d/%b/%Y:%H:%M:%S %z",
            "2023-11-14 21:13",
            "",
        ),
        # Ambiguous formats: the rows are sorted under only one of them, or the log is shorter under
        # one of them.
        (
            ["01/11/2023", "02/11/2023", "03/11/2023", "01/12/2023"],
            "%d/%m/%Y",
            "2023-11-01",
            "%m/%d/%Y also fits",
        ),
        (
            ["11/01/2023", "11/02/2023", "11/03/2023", "12/01/2023"],
            "%m/%d/%Y",
            "2023-11-01",
            "%d/%m/%Y also fits",
        ),
        ([2023111422, 2023120108], "%Y%m%d%H", "2023-11-14 22:00:00", ""),
        ([20231114, 20231201], "%Y%m%d", "2023-11-14 00:00:00", ""),
        ([14102100, 14102123], "%y%m%d%H", "2014-10-21 00:00:00", ""),
        ([202311142213, 202312010805], "%Y%m%d%H%M", "2023-11-14 22:13:00", ""),
        ([1700000000, 1700000500], "", "2023-11-14 22:13:20", "numbers in s since 1970"),
        (["2023-11-14 22:13:00", "2023-11-14T22:14:00Z"], "", "2023-11-14 22:13:00", "dates as text"),
        (
            [1700000003.365, 1700000037.0],
            "",
            "2023-11-14 22:13:23",
            "numbers in ms since 1970, from floats",
        ),
        ([1700000003.0, 1700000037.0], "", "2023-11-14 22:13:23", "numbers in s since 1970"),
        (["1700000003.365", "1700000037.0"], "", "2023-11-14 22:13:23", "numbers in ms since 1970"),
        (
            ["Tue, 14 Nov 2023 22:13:20 GMT", "Wed, 15 Nov 2023 22:13:20 GMT"],
            "%a, %d %b %Y %H:%M:%S GMT",
            "2023-11-14 22:13:20",
            "",
        ),
        (
            ["2023-11-14 22:13:20 +0100", "2023-11-15 22:13:20 +0100"],
            "%Y-%m-%d %H:%M:%S %z",
            "2023-11-14 21:13:20",
            "",
        ),
        ([3.5, 4.25], None, "", ""),
        ([12345678, 87654321], None, "", ""),
        (["1.2.3", "4.5.6"], None, "", ""),
        (["14/11/2023", "31/02/2023"], None, "", ""),
    ],
)
def test_times_are_read_in_their_format(
    values: list[Any], form: str | None, first: str, reason: str
) -> None:
    result = as_times(pl.Series("x", values))
    if form is None:
        assert result is None
        return
    assert result is not None
    assert result.form == form
    assert f"({first}" in str(result.span)
    assert reason in result.how
    assert ("also fits" in result.how) == ("also fits" in reason)


GENRES = ["Action", "Drama", "Comedy", "Science Fiction"]
TAGS = [[GENRES[at] for at in np.random.default_rng(row).permutation(4)[: row % 4]] for row in range(400)]
IDS = [
    [int(each) for each in np.random.default_rng(row).integers(1, 900, 1 + row % 6)] for row in range(400)
]


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    ("lists", "write_list"),
    [
        (TAGS, json.dumps),
        (TAGS, repr),
        (TAGS, ", ".join),
        (TAGS, "|".join),
        (TAGS, "^".join),
        (IDS, json.dumps),
        *(
            (IDS, lambda ids, mark=mark: mark.join(map(str, ids)))
            for mark in (" ", ",", "\x1d", "\x01", ";")
        ),
    ],
)
def test_lists_as_text_are_drafted_with_their_values(
    lists: list[Any], write_list: Any, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [write_list(each) for each in lists]
    frame = pl.DataFrame({"item": [row % 30 for row in range(400)], "tags": texts, "label": [0, 1] * 200})
    getattr(frame, {"csv": "write_csv", "parquet": "write_parquet", "jsonl": "write_ndjson"}[ending])(
        f"log.{ending}"
    )
    assert main(["init", "-q", f"log.{ending}"]) == 0
    assert main(["prepare", "-q", "log.yaml", "data.vocabulary.min_count=1"]) == 0
    values = set(Dataset.open("data/log").vocabulary("tags").values.to_list())
    everything = {str(each) for some in lists for each in some}
    assert values <= everything
    assert len(values) > 0.7 * len(everything)  # those of the training split


def test_decimals_and_padded_ids_are_drafted_correctly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    items = [Decimal(10**15 + each) for each in picks(range(40))]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(items, dtype=pl.Decimal(38, 0)),
            "price": pl.Series([each % 97 for each in items], dtype=pl.Decimal(10, 2)) / 4,
            "shop": [f"00{each}" if each % 2 else f"{each}" for each in picks(range(1, 9))],
            "tags": pl.Series([[each] for each in items], dtype=pl.List(pl.Decimal(38, 0))),
            "hash_id": pl.Series([each * 10**19 for each in items], dtype=pl.Decimal(38, 0)),
            "label": CLICKS,
        }
    )
    frame.write_parquet("log.parquet")
    frame.drop("tags").write_csv("other.csv")
    kinds = {each.name: each.role for each in guess(read_sample(("log.parquet",))).columns}
    assert kinds == {
        "item_id": "sparse",
        "price": "dense",
        "shop": "sparse",
        "tags": "list",
        "hash_id": "ignored",
        "label": "label",
    }
    for name in ("log.parquet", "other.csv"):
        assert main(["init", "-q", name]) == 0
        stem = Path(name).stem
        assert main(["prepare", "-q", f"{stem}.yaml"]) == 0
        dataset = Dataset.open(f"data/{stem}")
        assert set(dataset.vocabulary("item_id").values) == set(map(int, items))
        assert set(dataset.vocabulary("shop").values) == set(frame["shop"])


LABEL = np.random.default_rng(8).random(4000) < 0.1


@pytest.mark.parametrize(
    ("values", "text", "certain"),
    [
        (np.where(LABEL, 1.0, np.nan), "filled only where click is 1", True),
        (np.where(LABEL, np.nan, 1.0), "filled only where click is 0", True),
        (np.where(LABEL & (np.arange(4000) % 3 == 0), "x", ""), "filled only where click is 1", True),
        (
            np.where(LABEL, 5, 0) + np.arange(4000) % 3,
            "AUC 1.000 against click alone: determines the label",
            True,
        ),
        (
            np.argsort(np.argsort(LABEL, kind="stable"), kind="stable"),
            "AUC 1.000 against click alone",
            True,
        ),
        (
            np.where(LABEL, "b", np.where(np.arange(4000) % 2, "a", "c")),
            "AUC 1.000 against click alone",
            True,
        ),
        (
            [f"order-{at}" for at in np.argsort(np.argsort(LABEL, kind="stable"))],
            "AUC 1.000 against click alone",
            True,
        ),
        (
            np.random.default_rng(9).normal(LABEL * 2.6),
            "a leak, unless it is known before the event",
            False,
        ),
        (LABEL & (np.arange(4000) % 4 == 0), "True only where click is 1", True),
        (np.where(LABEL & (np.arange(4000) % 4 == 0), 1, 0), "1 only where click is 1", True),
        # Features that do not reveal the label, although they are strong, rare or unique.
        (np.random.default_rng(9).normal(LABEL * 1.5), "", False),
        (np.where(np.arange(4000) == int(np.argmax(LABEL)), 1.0, np.nan), "", False),
        (np.where(np.random.default_rng(9).random(4000) < 0.5, np.nan, 1.0), "", False),
        (np.arange(4000), "", False),
        (np.where(~LABEL & (np.arange(4000) % 9 == 0), 1, 0), "", False),
        (np.array([f"n{row}" for row in range(4000)]), "", False),
        (np.random.default_rng(9).integers(0, 1500, 4000), "", False),
    ],
)
def test_features_that_reveal_the_label_are_named(values: Any, text: str, certain: bool) -> None:
    result = find_leak(pl.Series("x", values), pl.Series(LABEL), "click")
    assert (result is not None) == bool(text)
    if result is not None:
        assert text in result.text
        assert result.certain is certain


HOUR, DAY = 3600, 86_400


def test_empty_texts_of_parquet_are_missing_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = ["" if not each else f"u{each}" for each in picks([0, *range(1, 200)] + [0] * 80)]
    log, recipe = tmp_path / "log.parquet", tmp_path / "log.yaml"
    pl.DataFrame({"user_id": users, "item": picks(["", "a", "b"], 4), "click": CLICKS}).write_parquet(log)
    assert main(["init", str(log), "-o", str(recipe)]) == 0
    assert "missing in 30% of rows" in capsys.readouterr().out
    assert main(["prepare", "-q", str(recipe), f"data.path={tmp_path / 'data'}"]) == 0
    assert Dataset.open(tmp_path / "data").vocabularies["item"].values == 2


def labels(tmp_path: Path, columns: Columns, *options: str) -> tuple[int, str]:
    """Run `init` on a log; return the exit code and the recipe."""
    for name in ("log.csv", "log.yaml"):
        (tmp_path / name).unlink(missing_ok=True)
    pl.DataFrame(columns).write_csv(tmp_path / "log.csv")
    code = main(["init", "-q", str(tmp_path / "log.csv"), "-o", str(tmp_path / "log.yaml"), *options])
    return code, (tmp_path / "log.yaml").read_text() if not code else ""


def test_rows_without_a_label_are_left_out_and_what_only_rows_with_one_have_is_no_feature(
    tmp_path: Path,
) -> None:
    won = (np.random.default_rng(5).random(ROWS) < 0.4).tolist()
    log = {
        "bid": picks(range(1, 90)), "publisher": picks([f"p{number}" for number in range(20)], 4),
        "price": [f"{1 + row % 7}.5" if wins else "" for row, wins in enumerate(won)], "won": list(map(int, won)),
        "clicked": [str(click) if wins else "" for click, wins in zip(CLICKS, won, strict=True)],
    }  # fmt: skip
    for options in ([], ["--label", "clicked"]):
        code, text = labels(tmp_path, log, *options)
        assert code == 0
        content = yaml.safe_load(text)
        schema = content["data"]["source"]["schema"]
        assert schema["label"] == "clicked"
        assert content["data"]["on_bad_row"] == "skip"
        used = {feature["name"] for feature in (*schema["dense"], *schema["sparse"])}
        assert used == {"bid", "publisher"}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1" if click else "" for click in CLICKS], "fill them"),
        (["yes" if click else "" for click in CLICKS], "fill them"),
        (
            [f"2023-11-01 00:{row // 60:02}:{row % 60:02}" if CLICKS[row] else "" for row in range(ROWS)],
            "add a column",
        ),
        ([*CLICKS[1:], sum(CLICKS[1:])], "totals"),
    ],
    ids=["ones", "words", "times", "totals"],
)
@pytest.mark.parametrize("options", [[], ["--label", "click"]], ids=["searched", "named"])
def test_a_label_that_needs_a_change_of_the_log_is_an_error_that_names_it(
    cells: list[Any], message: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = labels(tmp_path, {"item": picks(range(40)), "click": cells}, *options)
    assert code == 2
    assert message in capsys.readouterr().err


def test_one_of_few_counts_is_no_total(tmp_path: Path) -> None:
    """The first row has as many orders as all others together."""
    orders = [2, 1, *[0] * (ROWS - 3), 1]
    code, text = labels(tmp_path, {"item": picks(range(40)), "orders": orders}, "--label", "orders")
    assert code == 0
    assert yaml.safe_load(text)["data"]["source"]["schema"]["label"] == {"column": "orders", "at_least": 1}


@pytest.mark.parametrize("option", ["", "rating"])
def test_infinite_ratings_are_refused(option: str, tmp_path: Path) -> None:
    pl.DataFrame({"item": picks(range(40)), "rating": picks([1.0, 4.0, 5.0, float("inf")])}).write_parquet(
        tmp_path / "log.parquet"
    )
    with pytest.raises(DataError, match="'rating' contains inf"):
        guess(read_sample((str(tmp_path / "log.parquet"),)), option)


def test_an_earlier_stage_is_proposed_as_the_label_only_if_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = [max(click, other) for click, other in zip(CLICKS, picks([0, 0, 1], 8), strict=True)]
    days = moments("%Y-%m-%d")
    log = {
        "item": picks(range(40)),
        "opened_on": [day if there else "" for day, there in zip(days, opened, strict=True)],
        "opened": opened,
        "click": CLICKS,
    }
    assert labels(tmp_path, log)[0] == 0
    assert "--label opened\n" in capsys.readouterr().out


TEXT = pl.DataFrame(
    {"item": picks(range(40)), "price": picks(["2.5", "3.25"], 9), "click": CLICKS}
).write_csv()


@pytest.mark.parametrize(
    ("front", "message"),
    [
        ("# exported\n# 2023-11-14\n\n", "line 1 exported 4"),
        ("#Version: 1.0\n", "line 1 Version 2"),
        ("sep=,\n", "line 1 sep=, 2"),
    ],
    ids=["comments", "version", "delimiter"],
)
def test_lines_before_the_header_are_named(
    front: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(front + TEXT)
    assert main(["init", str(log), "-o", str(tmp_path / "log.yaml")]) == 2
    assert not missing(f"log.csv {message}", capsys.readouterr().err)
    log.write_text("#" + TEXT)
    assert main(["init", str(log), "-o", str(tmp_path / "log.yaml")]) == 0


def test_repeated_headers_and_lines_with_too_many_fields_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, recipe = tmp_path / "log.csv", tmp_path / "log.yaml"
    log.write_text(TEXT + TEXT + "3,2,5,1\n" + "4,2,5,0\n")
    assert main(["init", str(log), "-o", str(recipe)]) == 0
    assert not missing("1 header 2 fields skips", capsys.readouterr().out)
    assert read_sample((str(log),)).is_complete
    content = yaml.safe_load(recipe.read_text())
    assert content["data"]["on_bad_row"] == "skip"
    dataset = prepare(
        Recipe.from_dict({**content, "data": {**content["data"], "path": str(tmp_path / "data")}}).data
    )
    assert sum(dataset.samples(split) for split in ("train", "valid", "test")) == 2 * ROWS


def test_a_header_that_names_all_columns_but_the_first_is_refused(tmp_path: Path) -> None:
    """R writes the number of a row in front of its values."""
    header, *lines = TEXT.splitlines()
    (tmp_path / "log.csv").write_text(
        "\n".join([header, *(f"{row},{line}" for row, line in enumerate(lines, 1)), ""])
    )
    with pytest.raises(DataError, match=r"log\.csv: every line has more fields than the 3 names"):
        read_sample((str(tmp_path / "log.csv"),))


def test_columns_of_a_log_of_many_files_have_one_type(tmp_path: Path) -> None:
    for day, zone in enumerate((None, "UTC", None)):
        times = pl.Series("t", [datetime(2024, 1, 1)] * 3).dt.replace_time_zone(zone)
        pl.DataFrame({"t": times, "click": [0, 1, 1]}).write_parquet(tmp_path / f"{day}.parquet")
    with pytest.raises(
        DataError, match=r"column 't' is Datetime.* in .*0\.parquet and .*UTC.* in .*1\.parquet"
    ):
        read_sample((str(tmp_path),))


def test_columns_that_are_no_text_name_no_split(tmp_path: Path) -> None:
    lists, times = picks([["a"], ["a", "b"], []]), picks([timedelta(minutes=1), timedelta(hours=1)], 3)
    log = pl.DataFrame({"item": picks(range(40)), "item_set": lists, "train": times, "click": CLICKS})
    log.write_parquet(tmp_path / "log.parquet")
    roles = {
        column.name: column.role for column in guess(read_sample((str(tmp_path / "log.parquet"),))).columns
    }
    assert roles == {"item": "sparse", "item_set": "list", "train": "ignored", "click": "label"}


def test_a_date_in_three_columns_is_named(tmp_path: Path) -> None:
    days = [START + timedelta(days=row // 20) for row in range(ROWS)]
    parts = {"year": [day.year for day in days], "month": [day.month for day in days]}
    columns = parts | {"day": [day.day for day in days], "item_id": skewed(40), "clicked": CLICKS}
    pl.DataFrame(columns).write_csv(tmp_path / "log.csv")
    guesses = guess(read_sample((str(tmp_path / "log.csv"),)))
    (day,) = (column for column in guesses.columns if column.name == "day")
    assert "a date with 'year' and 'month'" in day.reason
    _, _, drafted = draft((str(tmp_path / "log.csv"),), tmp_path / "log.yaml", "", None)
    (day,) = (column for column in drafted.columns if column.name == "day")
    assert day.reason.startswith("about 30 values, in order; a date with 'year'")
    assert day.reason.endswith("`init` splits by time")
    pl.DataFrame(columns | {"month": skewed(40, 7)}).write_csv(tmp_path / "other.csv")
    guesses = guess(read_sample((str(tmp_path / "other.csv"),)))
    assert not any("a date with" in column.reason for column in guesses.columns)


def test_delimiters_at_the_end_of_lines_but_not_of_the_header_are_named(tmp_path: Path) -> None:
    """The advice makes a log that can be read."""
    lines = pl.DataFrame({"item_id": skewed(40), "clicked": CLICKS}).write_csv().splitlines()
    path = tmp_path / "log.csv"
    path.write_text("\n".join([lines[0], *(f"{line}," for line in lines[1:])]) + "\n")
    with pytest.raises(DataError, match=r"lines end with the delimiter ','.*sed '1s/\$/,/'"):
        read_sample((str(path),))
    path.write_text("\n".join(f"{line}," for line in lines) + "\n")
    assert read_sample((str(path),)).frame.height == ROWS
    assert main(["init", str(path), "-o", str(tmp_path / "log.yaml")]) == 0
    assert main(["prepare", "-q", str(tmp_path / "log.yaml"), f"data.path={tmp_path / 'data'}"]) == 0
