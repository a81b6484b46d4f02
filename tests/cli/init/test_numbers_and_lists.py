"""Test what `init` makes of numbers and lists as people and programs write them, and that `prepare`
reads the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.cli import main
from stratarec.cli.init.features import Guess
from stratarec.cli.init.guess import Guesses, guess
from stratarec.cli.init.sample import read_sample
from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.frames import read_frame
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import LabelRule
from stratarec.errors import DataError
from stratarec.recipe import Recipe

ROWS = 2000
DRAWS = np.random.default_rng(0)
LABEL = DRAWS.integers(0, 2, ROWS)
ITEMS = [f"i{value}" for value in DRAWS.integers(1, 300, ROWS)]
AMOUNTS = np.round(DRAWS.lognormal(6, 2, ROWS), 2)


def drafted(
    folder: Path, column: Any, *, separator: str = ",", name: str = "x", kind: str = "csv"
) -> Guess:
    """Return the guess for a column `name` of a log that also has items and labels."""
    frame = pl.DataFrame({"item": ITEMS, name: column, "label": LABEL})
    path = folder / f"log.{kind}"
    if kind == "csv":
        frame.write_csv(path, separator=separator)
    else:
        frame.write_parquet(path)
    return next(each for each in guesses(path).columns if each.name == name)


def guesses(path: Path, label: str = "label") -> Guesses:
    return guess(read_sample((str(path),)), label)


def german(value: float, decimals: int = 2) -> str:
    return f"{value:,.{decimals}f}".translate(str.maketrans(",.", ".,"))


WRITTEN: dict[str, tuple[str, Callable[[float], str], float]] = {
    "english": (".", lambda value: f"{value:,.2f}", 1),
    "german": (",", german, 1),
    "decimal comma": (",", lambda value: f"{value:.2f}".replace(".", ","), 1),
    "euros after the number": (",", lambda value: f"{german(value)} €", 1),
    "dollars before the number": (".", lambda value: f"-${value:,.2f}", -1),
    "brackets": (".", lambda value: f"({value:,.2f})", -1),
    "Swiss francs": (".", lambda value: f"CHF {value:,.2f}".replace(",", "’"), 1),
    "brackets after the sign": (".", lambda value: f"$ ({value:,.2f})", -1),
    "percent": (",", lambda value: f"{value:.2f} %".replace(".", ","), 1),
    "no-break spaces": (",", lambda value: german(value).replace(".", "\u00a0"), 1),
    "spaces": (",", lambda value: german(value).replace(".", " "), 1),
    "thin spaces": (",", lambda value: german(value).replace(".", "\u202f"), 1),
    "kroner": (",", lambda value: f"{german(value)} kr.", 1),
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("form", WRITTEN)
def test_numbers_as_people_write_them_are_read_as_what_they_are(
    form: str, kind: str, tmp_path: Path
) -> None:
    decimal, write, sign = WRITTEN[form]
    texts = [write(value) for value in AMOUNTS]
    result = drafted(tmp_path, texts, kind=kind)
    assert (result.role, result.decimal) == ("dense", decimal), result.reason
    bad = BadRows(None)
    converter = Converter("log", np.arange(ROWS), bad, from_text=kind == "csv")
    assert converter.number(pl.Series("x", texts), decimal).to_list() == (sign * AMOUNTS).tolist()
    assert not bad.count


IDS = DRAWS.integers(0, 500, ROWS)
COLUMNS: list[tuple[str, Any, dict[str, str]]] = [
    ("x", [f"{value:,.0f}" for value in AMOUNTS], {"role": "dense", "decimal": "."}),
    ("x", [f"₹{value:,.0f}" for value in AMOUNTS], {"role": "dense", "decimal": "."}),
    ("x", [f"{value:,.0f}%" for value in AMOUNTS], {"role": "dense", "decimal": "."}),
    ("x", [german(value, 0) for value in AMOUNTS], {"role": "dense", "decimal": ","}),
    # measurements with three decimals
    ("x", [f"{value / 1000:.3f}" for value in AMOUNTS], {"decimal": ""}),
    ("x", [f"{value:.3g}" for value in AMOUNTS / 1e7], {"role": "dense"}),
    ("x", (DRAWS.pareto(0.7, ROWS) * 1).astype(np.int64), {"role": "dense"}),  # counts with a long tail
    ("x", (DRAWS.pareto(0.7, ROWS) * 3).astype(np.int64), {"role": "dense"}),
    # Ids from a wide range have no neighbours.
    ("x", DRAWS.integers(0, 1 << 29, 300)[np.minimum(DRAWS.zipf(1.3, ROWS), 300) - 1], {"role": "sparse"}),
    (
        "x",
        [",".join(map(str, DRAWS.integers(1, 999, DRAWS.integers(1, 4)))) for _ in ITEMS],
        {"role": "list"},
    ),
    ("x", [".".join(map(str, DRAWS.integers(1, 9, 3))) for _ in ITEMS], {"role": "sparse"}),
    (
        "product_id",
        [f"{value:,}" for value in DRAWS.integers(1, 9000, ROWS)],
        {"role": "sparse", "separator": ""},
    ),
    ("msisdn", [f"+4179{value:07}" for value in IDS], {"role": "sparse"}),
    ("userId", [f"{value}.0" for value in IDS], {"role": "user"}),
    (
        "x",
        [f"a={row % 7}&b={row % 5}&page={row % 9}" for row in range(ROWS)],
        {"role": "list", "separator": "&"},
    ),
]


@pytest.mark.parametrize(("name", "column", "expected"), COLUMNS)
def test_columns_are_read_as_what_they_are(
    name: str, column: Any, expected: dict[str, str], tmp_path: Path
) -> None:
    result = drafted(tmp_path, column, name=name)
    assert {field: getattr(result, field) for field in expected} == expected


def test_a_label_of_written_numbers_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"item": ITEMS, "rating": [f"{value},5" for value in LABEL]}).write_csv(
        tmp_path / "log.csv"
    )
    with pytest.raises(DataError, match=r"'rating' has numbers written as '[01],5'"):
        guesses(tmp_path / "log.csv", "")


def test_a_draft_with_written_numbers_has_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = [None if row % 9 == 0 else value for row, value in enumerate(AMOUNTS)]
    texts = ["n/a" if value is None else german(value) for value in numbers]
    moments = []
    for name, column in (("plain", numbers), ("written", texts)):
        pl.DataFrame({"item": ITEMS, "amount": column, "label": LABEL}).write_csv(f"{name}.csv")
        assert main(["init", f"{name}.csv", "-q"]) == 0
        recipe = Recipe.load(f"{name}.yaml")
        dataset = prepare(recipe.data)
        assert dataset.about.bad_rows == 0
        moments.append(dataset.about.moments["amount"])
    assert moments[0] == moments[1]
    # Frames to score are read as the log is: texts in the same form, or numbers.
    for rows in (2, 2000):
        frame = {"item": ITEMS[:rows], "amount": [None if text == "n/a" else text for text in texts[:rows]]}
        assert read_frame(frame, dataset.schema)["amount"].to_list() == numbers[:rows]
        assert (
            read_frame({**frame, "amount": numbers[:rows]}, dataset.schema)["amount"].to_list()
            == numbers[:rows]
        )
    with pytest.raises(
        DataError, match=r"row 2: column 'amount': got '1.5', expected a number with decimal mark ','"
    ):
        read_frame({"item": ["a", "b"], "amount": ["1,5", "1.5"]}, dataset.schema)


@pytest.mark.parametrize("most", [7, 97])
def test_ids_like_powers_of_ten_are_text(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    skus = [f"{DRAWS.integers(1, 10)}e{DRAWS.integers(0, most)}" for _ in range(ROWS)]
    assert drafted(tmp_path, skus, name="sku").role == "sparse"
    assert drafted(tmp_path, skus, name="digest").role == "sparse"
    assert main(["init", "log.csv", "-q"]) == 0
    recipe = Recipe.load(
        "log.yaml", ["data.vocabulary.min_count=1", "data.split.valid=0", "data.split.test=0"]
    )
    dataset = prepare(recipe.data)
    values = pl.read_parquet(next(dataset.path.glob("vocabulary/*digest.parquet")))["value"].drop_nulls()
    assert set(values) == set(skus)


def test_noise_without_repeats_is_no_category(tmp_path: Path) -> None:
    noise = {f"x{place}": DRAWS.integers(0, 26_000, ROWS) for place in range(30)}
    pl.DataFrame({**noise, "label": DRAWS.random(ROWS) < 0.3}).write_csv(tmp_path / "log.csv")
    assert {each.role for each in guesses(tmp_path / "log.csv").columns if each.name != "label"} == {
        "dense"
    }


@pytest.mark.parametrize(
    ("values", "least", "share"),
    [
        (np.round(DRAWS.lognormal(-0.2, 0.8, ROWS), 4), None, (0.3, 0.36)),
        (DRAWS.choice([1, 2, 3, 4, 5], ROWS), 4, (0.3, 0.5)),
        (DRAWS.choice([0, 0, 0, 1, 7], ROWS), 1, (0.3, 0.5)),
    ],
    ids=["long tail", "ratings", "counts"],
)
def test_a_threshold_leaves_rows_of_both_classes_and_says_how_many(
    values: Any, least: float | None, share: tuple[float, float], tmp_path: Path
) -> None:
    pl.DataFrame({"item": ITEMS, "watched": values}).write_csv(tmp_path / "log.csv")
    result = guesses(tmp_path / "log.csv", "watched")
    assert isinstance(result.label, LabelRule)
    assert result.label.at_least is not None
    positive = float((values >= result.label.at_least).mean())
    assert share[0] < positive < share[1]
    assert least in (None, result.label.at_least)
    assert f"{positive:.1%} of rows" in result.columns[1].reason


def test_paths_of_categories_are_one_category(tmp_path: Path) -> None:
    parts = (
        ["Home", "Sports & Games", "Books, Comics"],
        ["Garden tools", "Team balls"],
        ["Saws", "Pans and pots", "Nets"],
    )
    for mark in (" > ", ">", " / ", " » ", " -> "):
        paths = [
            mark.join(str(DRAWS.choice(part)) for part in parts[: DRAWS.integers(1, 4)])
            for _ in range(ROWS)
        ]
        assert drafted(tmp_path, paths).role == "sparse", mark
    assert drafted(tmp_path, [path.replace(" -> ", "|") for path in paths]).separator == "|"


VECTORS = np.random.default_rng(1).normal(size=(300, 6)).round(4)[DRAWS.integers(0, 300, ROWS)]


@pytest.mark.parametrize(
    "write",
    [
        lambda row: "[" + ", ".join(map(str, row)) + "]",
        lambda row: " ".join(map(str, row)),
        lambda row: "|".join(map(str, row)),
        lambda row: ";".join(f"{value:.3e}" for value in row),
        lambda row: ",".join(map(str, row)),
        str,
        lambda row: str((row * 100).astype(int).tolist()),
        lambda row: str((row > 0).astype(int).tolist()),
    ],
    ids=["JSON", "blanks", "bars", "exponents", "commas", "NumPy", "whole numbers", "flags"],
)
def test_vectors_as_text_are_left_out_with_advice(write: Callable[[Any], str], tmp_path: Path) -> None:
    result = drafted(tmp_path, [write(row) for row in VECTORS], name="emb")
    assert result.role == "ignored"
    assert result.reason.startswith("vectors of 6 numbers; write each as a column, such as emb_1 to emb_6")


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("csv", [f"{value:.1f} km" for value in AMOUNTS], "numbers with units ('km'), such as"),
        (
            "csv",
            [f"{value}{'KM'[row % 2]}" for row, value in enumerate(AMOUNTS)],
            "numbers with units ('K', 'M'), such",
        ),
        (
            "csv",
            [f"{value:.0f}k" if value > 50 else "50" for value in AMOUNTS],
            "numbers with units ('k'), such as",
        ),
        (
            "csv",
            [german(value) if row % 8 else "k.A." for row, value in enumerate(AMOUNTS)],
            "numbers, but 'k.A.' in 25",
        ),
        (
            "csv",
            [f"{'$€'[row % 2]}{value:,.2f}" for row, value in enumerate(AMOUNTS)],
            "several currencies",
        ),
        ("parquet", pl.Series(VECTORS.tolist()), "vectors of 6 numbers"),
        ("parquet", pl.Series(VECTORS.tolist(), dtype=pl.Array(pl.Float32, 6)), "vectors of 6 numbers"),
        (
            "parquet",
            [row[: 1 + place % 6].tolist() for place, row in enumerate(VECTORS)],
            "numbers with fractions",
        ),
        ("parquet", [[row.tolist()] for row in VECTORS], "lists of lists"),
        (
            "parquet",
            [f'{{"a": 1, "b": {row}}}' for row in range(ROWS)],
            "objects; write each of their fields",
        ),
        ("parquet", [f"[[{row % 7}, 2], [3]]" for row in range(ROWS)], "lists of lists"),
        (
            "parquet",
            [f"Action:0.{row % 9}|Comedy:0.5" for row in range(ROWS)],
            "pairs of a value and its weight",
        ),
    ],
)
def test_other_values_are_left_out_with_advice(kind: str, values: Any, reason: str, tmp_path: Path) -> None:
    result = drafted(tmp_path, values, kind=kind)
    assert result.role == "ignored"
    assert reason in result.reason


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("mark", ["\x01", "\x1f", "^"])
def test_files_of_hive_and_rare_delimiters(
    mark: str, has_header: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tags = ["\x02".join(f"t{value}" for value in DRAWS.integers(0, 20, 1 + row % 4)) for row in range(ROWS)]
    prices = ["\\N" if row % 9 == 0 else f"{value}" for row, value in enumerate(AMOUNTS)]
    rows = [mark.join(map(str, row)) for row in zip(ITEMS, tags, prices, LABEL, strict=True)]
    header = [mark.join(["item", "tags", "price", "click"])] * has_header
    Path("log.txt").write_text("\n".join([*header, *rows]) + "\n")
    assert main(["init", "log.txt", "-q"]) == 0
    recipe = Recipe.load("log.yaml")
    schema = recipe.data.source.schema  # type: ignore[union-attr]
    assert [feature.separator for feature in schema.sparse] == ["", "\x02"]
    assert len(schema.dense) == 1
    dataset = prepare(recipe.data)
    assert sum(dataset.samples(split) for split in dataset.splits) == ROWS


def test_a_link_without_a_target_and_a_long_first_row(tmp_path: Path) -> None:
    rows = "".join(f"i{row % 40},t{row % 7},{row % 2}\n" for row in range(400))
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "a.csv").write_text(f"item,tag,label\n{rows}")
    (folder / "b.csv").symlink_to(tmp_path / "nowhere.csv")
    for path in (folder, folder / "b.csv", f"{folder}/*.csv"):
        with pytest.raises(
            DataError, match=r"log/b\.csv: a symbolic link to .*nowhere\.csv, which does not exist"
        ):
            read_sample((str(path),))
    # A row may be longer than a header.
    (tmp_path / "long.csv").write_text(f'item,tag,label\ni1,"{"t" * 1_200_000}",1\n{rows}')
    assert read_sample((str(tmp_path / "long.csv"),)).frame.columns == ["item", "tag", "label"]


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        (lambda cart, pages: cart.astype(int), "1"),
        (lambda cart, pages: cart, "true"),
        (lambda cart, pages: np.where(cart, "basket", "list"), "basket"),
        (lambda cart, pages: np.where(cart, np.where(pages > 60, "basket", "address"), "list"), "not list"),
        (lambda cart, pages: np.where(cart, pages, 0), "not 0"),
        (
            lambda cart, pages: [
                str(page) if click else "" for click, page in zip(cart, pages, strict=True)
            ],
            "filled",
        ),
    ],
)
def test_an_earlier_stage_of_the_label_is_reported(stage: Any, needed: str, tmp_path: Path) -> None:
    cart, pages = DRAWS.random(ROWS) < 0.45, DRAWS.integers(1, 100, ROWS)
    purchase = (cart & (DRAWS.random(ROWS) < 0.6)).astype(int)
    frame = pl.DataFrame({"item": ITEMS, "pages": pages, "stage": stage(cart, pages), "purchase": purchase})
    frame.write_csv(tmp_path / "log.csv")
    reasons = {each.name: each.reason for each in guesses(tmp_path / "log.csv", "purchase").columns}
    assert (
        f"purchase is 1 only where stage is {needed}: an earlier stage of the same visit?"
        in reasons["stage"]
    )
    assert "only where" not in reasons["item"] + reasons["pages"]


COUNTS, HASHES = ("5", "", "0", "12", "5") * 4, ("68fd1e64", "05db9164", "5a9ed9b0", "") * 8
CRITEO = ["\t".join([str(row % 2), *COUNTS[row % 5 :][:13], *HASHES[row % 4 :][:26]]) for row in range(40)]
COLORS = [
    f"{'ny'[row % 2]},{('red', 'blue')[row % 2]},{('red', 'green')[row % 3 % 2]}" for row in range(40)
]


@pytest.mark.parametrize(
    ("lines", "has_header"),
    [
        (CRITEO, False),
        (CRITEO[:2], False),
        (CRITEO[:1], False),
        (["\t".join(f"c{at}" for at in range(40)), *CRITEO], True),
        (["\t\t68fd1e64\tab\t68fd1e64", *["1\t3\t68fd1e64\tab\t05db9164"] * 9], False),
        (COLORS, False),
        (["answer,shirt,red", *COLORS], True),  # one name of three is also a value
        # a repeated field is no name, unless numbers are below the names
        (["shirt,shirt,hat", *COLORS], False),
        (["id,label,2019,2020", *(f"u{row},{row % 2},{row},7" for row in range(9))], True),
        (["2018,2019,2020", *(f"{row % 2},{row},7" for row in range(9))], False),
        (["1,unknown,2", *(f"{row},unknown,{row}" for row in range(9))], False),
        ([",user,city", *(f"{row},u{row},Oslo" for row in range(9))], True),
        # files were concatenated with their headers
        (["user,label", *["u1,1", "u2,0", "user,label"] * 3], True),
        (["1,2.5,u7"], False),
    ],
)
def test_a_first_line_of_data_is_no_header(lines: list[str], has_header: bool, tmp_path: Path) -> None:
    path = tmp_path / ("log.tsv" if "\t" in lines[0] else "log.csv")
    path.write_text("\n".join(lines) + "\n")
    assert ("columns" not in read_sample((str(path),)).options) == has_header


def test_repeated_names_above_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("click,color,color\n" + "1,red,blue\n0,blue,red\n" * 9)
    with pytest.raises(DataError, match="2 columns are named 'color'"):
        read_sample((str(tmp_path / "log.csv"),))


CODE_FORMS: dict[str, Callable[[int], str]] = {
    "versions": lambda number: f"{4 + number // 24}.{number % 24}",
    "named versions": lambda number: f"{4 + number // 9}.{1 + number % 9}",
    "browser ids": lambda number: (
        f"{number * 7_654_321 % 10**9 + 10**9}.{1_600_000_000 + number * 104_729}"
    ),
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("form", CODE_FORMS)
def test_codes_of_two_numbers_with_a_point_are_categories(form: str, kind: str, tmp_path: Path) -> None:
    texts = [CODE_FORMS[form](number) for number in DRAWS.integers(0, 120, ROWS)]
    name = "app_version" if form == "named versions" else "x"
    result = drafted(tmp_path, texts, name=name, kind=kind)
    assert (result.role, result.values) == ("sparse", len(set(texts))), result.reason


@pytest.mark.parametrize(
    "write",
    [
        lambda value: f"{value:.2f}",
        lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
        lambda value: f"{value:.1f}",
        lambda value: f"{value / 7}",
    ],
    ids=["cents", "shortest", "one decimal", "long"],
)
def test_numbers_with_a_point_are_no_codes(write: Callable[[float], str], tmp_path: Path) -> None:
    texts = [write(value) for value in np.round(DRAWS.uniform(0, 60, ROWS), 2)]
    assert drafted(tmp_path, texts).role == "dense"


def test_prices_with_and_without_a_last_zero_are_numbers(tmp_path: Path) -> None:
    texts = [f"{number // 10}.{number % 10}{'0' * (number % 2)}" for number in DRAWS.integers(1, 600, ROWS)]
    assert drafted(tmp_path, texts, name="price").role == "dense"
