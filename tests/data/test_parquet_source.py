"""Compare the Parquet reader with a cell-by-cell reference for any schema. Errors name the
column.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import missing, refuses
from stratarec.data.columns.converter import OnBadRow
from stratarec.data.durations import TimeUnit
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import ChunkShare
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource, to_frame
from stratarec.errors import DataError, StrataError

# Before version 26 pyarrow cannot write and read all fixed-size lists that contain nulls.
NULL_LISTS = int(pa.__version__.partition(".")[0]) >= 26

BAD = object()
"""Mark of a value that is not allowed in a row."""


class WrongType(Exception):
    """A column has a type that its place in the schema does not accept."""


def write(path: Path, columns: dict[str, pa.Array], row_group: int = 1000) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=row_group)


def source(path: Path, schema: Schema, on_bad_row: OnBadRow = "error") -> ParquetSource:
    return ParquetSource(ParquetConfig(paths=(str(path),), schema=schema), on_bad_row)


def read(path: Path, schema: Schema, on_bad_row: OnBadRow = "error") -> pl.DataFrame:
    return pl.concat([chunk.frame for chunk in source(path, schema, on_bad_row).chunks(path.parent)])


# The reference: the value of a cell of each Arrow type for each place in the schema.


def is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_null(inner)


def is_integer(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(inner) or pa.types.is_null(inner)


def has_fractions(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def is_number(kind: pa.DataType) -> bool:
    return is_integer(kind) or pa.types.is_boolean(kind) or has_fractions(kind)


def label(kind: pa.DataType, cell: Any) -> Any:
    if not is_number(kind):
        raise WrongType
    return int(cell) if cell in (0, 1) else BAD


def dense(kind: pa.DataType, cell: Any) -> Any:
    if is_text(kind):  # none of the texts in these tests is a number
        return BAD if cell else None
    if not is_number(kind):
        raise WrongType
    if cell is None or math.isnan(cell):
        return None
    return float(cell) if abs(cell) <= 3.0e38 else BAD


def category(kind: pa.DataType, cell: Any) -> Any:
    if is_text(kind):
        return cell or None
    if has_fractions(kind):
        return None if cell is None or math.isnan(cell) else as_integer(cell)
    if pa.types.is_boolean(kind):
        return None if cell is None else str(cell).lower()
    if not is_integer(kind):
        raise WrongType
    return None if cell is None else int(cell)


def as_integer(cell: Any) -> Any:
    """Return the integer that was written as a float."""
    return int(cell) if abs(cell) < 2**53 and cell == int(cell) else BAD


def user(kind: pa.DataType, cell: Any) -> Any:
    value = category(kind, cell)
    return BAD if value is None else value


def listed(kind: pa.DataType, cell: Any) -> Any:
    if is_text(kind):  # none of the texts in these tests is a list
        return BAD if (cell or "").strip() else None
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise WrongType
    if not (is_text(kind.value_type) or is_integer(kind.value_type)):
        raise WrongType
    return None if cell is None else [part for part in cell if part is not None][:3]


def separated(kind: pa.DataType, cell: Any) -> Any:
    if not is_text(kind):  # lists are accepted as they are, without empty texts
        listed(kind, cell)
        return None if cell is None else [part for part in cell if part not in (None, "")][:3]
    return (
        None if not (cell or "").strip() else [part.strip() for part in cell.split("|") if part.strip()][:3]
    )


def moment(kind: pa.DataType, cell: Any) -> Any:
    if is_integer(kind):
        return cell if cell is not None and cell < 2**63 else BAD
    if not (is_text(kind) or has_fractions(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise WrongType
    if cell is None or is_text(kind):  # none of the texts in these tests is a time
        return BAD
    if has_fractions(kind):
        return BAD if math.isnan(cell) else as_integer(cell)
    if pa.types.is_date(kind):
        cell = dt.datetime.combine(cell, dt.time())
    cell = cell.replace(tzinfo=cell.tzinfo or dt.timezone.utc)
    return (cell - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(seconds=1)


SCHEMA = Schema(
    label="label",
    dense=(DenseFeature(name="dense"),),
    sparse=(
        SparseFeature(name="category"),
        SparseFeature(name="listed", kind="multi", max_length=3),
        SparseFeature(name="separated", kind="multi", max_length=3, separator="|"),
    ),
    time="moment",
    user="user",
)
REFERENCE: dict[str, Callable[[pa.DataType, Any], Any]] = {
    "label": label, "dense": dense, "category": category, "listed": listed, "separated": separated,
    "moment": moment, "user": user,
}  # fmt: skip

TEXT = st.text(alphabet="ab|é ", max_size=4)
INTEGER = st.one_of(st.integers(0, 2), st.integers(-(2**63), 2**63 - 1))


def whole_seconds(moment: dt.datetime) -> dt.datetime:
    return moment.replace(microsecond=0)


DATE = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1)).map(whole_seconds)

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-3, 3)),
    (pa.int64(), INTEGER),
    (pa.uint64(), st.one_of(st.integers(0, 2), st.integers(0, 2**64 - 1))),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.one_of(st.sampled_from([0.0, 1.0, 2.9e38, 3.1e38]), st.floats())),
    (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.decimal128(9, 2), st.integers(-300, 300).map(lambda value: Decimal(value) / 100)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.dictionary(pa.int32(), pa.string()), TEXT),
    (pa.dictionary(pa.int8(), pa.int64()), st.integers(0, 3)),
    (pa.timestamp("s"), DATE),
    (pa.timestamp("us", "Asia/Tokyo"), DATE),
    (pa.timestamp("ns"), DATE),
    (pa.date32(), st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1))),
    (pa.time32("s"), st.just(dt.time(1, 2, 3))),
    (pa.duration("s"), st.just(dt.timedelta(seconds=3))),
    (pa.null(), st.none()),
    (pa.binary(), st.binary(max_size=3)),
    (pa.list_(pa.int64()), st.lists(st.one_of(st.none(), INTEGER), max_size=5)),
    (pa.list_(pa.string()), st.lists(st.one_of(st.none(), TEXT), max_size=5)),
    (pa.large_list(pa.string()), st.lists(TEXT, max_size=5)),
    (pa.list_(pa.uint64()), st.lists(st.integers(0, 2**64 - 1), max_size=2)),
    (pa.list_(pa.null()), st.lists(st.none(), max_size=2)),
    (pa.list_(pa.float32()), st.lists(st.just(1.5), max_size=2)),
    (pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=2)),
    (pa.list_(pa.dictionary(pa.int32(), pa.string())), st.lists(TEXT, max_size=4)),
    (pa.list_(pa.int32(), 2), st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=2, max_size=2)),
    (pa.list_(pa.list_(pa.int64())), st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=2)),
    (pa.struct([("x", pa.int64())]), st.fixed_dictionaries({"x": st.integers(0, 2)})),
    (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(TEXT, st.integers(0, 2)), max_size=2)),
]
USUAL = {"label": 1, "dense": 5, "category": 8, "listed": 21, "separated": 8, "moment": 2, "user": 2}


@dataclass(frozen=True, kw_only=True)
class Log:
    columns: dict[str, pa.Array]
    row_group: int


def is_valid_time(moment: Any) -> bool:
    """Reject numbers that would be a date in a finer unit. Numbers from 2**63 are never times."""
    return not isinstance(moment, int | float) or not 2**32 <= moment < 2**63


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Draw columns of the types that the schema expects and, sometimes, of any other type."""
    rows = draw(st.integers(1, 6))
    odd = draw(st.sampled_from([None, None, *USUAL]))
    columns = {}
    for name, usual in USUAL.items():
        alike = [place for place in range(len(KINDS)) if fits(name, KINDS[place][0])]
        kind, cells = KINDS[
            draw(st.sampled_from(range(len(KINDS)) if name == odd else [*[usual] * len(alike), *alike]))
        ]
        nulls = draw(st.booleans()) and (NULL_LISTS or not pa.types.is_fixed_size_list(kind))
        cells = cells.filter(is_valid_time) if name == "moment" else cells
        column = [draw(st.one_of(st.none(), cells) if nulls else cells) for _ in range(rows)]
        columns[name] = (
            pa.array(column, kind) if not pa.types.is_dictionary(kind) else dictionary_encode(column, kind)
        )
    return Log(columns=columns, row_group=draw(st.integers(1, 6)))


