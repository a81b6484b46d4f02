"""Read the columns of DataFrames, tables, mappings and Python objects for `Converter`. A few rows
are read without Polars, which is faster.

The types of Python objects are determined here. Polars would take time cubic in the depth of nested
lists, would read 2.5 as 2 in a list of integers, and would raise unexpected errors for some
objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from itertools import chain
from numbers import Integral
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.columns.converter import (
    BOOLEANS,
    MAX_NUMBER,
    BadRows,
    Converter,
    check_present,
    naming_column,
)
from stratarec.data.columns.dates import NO_DATE, compute_dates, read_plain_date
from stratarec.data.columns.text_values import TEXT_TYPES, series_of_lists, split_text
from stratarec.data.schema import Schema, SparseFeature
from stratarec.errors import DataError

FRAME = "the frame"
"""Name of a frame in error messages."""
MAX_PLAIN_ROWS = 1024
"""Maximum number of rows that are read as Python values; for more rows, conversion by Polars is
faster.
"""
# Up to this number of rows, Polars' rows are transposed by Python, which takes less time than
# reading each column.
_TRANSPOSED_ROWS = 32
_INT64_END = float(1 << 63)
_MAX_INTEGER = math.nextafter(_INT64_END, 0.0)
_POLARS_TYPES: Mapping[type, Any] = {float: pl.Float64, int: pl.Int64, str: pl.String}
"""Python types whose columns Polars converts correctly."""
_Family: TypeAlias = Literal["", "nothing", "text", "integer", "real", "date", "list"]
_NoneType = type(None)
# Categories that are missing values.
_MISSING = (None, "")
_NUMBER_TYPES, _SEQUENCES = frozenset((float, int, _NoneType)), frozenset((list, tuple))


def read_frame(frame: Any, schema: Schema, nulls: Collection[str] = ()) -> dict[str, pl.Series]:
    """Return the column of every feature, with the type that it has in a log and null for missing
    values.

    Histories are columns of lists, and are not cut to `max_length`.

    Parameters
    ----------
    frame : DataFrame or mapping of columns
        A DataFrame of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series.
        Columns that are not features are ignored.
    nulls : collection of str
        Texts that mean a missing value, as in the log.

    Raises
    ------
    DataError
        If a column or value cannot be read. The message names the column and the row, counted from
        1.
    """
    sparse = tuple(
        replace(f.as_column(), separator="") if f.kind == "history" else f for f in schema.sparse
    )
    features = replace(schema, sparse=sparse, weight="", time=schema.scored_time, session="", user="")
    frame = _flat(frame)
    names, columns = _column_names(frame), {}
    check_present(names, schema.scored_columns, FRAME)
    numbers = {feature.source for feature in schema.dense if not feature.decimal}
    for name in schema.scored_columns:
        with naming_column(FRAME, name):
            column = read_column(name, _without(frame[name], nulls), is_number=name in numbers)
            if nulls and column.dtype in TEXT_TYPES:
                column = column.cast(pl.String)
                column = column.set(column.is_in(nulls), None)
            columns[name] = column
    rows = check_lengths(columns)
    bad = BadRows(None)
    converter = Converter(FRAME, 1 + np.arange(rows, dtype=np.int64), bad)
    typed_columns = converter.columns(pl.DataFrame(columns), features)
    bad.raise_first()
    return typed_columns


def _flat(frame: Any) -> Any:
    """Return a frame of Polars or Arrow with a column for each field of objects."""
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table) and any(pa.types.is_struct(field.type) for field in frame.schema):
        return _flat(frame.flatten())
    return flattened(frame, FRAME) if isinstance(frame, pl.DataFrame) else frame


def flattened(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    """Return `frame` with a column for each field of objects, such as ``user.id``.

    Raises
    ------
    DataError
        If a field has the name of another column; the message begins with `path`.
    """
    columns = frame.get_columns()
    while any(column.dtype == pl.Struct for column in columns):
        columns = [part for column in columns for part in _fields(column)]
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        check_present(names, [name for name in names if names.count(name) > 1], path)
    return pl.DataFrame(columns)


def _fields(column: pl.Series) -> list[pl.Series]:
    if column.dtype != pl.Struct:
        return [column]
    # `struct.field` would read some names as patterns.
    return [field.alias(f"{column.name}.{field.name}") for field in column.struct.unnest().iter_columns()]


def _without(column: Any, nulls: Collection[str]) -> Any:
    """Return a column of Python objects with None for the texts in `nulls`; any other column as it
    is.
    """
    if nulls and getattr(column, "dtype", None) == np.dtype(object):
        column = column.tolist()
    if not nulls or type(column) not in _SEQUENCES:
        return column
    return [None if type(cell) is str and cell in nulls else cell for cell in column]


def read_columns(frame: Any) -> dict[str, pl.Series]:
    """Return every column of a frame, or of a 2-d array. The columns of an array are named x0, x1
    and so on.

    Raises
    ------
    DataError
        If a column cannot be read. The message names the column.
    """
    if hasattr(frame, "toarray"):
        raise DataError(
            "got a sparse matrix, and sparse input is not supported; give a DataFrame or a dense array"
        )
    if isinstance(frame, list) or (hasattr(frame, "__array__") and not has_column_names(frame)):
        values = np.asarray(frame)
        if values.ndim != 2:
            raise DataError(
                f"got an array of {values.ndim} dimensions, expected two: rows and "
                "columns. Reshape your data"
            )
        if values.dtype.kind == "c":
            raise DataError("Complex data not supported: expected numbers, texts or truth values")
        frame = {f"x{place}": np.ascontiguousarray(column) for place, column in enumerate(values.T)}
    frame = _flat(frame)
    columns, names = {}, _column_names(frame)
    texts = [*map(str, names)]
    for name in names:
        check_present(texts, [str(name)], FRAME)
        with naming_column(FRAME, str(name)):
            columns[str(name)] = read_column(str(name), frame[name])
    return columns


def check_lengths(columns: Mapping[str, pl.Series]) -> int:
    """Return the number of rows. Raises `DataError` if columns have different lengths."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        sizes = ", ".join(f"{name!r} {len(column):,}" for name, column in list(columns.items())[-6:])
        raise DataError(f"{FRAME}: columns of different lengths, expected the same length: {sizes}")
    return lengths.pop()


