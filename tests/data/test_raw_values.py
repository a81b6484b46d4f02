"""Raw values: the same text has the same values in every file format, in frames and in single rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stratarec.data.column_names import weights_of
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.data.vocabulary import Vocabulary
from stratarec.errors import DataError
from stratarec.serving.features import FeatureEncoder
from stratarec.serving.frames import read_frame


def in_every_form(texts: list[str], feature: SparseFeature, folder: Path) -> dict[str, list[Any]]:
    """Values of one column of text by what the column is read from."""
    schema = Schema(label="y", sparse=(feature,))
    frame = pl.DataFrame({"y": [0] * len(texts), feature.name: texts})
    frame.write_csv(folder / "log.csv")
    frame.write_parquet(folder / "log.parquet")
    frame.write_ndjson(folder / "log.jsonl")
    values = {}
    for name in ("log.csv", "log.jsonl"):
        chunks = CsvSource(CsvConfig(paths=(str(folder / name),), schema=schema), "error").chunks(folder)
        values[name] = pl.concat([chunk.frame for chunk in chunks])[feature.name].to_list()
    parquet = ParquetSource(ParquetConfig(paths=(str(folder / "log.parquet"),), schema=schema), "error")
    values["log.parquet"] = pl.concat([chunk.frame for chunk in parquet.chunks(folder)])[feature.name].to_list()
    values["frame"] = read_frame({feature.name: texts}, schema)[feature.name].to_list()
    return values


def encoder(feature: SparseFeature, values: list[Any]) -> FeatureEncoder:
    """Encoder with an id for each value: 1 and up; 0 is for all others."""
    vocabulary = Vocabulary(
        values=pl.Series(values), counts=np.ones(len(values) + 1, dtype=np.int64), tail_buckets=1, first_rows=1
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
    for form, values in in_every_form([text, text], feature, tmp_path).items():
        assert values == [expected, expected], form
    tags = encoder(feature, sorted(set(expected)) or ["x"])
    ids = [1 + sorted(set(expected)).index(value) for value in expected]
    for rows in (1, 100):  # cell by cell, and by columns
        assert tags.encode({"tags": [text] * rows})[1].values.tolist() == ids * rows


@pytest.mark.parametrize(
    ("separator", "text"),
    [
        *(("", text) for text in ("a, b", "[a, b]", "[[1], [2]]", "[{'id': 1}]", "(1, 2)", '["a" "b"', "[1,,2]")),
        *((",", text) for text in ('["a", "b"]', "['a']", "[1, 2]", "[a, b]", "(1, 2)", "{1,2}", "[[1], [2]]")),
    ],
)
def test_text_that_is_no_list_is_refused_everywhere(separator: str, text: str, tmp_path: Path) -> None:
    feature = SparseFeature(name="tags", kind="multi", separator=separator)
    with pytest.raises(DataError, match=r"line 3: column 'tags': got .*`separator`"):
        in_every_form([separator.join("ab") if separator else "[1]", text], feature, tmp_path)
    with pytest.raises(DataError, match=r"row 1: column 'tags': got .*`separator`"):
        encoder(feature, ["a"]).encode({"tags": [text]})


def test_sequences_and_weights_may_be_lists_as_text(tmp_path: Path) -> None:
    schema = Schema(
        label="y",
        sparse=(
            SparseFeature(name="seen", kind="sequence"),
            SparseFeature(name="shops", kind="sequence", beside="seen"),
            SparseFeature(name="tags", kind="multi", weights="shares"),
        ),
    )
    row = {"y": 0, "seen": "[5, null, 7]", "shops": "['x', 'y', 'z']", "tags": '["a", "b"]', "shares": "[0.5 2]"}
    pl.DataFrame([row]).write_csv(tmp_path / "log.csv")
    source = CsvSource(CsvConfig(paths=(str(tmp_path / "log.csv"),), schema=schema), "error")
    values = next(source.chunks(tmp_path)).frame
    assert values.select("seen", "shops", "tags").rows() == [(["5", "7"], ["x", "z"], ["a", "b"])]
    assert values[weights_of("tags")].to_list() == [[0.5, 2.0]]
