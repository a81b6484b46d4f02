"""Compare the readers of CSV, TSV and JSON lines with Python's own. Errors name the line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import refuses
from stratarec.data.columns.converter import OnBadRow
from stratarec.data.schema import DenseFeature, LabelRule, Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.errors import DataError

SCHEMA = Schema(
    label="y",
    dense=(DenseFeature(name="price"),),
    sparse=(
        SparseFeature(name="item"),
        SparseFeature(name="shop", type="integer"),
        SparseFeature(name="tags", kind="multi", separator="|", max_length=3),
    ),
    time="when",
    user="user",
)
NAMES = ("user", "y", "when", "item", "unused", "price", "shop", "tags")
BAD = object()


def source(
    path: Path, schema: Schema = SCHEMA, on_bad_row: OnBadRow = "error", **options: Any
) -> CsvSource:
    chunk_bytes = options.pop("chunk_bytes", 1 << 20)
    return CsvSource(CsvConfig(paths=(str(path),), schema=schema, **options), on_bad_row, chunk_bytes)


def read(
    path: Path, schema: Schema = SCHEMA, on_bad_row: OnBadRow = "error", **options: Any
) -> pl.DataFrame:
    return pl.concat(
        [chunk.frame for chunk in source(path, schema, on_bad_row, **options).chunks(path.parent)]
    )


# The reference: the value of a cell of text for each place in the schema.


def number(cell: str) -> Any:
    try:
        value = float(cell) if "_" not in cell else BAD
    except ValueError:
        return BAD
    return value


def as_integer(cell: str) -> Any:
    value = number(cell) if cell != "007" else BAD
    return int(value) if value is not BAD and value == int(value) else BAD


REFERENCE: dict[str, Callable[[str], Any]] = {
    "y": lambda cell: {"0": 0, "1": 1, "1.0": 1, "true": 1, "FALSE": 0}.get(cell, BAD),
    "price": lambda cell: number(cell) if cell else None,
    "item": lambda cell: cell or None,
    "shop": lambda cell: as_integer(cell) if cell else None,
    "tags": lambda cell: (
        [part.strip() for part in cell.split("|") if part.strip()][:3] if cell.strip() else None
    ),
    "when": lambda cell: as_integer(cell) if cell else BAD,
    "user": lambda cell: cell or BAD,
}
TEXT = st.text(alphabet='ab,"|é\n ', max_size=4)
CELLS = {
    "y": st.sampled_from(["0", "1", "1.0", "true", "FALSE", "", "2"]),
    "price": st.sampled_from(["", "1", "-2.5", "1e3", "x", "1_0", " 4"]),
    "item": TEXT,
    "shop": st.sampled_from(["", "7", "007", "7.0", "-3", "7.5", "q"]),
    "tags": TEXT,
    "when": st.sampled_from(["5", "6.0", "", "1506826800", "soon"]),
    "user": st.sampled_from(["u", "v w", "", 'say "x"']),
    "unused": TEXT,
}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.fixed_dictionaries(CELLS), min_size=1, max_size=8),
    st.sampled_from([60, 200, 1 << 20]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_any_text_reads_like_the_reference_or_names_the_error(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], chunk: int, end: str, quoting: Any
) -> None:
    path, text, lines = tmp_path_factory.mktemp("csv") / "log.csv", io.StringIO(), []
    writer = csv.writer(text, lineterminator=end, quoting=quoting)
    writer.writerow(NAMES)
    for row in rows:
        lines.append(1 + text.getvalue().count("\n"))
        writer.writerow([row[name] for name in NAMES])
    path.write_bytes(text.getvalue().encode())
    cells = [{name: REFERENCE[name](row[name]) for name in REFERENCE} for row in rows]
    good = [place for place, row in enumerate(cells) if BAD not in row.values()]
    chunks = list(source(path, on_bad_row="skip", chunk_bytes=chunk).chunks(path.parent))
    frame = pl.concat([chunk.frame for chunk in chunks])
    assert frame.to_dicts() == [{name: cells[place][name] for name in frame.columns} for place in good]
    assert [line for chunk in chunks for line in chunk.rows] == [lines[place] for place in good]
    assert sum(chunk.bad_rows for chunk in chunks) == len(rows) - len(good)
    if len(good) < len(rows):
        first = min(set(range(len(rows))) - set(good))
        wrong = [name for name, cell in cells[first].items() if cell is BAD]
        with pytest.raises(DataError) as caught:
            read(path, chunk_bytes=chunk)
        start = f"{path}, line {lines[first]}: column "
        assert any(str(caught.value).startswith(f"{start}{name!r}: got ") for name in wrong), caught.value


ROWS = [
    {"user": "u", "y": 1, "when": 5, "item": "a,b", "unused": "", "price": 1.5, "shop": 7, "tags": "p|q"},
    {"user": "v", "y": 0, "when": 6, "item": None, "unused": "", "price": None, "shop": None, "tags": None},
]
EXPECTED = [
    {"y": 1, "price": 1.5, "item": "a,b", "shop": 7, "tags": ["p", "q"], "when": 5, "user": "u"},
    {"y": 0, "price": None, "item": None, "shop": None, "tags": None, "when": 6, "user": "v"},
]


def delimited(mark: str, *, header: bool = True) -> bytes:
    return pl.DataFrame(ROWS).write_csv(separator=mark, include_header=header).encode()


def json_lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("log.csv", delimited(","), {}),
        ("log.csv", b"\xef\xbb\xbf" + delimited(","), {}),
        ("log.csv", delimited(",").replace(b"\n", b"\r\n"), {}),
        ("log.csv", delimited(",").rstrip(b"\n"), {}),
        ("log.csv", delimited(",").replace(b"\n", b"\n\n"), {}),
        ("log.txt", delimited(";"), {"delimiter": ";"}),
        ("log.tsv", delimited("\t"), {}),
        ("log.tsv.gz", gzip.compress(delimited("\t")), {}),
        ("log.csv.bz2", bz2.compress(delimited(",")), {}),
        ("log.csv.zst", pa.compress(delimited(","), "zstd", asbytes=True), {}),
        ("log.dat", delimited("\t", header=False), {"format": "tsv", "columns": NAMES}),
        ("log.jsonl", json_lines(), {}),
        ("log.ndjson.gz", gzip.compress(json_lines()), {}),
        ("log.txt", json_lines().replace(b"}", b"}\r"), {"format": "jsonl"}),
        ("log.csv", delimited(",").replace(b"v,0,6,,", b"v,0,6,NA,"), {"nulls": ("NA",)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_log_in_every_format(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(content)
    for chunk_bytes in (50, 1 << 20):
        assert read(tmp_path / name, chunk_bytes=chunk_bytes, **options).to_dicts() == EXPECTED


def test_a_url_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(delimited(",")))
    url_source = CsvSource(CsvConfig(paths=(f"file://{tmp_path}/*.csv.gz",), schema=SCHEMA), "error")
    assert pl.concat([chunk.frame for chunk in url_source.chunks(tmp_path)]).to_dicts() == EXPECTED


HEAD = b"user,y,when,item,unused,price,shop,tags\n"


def write_both(root: Path, columns: dict[str, list[Any]]) -> list[Path]:
    """Write a CSV and a Parquet file of `columns`. Add labels and another column if they are
    missing.
    """
    rows = len(next(iter(columns.values())))
    columns = {"y": [1, 0, 1][:rows], "d": ["u", "v", "w"][:rows], **columns}
    pl.DataFrame(columns, strict=False).write_csv(root / "log.csv")
    pq.write_table(pa.table(columns), root / "log.parquet")
    return [root / "log.csv", root / "log.parquet"]


def read_either(path: Path, options: dict[str, Any], on_bad_row: OnBadRow = "error") -> pl.DataFrame:
    schema = Schema(**{"label": "y", "sparse": (SparseFeature(name="d"),), **options})
    if path.suffix == ".csv":
        return read(path, schema, on_bad_row)
    parquet_source = ParquetSource(ParquetConfig(paths=(str(path),), schema=schema), on_bad_row)
    return pl.concat([chunk.frame for chunk in parquet_source.chunks(path.parent)])


RATED = {"label": LabelRule(column="y", at_least=4)}
WORDED = {"label": LabelRule(column="y", equals="yes")}
WHOLE = {"sparse": (SparseFeature(name="a", type="integer"),)}
TYPED = {
    "sparse": (
        SparseFeature(name="a", type="integer"),
        SparseFeature(name="b", type="text"),
        SparseFeature(name="c", type="integer", kind="multi", separator="|"),
    )
}
TIMED = {"time": "a"}
HOURLY = {**TIMED, "time_format": "%Y%m%d%H"}


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"y": [1, 4, 5]}, RATED, {"y": [0, 1, 1]}),
        ({"y": [3.5, 4.0, 0.0]}, {"label": LabelRule(column="y", at_least=3.75)}, {"y": [0, 1, 0]}),
        ({"y": [True, False, True]}, {}, {"y": [1, 0, 1]}),
        ({"y": [0.0, 1.0, 0.0]}, {}, {"y": [0, 1, 0]}),
        # Ids are floats if one of them is missing.
        ({"a": [12.0, None, -3.0]}, WHOLE, {"a": [12, None, -3]}),
        (
            {"a": ["7.0", "7"], "b": [7, 8], "c": ["1|2.0", "3"]},
            TYPED,
            {"a": [7, 7], "b": ["7", "8"], "c": [[1, 2], [3]]},
        ),
        ({"a": ["2020-01-01", "2020-01-02"]}, TIMED, {"a": [1_577_836_800, 1_577_923_200]}),
        ({"a": ["2020-01-01 00:00:05", "2020-01-01T00:01"]}, TIMED, {"a": [1_577_836_805, 1_577_836_860]}),
        (
            {"a": ["2020-01-01T00:00:05Z", "2020-01-01 02:00+02:00"]},
            TIMED,
            {"a": [1_577_836_805, 1_577_836_800]},
        ),
        (
            {"a": ["2020-01-01T00:00:05Z", "2020-01-01 00:00:06"]},
            TIMED,
            {"a": [1_577_836_805, 1_577_836_806]},
        ),
        (
            {"a": ["31/12/2019 23:59", "01/01/2020 00:00"]},
            {**TIMED, "time_format": "%d/%m/%Y %H:%M"},
            {"a": [1_577_836_740, 1_577_836_800]},
        ),
        ({"a": ["20200101"]}, {**TIMED, "time_format": "%Y%m%d"}, {"a": [1_577_836_800]}),
        (
            {"a": [20_010_100, 20_010_123]},
            {**TIMED, "time_format": "%y%m%d%H"},
            {"a": [1_577_836_800, 1_577_919_600]},
        ),
        ({"y": ["yes", " yes", "no "]}, WORDED, {"y": [1, 1, 0]}),
        (
            {"y": ["yes", None, "2"], "z": [0, 1, 1]},
            {"label": "label", "labels": (WORDED["label"], "z")},
            {"y": [1, 2, 0]},
        ),
        ({"a": [1_577_836_800.0, 1_577_836_801.0]}, TIMED, {"a": [1_577_836_800, 1_577_836_801]}),
    ],
)
def test_values_mean_the_same_in_text_and_parquet(
    tmp_path: Path, columns: dict[str, list[Any]], options: dict[str, Any], expected: dict[str, list[Any]]
) -> None:
    for path in write_both(tmp_path, columns):
        frame = read_either(path, options)
        assert {name: frame[name].to_list() for name in expected} == expected
        assert frame["y"].dtype == pl.UInt8


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"y": ["yes", "", "no"]}, WORDED, "'y' yes"),
        ({"a": [2020010100, 202001010, 2020010101]}, HOURLY, "'a' 202001010"),
        ({"a": ["31/12/2019", "31/12/19"]}, {**TIMED, "time_format": "%d/%m/%Y"}, "'a' 31/12/19"),
        ({"y": [5, None, 2]}, RATED, "'y' number"),
        ({"a": [12.0, 0.5, 2.0**60]}, WHOLE, "'a' 0.5"),
        ({"a": ["1", "2"], "b": [7, 8], "c": ["1|2", "3|x"]}, TYPED, "'c' 3|x"),
        *(
            ({"a": ["2020-01-01", time]}, TIMED, f"'a' {time}")
            for time in ("2020-13-01", "2020-01-01 25:00", "yesterday", "2020-01-01 00:00:00 PST", "1.5")
        ),
    ],
)
def test_errors_are_the_same_in_text_and_parquet(
    tmp_path: Path, columns: dict[str, list[Any]], options: dict[str, Any], message: str
) -> None:
    """The error is in the second row, or in the third for numbers that a float cannot represent."""
    for path in write_both(tmp_path, columns):
        with refuses(DataError, message):
            read_either(path, options)
        left = 2 if "y" in columns or options == HOURLY else 1
        assert read_either(path, options, "skip").height == left


def test_a_damaged_file_is_named_after_the_rows_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    compressed = gzip.compress(
        HEAD + b"".join(b"u%d,1,5,a,,%d,7,t\n" % (i, i * 7919 % 10007) for i in range(20_000))
    )
    path.write_bytes(compressed[: len(compressed) // 2])
    chunks = []
    with refuses(DataError, "log.csv.gz"):
        chunks.extend(source(path, chunk_bytes=10_000).chunks(tmp_path))
    assert len(chunks) > 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1, 2]", "line 2"),
        (b'{"y": 1', "line 2 JSON"),
        (b'{"y": 1, "item": {"id": 3}}', "line 2 item"),
        (b'{"y": 1, "item": "a", "tags": [[1]]}', "line 2 tags"),
        (b'{"y": 3, "item": "a", "tags": []}', "line 2 'y' '3'"),
        (b'{"y": NaN, "item": "[", "tags": []}', "line 2 JSON NaN"),
        (b'{"y": "\xff"}', "line 2 0xff"),
    ],
)
def test_an_error_in_json_is_named_by_line_or_the_line_is_skipped(
    tmp_path: Path, line: bytes, message: str
) -> None:
    schema = Schema(
        label="y", sparse=(SparseFeature(name="item"), SparseFeature(name="tags", kind="multi"))
    )
    path, good = tmp_path / "log.jsonl", b'{"y": true, "item": 5, "tags": [1, "x", null]}\n'
    path.write_bytes(good + line + b"\n\n" + good)
    with refuses(DataError, message):
        read(path, schema)
    (chunk,) = source(path, schema, "skip").chunks(tmp_path)
    assert chunk.frame.to_dicts() == [{"y": 1, "item": "5", "tags": ["1", "x"]}] * 2
    assert chunk.rows is not None
    assert chunk.rows.tolist() == [1, 4]
    assert chunk.bad_rows == 1


def test_a_field_of_json_that_only_late_lines_have_is_missing_in_the_others(tmp_path: Path) -> None:
    rows = [{"y": 1, "item": "a", "other": {"tags": 3}} for _ in range(1500)]
    rows += [{"y": 0, "item": "b", "tags": ["x"]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = Schema(
        label="y", sparse=(SparseFeature(name="item"), SparseFeature(name="tags", kind="multi"))
    )
    assert read(tmp_path / "log.jsonl", schema)["tags"].to_list() == [None] * 1500 + [["x"]]
    with refuses(DataError, "no column 'tag'"):
        read(
            tmp_path / "log.jsonl",
            Schema(label="y", sparse=(SparseFeature(name="item"), SparseFeature(name="tag"))),
        )