def has_column_names(frame: Any) -> bool:
    """Whether a frame has column names. A 2-d array has none."""
    return isinstance(frame, Mapping) or any(hasattr(frame, name) for name in ("columns", "column_names"))


def _column_names(frame: Any) -> list[Any]:
    names = frame if isinstance(frame, Mapping) else None
    if names is None and not isinstance(frame, pl.LazyFrame):
        names = getattr(frame, "column_names", None)
        names = getattr(frame, "columns", None) if names is None else names
    try:
        return list(names)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"got {type(frame).__name__}, expected a DataFrame or a mapping of columns"
        ) from None


def read_column(name: str, column: Any, *, is_number: bool = False) -> pl.Series:
    """Convert a column of any kind to a series. Python objects become text, integers, floats, or
    lists of these.

    `is_number` says that numbers are expected: if objects of several types are mixed, the error is
    about another one.
    """
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column.validate(full=True)  # Polars does not notice bytes that are no text
        inner = getattr(column.type, "value_type", None)
        if inner is None or not pa.types.is_nested(inner):
            return pl.Series(name, column)
    elif isinstance(column, pl.Series):
        return (
            column.alias(name)
            if column.dtype != pl.Object
            else _from_cells(name, column.to_list(), is_number)
        )
    elif type(column).__module__.split(".")[0] == "pandas" and hasattr(column, "dtype"):
        return (
            _from_cells(name, column.tolist(), is_number)
            if column.dtype == object
            else pl.Series(name, column)
        )
    elif isinstance(column, np.ndarray) or hasattr(column, "__array__"):
        return _from_array(
            name, column if isinstance(column, np.ndarray) else np.asarray(column), is_number
        )
    elif isinstance(column, Sequence) and not isinstance(column, str | bytes | bytearray | memoryview):
        return _from_cells(name, list(column), is_number)
    raise DataError(
        f"{FRAME}: column {name!r} is {_describe(column)}, expected a list, an array or a series"
    )


def _from_array(name: str, column: np.ndarray[Any, Any], is_number: bool) -> pl.Series:
    kind = column.dtype
    if kind.kind == "M" and column.ndim == 1:
        return pl.Series(name, column.astype("datetime64[us]"))
    if column.ndim not in (1, 2) or kind.kind not in "biufUO":
        raise DataError(
            f"{FRAME}: column {name!r} is an array of {kind} of {column.ndim} dimensions, expected one "
            "dimension of numbers or text, or two dimensions for lists of numbers or text"
        )
    if kind.kind in "UO" or kind.itemsize > 8 or isinstance(column, np.ma.MaskedArray):
        return _from_cells(name, column.tolist(), is_number)
    return pl.Series(name, column, nan_to_null=True)


