"""Test that the same text gives the same values in every file format, in frames and in single
rows.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from errors import refuses
from stratarec.data.columns.frames import read_frame
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import DataError
from stratarec.serving.features import FeatureEncoder


def in_every_format(
    texts: list[str], feature: SparseFeature, folder: Path, dense: tuple[DenseFeature, ...] = ()
) -> dict[str, list[Any]]:
    """Return the values of one column of text for every format it is read from; those of `dense` if
    there is one.
    """
    schema = Schema(label="y", sparse=(feature,), dense=dense)
    frame = pl.DataFrame({"y": [0] * len(texts), feature.name: texts})
    frame.write_csv(folder / "log.csv")
    frame.write_parquet(folder / "log.parquet")
    frame.write_ndjson(folder / "log.jsonl")
    read, values = dense[0].name if dense else feature.name, {}
    for name in ("log.csv", "log.jsonl"):
        chunks = CsvSource(CsvConfig(paths=(str(folder / name),), schema=schema), "error").chunks(folder)
        values[name] = pl.concat([chunk.frame for chunk in chunks])[read].to_list()
    parquet = ParquetSource(ParquetConfig(paths=(str(folder / "log.parquet"),), schema=schema), "error")
    values["log.parquet"] = pl.concat([chunk.frame for chunk in parquet.chunks(folder)])[read].to_list()
    values["frame"] = read_frame({feature.name: texts}, schema)[read].to_list()
    return values


def encoder(feature: SparseFeature, values: list[Any]) -> FeatureEncoder:
    """Return an encoder that gives each value an id from 1; 0 is for all others."""
    vocabulary = Vocabulary(
        values=pl.Series(values),
        counts=np.ones(len(values) + 1, dtype=np.int64),
        tail_buckets=1,
        first_rows=1,
    )
    return FeatureEncoder(Schema(sparse=(feature,)), {}, {feature.name: vocabulary})


LISTS: list[tuple[str, str, list[str]]] = [
    ("", '["a", "b"]', ["a", "b"]),
    ("", "['a', 'b']", ["a", "b"]),
    ("", "['a' 'b']", ["a", "b"]),
    ("", "[1, 22,3]", ["1", "22", "3"]),
    ("", " [1 22  3] ", ["1", "22", "3"]),
    ("", "[1, null, None, nan, 7.50]", ["1", "7.50"]),
    ("", "[]", []),
    ("", json.dumps(["it's", 'q"uote', "a]b", "[c", "é\n", "\U0001f600", "a, b"]),
     ["it's", 'q"uote', "a]b", "[c", "é\n", "\U0001f600", "a, b"]),
    ("", repr(["it's", 'q"\'uote', "\\n", "\x07"]), ["it's", 'q"\'uote', "\\n", "\x07"]),
    ("", '["null", ""]', ["null", ""]),
    ("", r"['\U00FFFFFF', '\U0010FFFF']", [r"\U00FFFFFF", "\U0010ffff"]),  # the first one is no character
    (",", "a, b,,\tc ", ["a", "b", "c"]),
    (",", "[HD],[4K]", ["[HD]", "[4K]"]),
    ("|", "a b |c", ["a b", "c"]),
    (" ", " 161  182 ", ["161", "182"]),
    ("\x1d", "a\x1db", ["a", "b"]),
    ("^", "a^b^", ["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize(("separator", "text", "expected"), LISTS, ids=[repr(case[1]) for case in LISTS])
def test_a_list_as_text_has_the_same_values_everywhere(
    separator: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    feature = SparseFeature(name="tags", kind="multi", separator=separator)
    for form, values in in_every_format([text, text], feature, tmp_path).items():
        assert values == [expected, expected], form
    tags = encoder(feature, sorted(set(expected)) or ["x"])
    ids = [1 + sorted(set(expected)).index(value) for value in expected]
    for rows in (1, 100):  # by rows and by columns
        assert tags.encode({"tags": [text] * rows})[1].values.tolist() == ids * rows


@pytest.mark.parametrize("rows", [1, 600])  # a few rows, and columns
def test_booleans_are_the_same_category_everywhere(rows: int, tmp_path: Path) -> None:
    feature, expected = SparseFeature(name="member"), ["true", "false", None]
    for texts in (["true", "false", ""], ["True", "False", ""], ["TRUE", "FALSE", ""]):
        for form, values in in_every_format(texts, feature, tmp_path).items():
            assert values == expected, form
    schema = Schema(label="y", sparse=(feature,))
    flags = pl.DataFrame({"y": [0] * 3, "member": [True, False, None]})
    flags.write_parquet(tmp_path / "flags.parquet")
    flags.write_ndjson(tmp_path / "flags.jsonl")
    parquet = ParquetSource(ParquetConfig(paths=(str(tmp_path / "flags.parquet"),), schema=schema), "error")
    lines = CsvSource(CsvConfig(paths=(str(tmp_path / "flags.jsonl"),), schema=schema), "error")
    sources: tuple[CsvSource | ParquetSource, ...] = (parquet, lines)
    for source in sources:
        assert pl.concat([chunk.frame for chunk in source.chunks(tmp_path)])["member"].to_list() == expected
    for cells in ([True, False, None], [np.bool_(True), np.bool_(False), None], ["True", "FALSE", None]):
        assert read_frame({"member": cells}, schema)["member"].to_list() == expected
        for values in (["false", "true"], [0, 1]):  # a log with whole numbers may be served booleans
            if values == [0, 1] and isinstance(cells[0], str):
                continue
            ids = encoder(feature, values).encode({"member": cells * rows})[1].values.tolist()
            assert ids == [2, 1] * rows


@pytest.mark.parametrize("copies", [1, 600])  # a few rows, and columns
@pytest.mark.parametrize(
    ("price", "city", "message"),
    [
        (["9.5", 20.0], ["a", "b"], "row 1 price '9.5' number"),
        ([20.0, "9.5"], ["a", "b"], "row 2 price '9.5' number"),
        ([20.0, [1.0]], ["a", "b"], "row 2 price list number"),
        ([[1.0], 20.0], ["a", "b"], "row 1 price list number"),
        ([1.0, 1e39], ["a", "b"], "row 2 price 1e+39 3e+38"),
        ([1, 10**400], ["a", "b"], "row 2 price 3e+38"),
        ([1, 2], ["a", "\ud800"], "row 2 city surrogates"),
        ([1, 2], ["a", 3], "row 2 city 3 text alone"),
    ],
)
def test_a_wrong_value_of_a_frame_is_named_with_its_row(
    price: list[Any], city: list[Any], message: str, copies: int
) -> None:
    schema = Schema(dense=(DenseFeature(name="price"),), sparse=(SparseFeature(name="city"),))
    with refuses(DataError, message):
        read_frame({"price": price * copies, "city": city * copies}, schema)


@pytest.mark.parametrize("type", ["auto", "text", "integer"])
def test_numbers_as_text_are_numbers_everywhere(type: Any, tmp_path: Path) -> None:
    """A column of text may be a category and a number, as `init` drafts columns of integers."""
    feature, number = SparseFeature(name="item", type=type), DenseFeature(name="item.number", column="item")
    for form, values in in_every_format(["17", " 2.5e1 ", ""], feature, tmp_path, (number,)).items():
        assert values == [17.0, 25.0, None], form
    schema = Schema(dense=(number,), sparse=(feature,))
    for cells in (["17", None], np.array(["17", ""]), pl.Series(["17", ""], dtype=pl.Categorical)):
        columns = read_frame({"item": cells}, schema)
        assert columns["item.number"].to_list() == [17.0, None]
        assert columns["item"].to_list() == [17 if type == "integer" else "17", None]
    with refuses(DataError, "row 2 item 'abc' finite number"):
        read_frame({"item": ["17", "abc"]}, Schema(dense=(number,)))


@pytest.mark.parametrize("type", ["auto", "text", "integer"])
def test_an_empty_text_is_a_missing_category_everywhere(type: Any, tmp_path: Path) -> None:
    feature, value = SparseFeature(name="city", type=type), 7 if type == "integer" else "7"
    for form, values in in_every_format(["7", ""], feature, tmp_path).items():
        assert values == [value, None], form
    city = encoder(feature, [value])
    for rows in (1, 100):  # by rows and by columns
        assert city.encode({"city": ["7", ""] * rows})[1].bag_offsets().diff().tolist() == [1, 0] * rows


@pytest.mark.parametrize(
    ("separator", "text"),
    [
        *(
            ("", text)
            for text in ("a, b", "[a, b]", "[[1], [2]]", "[{'id': 1}]", "(1, 2)", '["a" "b"', "[1,,2]")
        ),
        *(
            (",", text)
            for text in ('["a", "b"]', "['a']", "[1, 2]", "[a, b]", "(1, 2)", "{1,2}", "[[1], [2]]")
        ),
    ],
)
def test_text_that_is_not_a_list_is_refused_everywhere(separator: str, text: str, tmp_path: Path) -> None:
    feature = SparseFeature(name="tags", kind="multi", separator=separator)
    with refuses(DataError, "line 3 tags separator"):
        in_every_format([separator.join("ab") if separator else "[1]", text], feature, tmp_path)
    with refuses(DataError, "row 1 tags separator"):
        encoder(feature, ["a"]).encode({"tags": [text]})


@pytest.mark.parametrize("kind", [pl.String, pl.Float64, pl.Decimal(38, 9)])
@pytest.mark.parametrize(
    ("texts", "unit", "expected"),
    [
        (["1700000003.365", "1700000037.0"], "ms", [1700000003365, 1700000037000]),
        (["1700000003.365", "1700000037"], "us", [1700000003365000, 1700000037000000]),
        (["1700000003.365", "1700000037.25"], "ns", [1700000003365000000, 1700000037250000000]),
        (["1700000037.0", "1700000038.0"], "s", [1700000037, 1700000038]),
        (["1700000037.0", "1700000038.0"], "ms", [1700000037000, 1700000038000]),
        (["1700000003365.5", "1700000003365.0"], "us", [1700000003365500, 1700000003365000]),
        (["1.0", "3.0"], "s", [1, 3]),
        (["1.5", "3.0"], "s", "1"),
        (["1700000003.365", "1700000037.0"], "s", "time_unit ms"),
    ],
)
def test_numbers_with_fractions_are_times(
    kind: Any, texts: list[str], unit: Any, expected: Any, tmp_path: Path
) -> None:
    schema, path = Schema(label="y", time="t", time_unit=unit), tmp_path / "log"
    frame = pl.DataFrame({"y": [0, 0], "t": pl.Series(texts).cast(kind)})
    sources: list[CsvSource | ParquetSource] = []
    frame.write_parquet(path.with_suffix(".parquet"))
    sources.append(ParquetSource(ParquetConfig(paths=(f"{path}.parquet",), schema=schema), "error"))
    if kind == pl.String:
        frame.write_csv(path.with_suffix(".csv"))
        sources.append(CsvSource(CsvConfig(paths=(f"{path}.csv",), schema=schema), "error"))
    for source in sources:
        if isinstance(expected, str):
            with refuses(DataError, f"'t' column {expected}"):
                next(iter(source.chunks(tmp_path)))
        else:
            assert next(iter(source.chunks(tmp_path))).frame["t"].to_list() == expected


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_a_whole_number_has_no_leading_zeros(kind: Any, tmp_path: Path) -> None:
    feature = SparseFeature(
        name="shop", type="integer", kind=kind, separator="|" if kind == "multi" else ""
    )
    plain = ["7", "7.0", " 0", "-5"]
    for form, values in in_every_format(plain, feature, tmp_path).items():
        assert values == ([[7], [7], [0], [-5]] if kind == "multi" else [7, 7, 0, -5]), form
    with refuses(DataError, "line 5002 shop 007"):
        in_every_format(["7"] * 5000 + ["007"], feature, tmp_path)  # the first rows are integers
    auto = SparseFeature(name="shop", kind=kind, separator=feature.separator)
    for each in (feature, auto):  # a vocabulary of integers, like that of an integer column in Parquet
        for rows in (1, 100):
            with refuses(DataError, "shop 007"):
                encoder(each, [7]).encode({"shop": ["7"] * (rows - 1) + ["007"]})
            assert encoder(each, [7]).encode({"shop": ["7"] * rows})[1].values.tolist() == [1] * rows


@pytest.mark.parametrize("precision", [(38, 0), (38, 9), (76, 0)])
def test_decimals_without_fraction_are_whole_numbers(precision: tuple[int, int], tmp_path: Path) -> None:
    cells = [Decimal(5), None, Decimal(2**53 + 1)]
    kind = (pa.decimal256 if precision[0] > 38 else pa.decimal128)(*precision)
    columns = {"y": pa.array([0, 1, 1]), "shop": pa.array(cells, kind), "t": pa.array([1, 2, 3], kind)}
    columns["tags"] = pa.array(
        [[Decimal(3), None], None, [Decimal(4)]], pa.list_(kind) if precision[0] <= 38 else None
    )
    schema = Schema(
        label="y", time="t", sparse=(SparseFeature(name="shop"), SparseFeature(name="tags", kind="multi"))
    )
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(columns), path)
    source = ParquetSource(ParquetConfig(paths=(str(path),), schema=schema), "error")
    frame = next(iter(source.chunks(tmp_path))).frame
    assert frame["shop"].to_list() == [5, None, 2**53 + 1]
    assert frame["t"].to_list() == [1, 2, 3]
    assert frame["tags"].to_list() == [[3], None, [4]]
    objects = {"shop": cells, "tags": [[Decimal(3), None], None, [Decimal(4)]]}
    values = read_frame(objects, schema)
    assert [values[name].to_list() for name in objects] == [[5, None, 2**53 + 1], [[3], None, [4]]]


@pytest.mark.parametrize("cell", [Decimal("2.5"), Decimal(2**70)])
def test_decimals_that_are_no_64_bit_integers_are_bad_rows(cell: Decimal, tmp_path: Path) -> None:
    columns = {"y": pa.array([0, 1]), "shop": pa.array([Decimal(5), cell], pa.decimal128(38, 2))}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    schema = Schema(label="y", sparse=(SparseFeature(name="shop"),))
    source = ParquetSource(ParquetConfig(paths=(str(tmp_path / "log.parquet"),), schema=schema), "error")
    with refuses(DataError, "row 2 shop"):
        next(iter(source.chunks(tmp_path)))
    with refuses(DataError, "row 2 shop"):
        read_frame({"shop": [Decimal(5), cell]}, schema)