def dictionary_encode(column: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(column, kind.value_type).dictionary_encode().cast(kind)


def fits(name: str, kind: pa.DataType) -> bool:
    try:
        REFERENCE[name](kind, None)
    except WrongType:
        return False
    return True


def with_users(users: list[float | None], row_group: int) -> Log:
    """Return a log in which only the users can be wrong."""
    rows = len(users)
    columns = {name: pa.nulls(rows) for name in USUAL}
    columns |= {
        "label": pa.array([0] * rows),
        "moment": pa.array([0] * rows),
        "user": pa.array(users, pa.float32()),
    }
    return Log(columns=columns, row_group=row_group)


@settings(deadline=None, max_examples=60)
@given(logs())
@example(with_users([0.0, 0.0, math.nan, None, 1.0], row_group=1))
@example(with_users([0.0, 0.0, math.nan, None, 1.0], row_group=5))
@example(with_users([math.nan], row_group=1))
def test_any_schema_reads_like_the_reference_or_names_the_error(
    tmp_path_factory: pytest.TempPathFactory, log: Log
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log.parquet"
    write(path, log.columns, log.row_group)
    wrong = {name for name, column in log.columns.items() if not fits(name, column.type)}
    if wrong:
        with refuses(StrataError, str(path)) as caught:
            read(path, SCHEMA, "skip")
        assert any(not missing(f"'{name}'", str(caught.value)) for name in wrong)
        assert "\n" not in str(caught.value)
        return
    cells = {
        name: [REFERENCE[name](column.type, cell) for cell in column.to_pylist()]
        for name, column in log.columns.items()
    }
    bad = {
        (row + 1, name) for name, column in cells.items() for row, cell in enumerate(column) if cell is BAD
    }
    good = [row for row in range(len(cells["label"])) if all(cells[name][row] is not BAD for name in cells)]
    chunks = list(source(path, SCHEMA, "skip").chunks(path.parent))
    frame = pl.concat([chunk.frame for chunk in chunks])
    assert frame.to_dict(as_series=False) == {
        name: [column[row] for row in good] for name, column in cells.items()
    }
    assert sum(chunk.bad_rows for chunk in chunks) == len(cells["label"]) - len(good)
    assert [row - 1 for chunk in chunks for row in chunk.rows] == good
    if bad:
        with pytest.raises(DataError) as caught:
            read(path, SCHEMA)
        named = re.match(rf"{path}, row (\d+)\b.*column '(\w+)'", str(caught.value))
        assert named, caught.value
        assert int(named[1]) == min(row for row, _ in bad)
        assert (int(named[1]), named[2]) in bad


def multi(**options: Any) -> Schema:
    return Schema(label="y", sparse=(SparseFeature(name="tags", kind="multi", **options),))


@pytest.mark.parametrize(
    ("times", "unit", "hint"),
    [
        ([1_506_826_800_026, 1_507_865_792_177], "s", "49719 49752 time_unit ms"),
        ([1_506_826_800, 1_507_865_792], "ms", "1970 2017-10-13 time_unit"),
        ([1_506_826_800 * 10**9], "us", "49719 time_unit ns"),
        ([1_506_826_800, None], "s", ""),
        ([0, 3600, 86_400 * 365], "s", ""),
        ([-5, 5], "ms", ""),
        ([0, 1_506_826_800_026], "s", ""),
        ([], "s", ""),
    ],
)
def test_times_that_are_dates_only_in_another_unit_are_refused(
    tmp_path: Path, times: list[int | None], unit: TimeUnit, hint: str
) -> None:
    path = tmp_path / "log.parquet"
    write(path, {"y": pa.array([0, *[1] * len(times)]), "t": pa.array([None, *times], pa.int64())})
    schema = Schema(label="y", time="t", time_unit=unit)
    if not hint:
        assert read(path, schema, "skip")["t"].to_list() == [time for time in times if time is not None]
        return
    with refuses(DataError, f"log.parquet 't' {hint}"):
        read(path, schema, "skip")


def test_files_must_agree_on_text_columns(tmp_path: Path) -> None:
    schema = Schema(label="y", sparse=(SparseFeature(name="c"),))
    write(tmp_path / "a.parquet", {"y": pa.array([0, 1]), "c": pa.array([1, 2], pa.int16())})
    write(tmp_path / "b.parquet", {"y": pa.array([0, 1]), "c": pa.array([3, 4], pa.int64())})
    assert read(tmp_path / "*.parquet", schema)["c"].to_list() == [1, 2, 3, 4]
    write(tmp_path / "c.parquet", {"y": pa.array([0, 1]), "c": pa.array(["3", "4"])})
    with refuses(DataError, "c.parquet 'c' string int16 a.parquet"):
        read(tmp_path / "*.parquet", schema)
    with refuses(DataError, "c.parquet 'c' string int16 a.parquet"):
        list(source(tmp_path / "*.parquet", schema).chunks(tmp_path, ChunkShare(done=frozenset(range(2)))))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_damaged_file_gives_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log.parquet"
    write(path, {"y": pa.array([0, 1] * 50), "c": pa.array([f"v{i}" for i in range(100)])}, row_group=30)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 5]))]))
    # Any other kind of error fails the test. Flipped values may read as other values.
    with contextlib.suppress(DataError):
        read(path, Schema(label="y", sparse=(SparseFeature(name="c"),)), "skip")


def test_names_that_differ_after_a_zero_byte_are_different_columns() -> None:
    table = pa.table({"x": [1], "x\0": [2]})
    assert to_frame(table, {}, "log.arrow").to_dict(as_series=False) == {"x": [1], "x\0": [2]}