def _from_cells(name: str, cells: list[Any], is_number: bool) -> pl.Series:
    """Convert a column of Python objects, which are values or lists of values; None and NaN become
    null.
    """
    families = _families(cells)
    if is_number or "list" not in families.values():
        return _from_values(name, cells, range(len(cells)), families, is_number)
    lists = [_list_or_none(name, row, cell) for row, cell in enumerate(cells)]
    lengths = np.array([0 if items is None else len(items) for items in lists], dtype=np.int64)
    flat = list(chain.from_iterable(items for items in lists if items is not None))
    values = _from_values(name, flat, np.repeat(np.arange(len(lists)), lengths), _families(flat), is_number)
    return series_of_lists(
        name, values, lengths, pl.Series([items is None for items in lists], dtype=pl.Boolean)
    )


def _list_or_none(name: str, row: int, cell: Any) -> list[Any] | None:
    if type(cell) is list or cell is None:
        return cell
    if _is_missing(cell):
        return None
    if isinstance(cell, np.ndarray) and (cell.ndim != 1 or cell.dtype.kind not in "biufUO"):
        raise _cell_error(name, row, cell, "a list of numbers or text")
    if _family(type(cell)) != "list":
        raise _cell_error(name, row, cell, "a list, as in other rows")
    return (
        cell.to_list()
        if isinstance(cell, pl.Series)
        else cell.tolist()
        if hasattr(cell, "tolist")
        else list(cell)
    )


def _from_values(
    name: str,
    cells: list[Any],
    rows: Sequence[int] | NDArray[np.int64],
    families: Mapping[type, _Family],
    is_number: bool,
) -> pl.Series:
    """Convert cells to a series of text, integers or floats.

    `rows` lists the row of each cell. `families` maps each Python type in the cells to its
    family."""
    try:
        return _to_series(name, cells, rows, families, is_number)
    except (UnicodeError, OverflowError):
        for row, cell in zip(rows, cells, strict=True):
            if expected := _expected_instead(cell):
                raise _cell_error(name, int(row), cell, expected) from None
        raise


def _expected_instead(cell: Any) -> str:
    """Return the values that are expected instead of a cell that no series can contain; empty if
    one can.
    """
    try:
        if isinstance(cell, str):
            cell.encode()
        elif _family(type(cell)) in ("integer", "real"):
            float(cell)
    except UnicodeError:
        return "text without surrogates"
    except OverflowError:
        return f"a number of at most {MAX_NUMBER:g}"
    return ""


def _to_series(
    name: str,
    cells: list[Any],
    rows: Sequence[int] | NDArray[np.int64],
    families: Mapping[type, _Family],
    is_number: bool,
) -> pl.Series:
    if any(issubclass(kind, Decimal) for kind in families):
        cells = [_integer_or_cell(cell) for cell in cells]
        families = _families(cells)
    present = set(families.values()) - {"nothing"}
    if present and {kind for kind, family in families.items() if family != "nothing"} <= {bool, np.bool_}:
        return pl.Series(
            name, [bool(cell) if families[type(cell)] != "nothing" else None for cell in cells]
        )
    polars_type = _POLARS_TYPES.get(next(iter(families))) if len(families) == 1 else None
    if polars_type is not None:
        with suppress(TypeError, OverflowError):  # integers beyond 64 bits
            return pl.Series(name, cells, dtype=polars_type, nan_to_null=True)
    if not present:
        return pl.Series(name, [None] * len(cells), dtype=pl.Null)
    # pandas uses NaN for missing text.
    if present == {"text", "real"} and all(
        families[type(cell)] == "text" or _is_missing(cell) for cell in cells
    ):
        present = {"text"}
    if present == {"text"}:
        return pl.Series(name, [None if _is_missing(cell) else cell for cell in cells], dtype=pl.String)
    if present == {"date"}:
        return pl.Series(name, [_utc(cell) for cell in cells], dtype=pl.Datetime("us"))
    if not present <= {"integer", "real"}:
        kinds = [families[type(cell)] for cell in cells]
        first = {next(kind for kind in kinds if kind != "nothing")}
        expected = "text alone, or numbers alone"
        if is_number:
            first, expected = {"integer", "real"}, "a number or nothing"
        allowed = (first | {"nothing"}) - {"", "list"}
        place = next(place for place, kind in enumerate(kinds) if kind not in allowed)
        raise _cell_error(name, int(rows[place]), cells[place], expected)
    if present == {"integer"}:
        integers = [None if families[type(cell)] == "nothing" else int(cell) for cell in cells]
        numbers = [value for value in integers if value is not None]
        for kind, least, end in ((pl.Int64, -(1 << 63), 1 << 63), (pl.UInt64, 0, 1 << 64)):
            if least <= min(numbers) and max(numbers) < end:
                return pl.Series(name, integers, dtype=kind)
    return pl.Series(
        name,
        [None if families[type(cell)] == "nothing" else float(cell) for cell in cells],
        dtype=pl.Float64,
    ).fill_nan(None)


def _utc(cell: Any) -> datetime | None:
    """Return a date or time as a time in UTC without a zone; None if it is missing."""
    if not isinstance(cell, date):
        return None
    if not isinstance(cell, datetime):
        return datetime(cell.year, cell.month, cell.day)
    return cell if cell.tzinfo is None else cell.astimezone(timezone.utc).replace(tzinfo=None)


def _integer_or_cell(cell: Any) -> Any:
    """Return the integer for a decimal that is a 64-bit integer; return any other cell
    unchanged.
    """
    fits = isinstance(cell, Decimal) and cell.is_finite() and cell.adjusted() < 20
    return int(cell) if fits and cell == cell.to_integral_value() else cell


def _families(cells: list[Any]) -> dict[type, _Family]:
    return {kind: _family(kind) for kind in set(map(type, cells))}


def _family(kind: type) -> _Family:
    """Return the family of a Python type: ``integer`` for int. An empty string if the type is not
    supported.
    """
    if issubclass(kind, str):
        return "text"
    if issubclass(kind, Integral | np.bool_):
        return "integer"
    if issubclass(kind, float | np.floating | Decimal):
        return "real"
    if issubclass(kind, list | tuple | np.ndarray | pl.Series):
        return "list"
    if issubclass(kind, date) and kind.__name__ != "NaTType":
        return "date"
    # The last two are pandas' missing values.
    return "nothing" if kind is _NoneType or kind.__name__ in ("NAType", "NaTType") else ""


def _is_missing(cell: Any) -> bool:
    family = _family(type(cell))
    return family == "nothing" or (family == "real" and cell != cell)


def _cell_error(name: str, row: int, cell: Any, expected: str) -> DataError:
    return DataError(f"{FRAME}, row {row + 1}: column {name!r}: got {_describe(cell)}, expected {expected}")


def _describe(value: Any) -> str:
    kind = type(value)
    is_value = _family(kind) not in ("", "list")
    return repr(value)[:80] if is_value else f"an object of type {kind.__name__[:80]}"


class _NotPlain(Exception):
    """A cell that cannot be read as it is; `Converter` must convert or refuse it."""


class PlainRows(NamedTuple):
    """Plain values of a few rows. Those of a feature follow one another, row by row."""

    rows: int
    """Number of rows."""
    numbers: NDArray[np.float64]
    """Numbers of all dense features, NaN where missing."""
    limit: float
    """Largest absolute number that needs no conversion."""
    integers: list[int]
    """Values of sparse features with integers; unsigned ones as the signed integers with the same
    bits.
    """
    texts: list[str]
    """Values of the other sparse features."""
    counts: list[int]
    """Number of values of each sparse feature in each row; empty if all are 1."""


class _Group(NamedTuple):
    """Sparse features whose values have one type."""

    type: type
    is_unsigned: bool
    singles: slice
    """Range of the columns whose features have one value per row."""
    lists: list[tuple[int, SparseFeature]]
    """Column number and feature of each column of lists."""


class PlainRowReader:
    """Reader of a few rows of Python values. It avoids the cost of library calls for each column.

    Polars takes 30 ms for one row of 26 categories and 13 numbers. Only *plain* cells are read,
    which need no conversion: integers or text with the type of the vocabulary, numbers, lists of
    these, and None. All columns of a type are checked together: for one row, a Python function for
    each column takes most of the time.

    Parameters
    ----------
    schema : Schema
        Columns that are read from each row.
    types : mapping of str to DataType
        Type of the values of each vocabulary.
    nulls : collection of str
        Texts that mean a missing value; a cell with one is not plain.

    Attributes
    ----------
    features : tuple of SparseFeature
        Sparse features in the order in which their values are read: integers, unsigned integers,
        texts.
    """

    def __init__(
        self, schema: Schema, types: Mapping[str, pl.DataType], nulls: Collection[str] = ()
    ) -> None:
        self._schema = schema
        self._nulls = frozenset(nulls)
        self._columns = schema.scored_columns
        self._groups = list[_Group]()
        place, features = len(schema.dense), list[SparseFeature]()
        for kind in (pl.Int64, pl.UInt64, pl.String):
            members = [feature for feature in schema.sparse if types[feature.vocabulary] == kind]
            members.sort(key=lambda feature: feature.kind != "single")
            lists = [
                (at, feature) for at, feature in enumerate(members, start=place) if feature.kind != "single"
            ]
            singles = slice(place, place + len(members) - len(lists))
            if members:
                self._groups.append(
                    _Group(str if kind == pl.String else int, kind == pl.UInt64, singles, lists)
                )
            features += members
            place += len(members)
        self.features = tuple(features)
        # In columns of one sequence, a missing value removes values of the other columns too. Only
        # `Converter` does that, and it alone converts integers that the schema reads as text, and
        # text that it reads as integers.
        self._is_supported = bool(self._columns) and not any(
            feature.kind == "sequence"
            or feature.weights
            or feature.type not in ("auto", "text" if types[feature.vocabulary] == pl.String else "integer")
            for feature in features
        )
        if self._is_supported:
            read = (*self._columns, *schema.date_features)
            names = (*(feature.source for feature in schema.dense), *(feature.name for feature in features))
            self._read = _getter(self._columns)
            self._pick = _getter([read.index(name) for name in names])

    def read(self, frame: Any) -> PlainRows | None:
        """Return the values of a frame, or None if they cannot be read this way, for example
        because a cell is not plain or there are more than `MAX_PLAIN_ROWS` rows.

        Integers may be beyond 64 bits, and texts may contain surrogates.
        """
        if not self._is_supported:
            return None
        integers = list[int]()
        texts = list[str]()
        counts = list[int]()
        are_single = True
        try:
            columns = self._plain_columns(frame)
            if self._schema.dates:
                columns += self._compute_dates(dict(zip(self._columns, columns, strict=True)))
            rows, columns = len(columns[0]), self._pick(columns)
            numbers, limit = _plain_numbers(columns[: len(self._schema.dense)])
            for group in self._groups:
                cells, sizes = _plain_values(columns, group)
                if self._nulls and group.type is str and not self._nulls.isdisjoint(cells):
                    raise _NotPlain
                (texts if group.type is str else integers).extend(cells)
                counts += [1] * len(cells) if sizes is None else sizes
                are_single = are_single and sizes is None
        except (_NotPlain, OverflowError):
            return None
        return PlainRows(rows, numbers, limit, integers, texts, [] if are_single else counts)

    def _plain_columns(self, frame: Any) -> tuple[Sequence[Any], ...]:
        """Return the columns of a small frame as sequences of Python values."""
        columns: tuple[Sequence[Any], ...]
        try:
            if isinstance(frame, Mapping):
                columns = self._read(frame)
                if not _SEQUENCES.issuperset(map(type, columns)):
                    columns = tuple(map(_plain_list, columns))
            elif isinstance(frame, pl.DataFrame) and frame.height <= _TRANSPOSED_ROWS:
                columns = tuple(zip(*frame[list(self._columns)].rows(), strict=True))
            elif isinstance(frame, pl.DataFrame) and frame.height <= MAX_PLAIN_ROWS:
                columns = tuple(frame[name].to_list() for name in self._columns)
            elif isinstance(frame, pa.Table | pa.RecordBatch) and frame.num_rows <= MAX_PLAIN_ROWS:
                columns = tuple(frame.column(name).to_pylist() for name in self._columns)
            else:
                raise _NotPlain
            sizes = set(map(len, columns))
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            pl.exceptions.PolarsError,
            pa.ArrowException,
        ) as e:
            raise _NotPlain from e
        if len(sizes) != 1 or not 0 < min(sizes) <= MAX_PLAIN_ROWS:
            raise _NotPlain
        return columns

    def _compute_dates(self, raw: Mapping[str, Sequence[Any]]) -> tuple[list[Any], ...]:
        """Return the features that are computed from dates, as plain values: float, or int for a
        sparse feature.
        """
        schema = self._schema
        formats = {date.name: (date.time_unit, date.time_format) for date in schema.dates}
        formats |= {schema.time: (schema.time_unit, schema.time_format)} if schema.scored_time else {}
        seconds = {}
        for name, (unit, form) in formats.items():
            cells = [
                NO_DATE if cell is None and name != schema.time else read_plain_date(cell, unit, form)
                for cell in raw[name]
            ]
            if None in cells:
                raise _NotPlain
            seconds[name] = np.array(cells, dtype=np.int64)
        singles = {feature.name for feature in schema.sparse}
        numbers = compute_dates(schema.dates, seconds)
        return tuple(
            [None if cell != cell else int(cell) for cell in numbers[name].tolist()]
            if name in singles
            else numbers[name].tolist()
            for name in schema.date_features
        )


def _getter(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function of a row that returns its cells with the given keys, as a tuple."""
    return itemgetter(*keys) if len(keys) > 1 else lambda items: tuple(items[key] for key in keys)


def _plain_list(column: Any) -> Sequence[Any]:
    if isinstance(column, list | tuple):
        return column
    is_array = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iuf"
    if (is_array or isinstance(column, pl.Series)) and len(column) <= MAX_PLAIN_ROWS:
        cells: list[Any] = column.tolist() if is_array else column.to_list()
        return cells
    raise _NotPlain


def _plain_numbers(columns: Sequence[Sequence[Any]]) -> tuple[NDArray[np.float64], float]:
    """Return the numbers of all columns, and their largest absolute value that needs no
    conversion.
    """
    cells = list(chain.from_iterable(columns))
    kinds = set(map(type, cells))
    if not kinds <= _NUMBER_TYPES:
        raise _NotPlain
    # None becomes NaN.
    return np.array(cells, dtype=np.float64), _MAX_INTEGER if int in kinds else MAX_NUMBER


def _plain_values(columns: Sequence[Sequence[Any]], group: _Group) -> tuple[list[Any], list[int] | None]:
    """Return the values of a group of features, and the number of values in each cell.

    The numbers are None if every cell has one value.
    """
    cells, counts = list(chain.from_iterable(columns[group.singles])), None
    kinds = set(map(type, cells))
    if not kinds <= {group.type, _NoneType}:
        raise _NotPlain
    if _NoneType in kinds or (group.type is str and "" in cells):
        counts = [int(cell not in _MISSING) for cell in cells]
        cells = [cell for cell in cells if cell not in _MISSING]
    if group.type is str and not BOOLEANS.keys().isdisjoint(cells):
        cells = [BOOLEANS.get(cell, cell) for cell in cells]
    if group.lists:
        bags = [_plain_items(cell, feature) for place, feature in group.lists for cell in columns[place]]
        counts = ([1] * len(cells) if counts is None else counts) + list(map(len, bags))
        items = list(chain.from_iterable(bags))
        if not {group.type}.issuperset(map(type, items)):
            raise _NotPlain
        cells += items
    if group.is_unsigned and cells:
        if min(cells) < 0 or max(cells) >= 1 << 64:
            raise _NotPlain
        cells = [cell - (cell >> 63 << 64) for cell in cells]
    return cells, counts


def _plain_items(cell: Any, feature: SparseFeature) -> list[Any]:
    if type(cell) is str:
        parts = split_text(cell, feature.separator)
        if parts is None:
            raise _NotPlain
    elif cell is None:
        return []
    elif type(cell) is not list or feature.separator:
        raise _NotPlain
    else:
        parts = [item for item in cell if item is not None]
    # `read_frame` checks all values, including those that are cut off here.
    if len(parts) > feature.max_length and not _are_plain(parts):
        raise _NotPlain
    return parts[-feature.max_length :] if feature.kind == "history" else parts[: feature.max_length]


def _are_plain(items: Sequence[Any]) -> bool:
    """Whether all items are texts that can be encoded, or all are integers of 64 bits."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return bool(min(items) >= -_INT64_END and max(items) < _INT64_END)
    try:
        return kinds == {str} and len("".join(items).encode()) >= 0
    except UnicodeError:
        return False
