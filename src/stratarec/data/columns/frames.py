"""Read the columns of DataFrames, tables, mappings and Python objects for `Converter`. A few rows are read without
Polars, which is faster.

The types of Python objects are determined here. Polars would take time cubic in the depth of nested lists, would read
2.5 as 2 in a list of integers, and would raise unexpected errors for some objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from itertools import chain
from numbers import Integral
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.columns.converter import MAX_NUMBER, BadRows, Converter, check_present, naming_column
from stratarec.data.columns.dates import NO_DATE, compute_dates, read_plain_date
from stratarec.data.columns.text_values import split_text
from stratarec.data.schema import Schema, SparseFeature
from stratarec.errors import DataError

FRAME = "the frame"
"""Name of a frame in error messages."""
MAX_PLAIN_ROWS = 1024
"""Maximum number of rows that are read as Python values; for more rows, conversion by Polars is faster."""
# Up to this number of rows, Polars' rows are transposed by Python, which takes less time than reading each column.
_TRANSPOSED_ROWS = 32
_INT64_END = float(1 << 63)
_UNLIMITED = 1 << 62
_POLARS_TYPES: Mapping[type, Any] = {float: pl.Float64, int: pl.Int64, str: pl.String}
"""Python types whose columns Polars converts correctly."""
_Family: TypeAlias = Literal["", "nothing", "text", "integer", "real", "date", "list"]
_NoneType = type(None)


def read_frame(frame: Any, schema: Schema) -> dict[str, pl.Series]:
    """Return the column of every feature, with the type that it has in a log and null for missing values.

    Histories are columns of lists, and are not cut to `max_length`.

    Parameters
    ----------
    frame : DataFrame or mapping of columns
        A DataFrame of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series. Columns that are not
        features are ignored.

    Raises
    ------
    DataError
        If a column or value cannot be read. The message names the column and the row, counted from 1.
    """
    sparse = tuple(
        replace(f, kind="multi", of="", max_length=_UNLIMITED, separator="") if f.kind == "history" else f
        for f in schema.sparse
    )
    features = replace(schema, sparse=sparse, weight="", time=schema.scored_time, session="", user="")
    names, columns = _column_names(frame), {}
    check_present(names, schema.scored_columns, FRAME)
    for name in schema.scored_columns:
        with naming_column(FRAME, name):
            columns[name] = read_column(name, frame[name])
    rows = check_lengths(columns)
    bad = BadRows(None)
    converter = Converter(FRAME, 1 + np.arange(rows, dtype=np.int64), bad)
    typed_columns = converter.columns(pl.DataFrame(columns), features)
    bad.raise_first()
    return typed_columns


def read_columns(frame: Any) -> dict[str, pl.Series]:
    """Return every column of a frame, or of a 2-d array. The columns of an array are named x0, x1 and so on.

    Raises
    ------
    DataError
        If a column cannot be read. The message names the column.
    """
    if hasattr(frame, "toarray"):
        raise DataError("got a sparse matrix, and sparse input is not supported; give a DataFrame or a dense array")
    if isinstance(frame, list) or (hasattr(frame, "__array__") and not has_column_names(frame)):
        values = np.asarray(frame)
        if values.ndim != 2:
            raise DataError(
                f"got an array of {values.ndim} dimensions, expected two: rows and columns. Reshape your data"
            )
        if values.dtype.kind == "c":
            raise DataError("Complex data not supported: expected numbers, texts or truth values")
        frame = {f"x{place}": np.ascontiguousarray(column) for place, column in enumerate(values.T)}
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
        raise DataError(f"got {type(frame).__name__}, expected a DataFrame or a mapping of columns") from None


def read_column(name: str, column: Any) -> pl.Series:
    """Convert a column of any kind to a series. Python objects become text, integers, floats, or lists of these."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column.validate(full=True)  # Polars does not notice bytes that are no text
        inner = getattr(column.type, "value_type", None)
        if inner is None or not pa.types.is_nested(inner):
            return pl.Series(name, column)
    elif isinstance(column, pl.Series):
        return column.alias(name) if column.dtype != pl.Object else _from_cells(name, column.to_list())
    elif type(column).__module__.split(".")[0] == "pandas" and hasattr(column, "dtype"):
        return _from_cells(name, column.tolist()) if column.dtype == object else pl.Series(name, column)
    elif isinstance(column, np.ndarray) or hasattr(column, "__array__"):
        return _from_array(name, column if isinstance(column, np.ndarray) else np.asarray(column))
    elif isinstance(column, Sequence) and not isinstance(column, str | bytes | bytearray | memoryview):
        return _from_cells(name, list(column))
    raise DataError(f"{FRAME}: column {name!r} is {_describe(column)}, expected a list, an array or a series")


def _from_array(name: str, column: np.ndarray[Any, Any]) -> pl.Series:
    kind = column.dtype
    if kind.kind == "M" and column.ndim == 1:
        return pl.Series(name, column.astype("datetime64[us]"))
    if column.ndim not in (1, 2) or kind.kind not in "biufUO":
        raise DataError(
            f"{FRAME}: column {name!r} is an array of {kind} of {column.ndim} dimensions, expected one dimension "
            "of numbers or text, or two dimensions for lists of numbers or text"
        )
    if kind.kind in "UO" or kind.itemsize > 8 or isinstance(column, np.ma.MaskedArray):
        return _from_cells(name, column.tolist())
    return pl.Series(name, column, nan_to_null=True)


def _from_cells(name: str, cells: list[Any]) -> pl.Series:
    """Convert a column of Python objects, which are values or lists of values; None and NaN become null."""
    families = _families(cells)
    if "list" not in families.values():
        return _from_values(name, cells, range(len(cells)), families)
    lists = [_list_or_none(name, row, cell) for row, cell in enumerate(cells)]
    lengths = np.array([0 if items is None else len(items) for items in lists], dtype=np.int64)
    flat = list(chain.from_iterable(items for items in lists if items is not None))
    values = _from_values(name, flat, np.repeat(np.arange(len(lists)), lengths), _families(flat))
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]))
    missing = pa.array([items is None for items in lists], type=pa.bool_())
    return pl.Series(name, pa.LargeListArray.from_arrays(offsets, values.to_arrow(), mask=missing))


def _list_or_none(name: str, row: int, cell: Any) -> list[Any] | None:
    if type(cell) is list or cell is None:
        return cell
    if _is_missing(cell):
        return None
    if isinstance(cell, np.ndarray) and (cell.ndim != 1 or cell.dtype.kind not in "biufUO"):
        raise _cell_error(name, row, cell, "a list of numbers or text")
    if _family(type(cell)) != "list":
        raise _cell_error(name, row, cell, "a list, as in other rows")
    return cell.to_list() if isinstance(cell, pl.Series) else cell.tolist() if hasattr(cell, "tolist") else list(cell)


def _from_values(
    name: str, cells: list[Any], rows: Sequence[int] | NDArray[np.int64], families: Mapping[type, _Family]
) -> pl.Series:
    """Convert cells to a series of text, integers or floats.

    `rows` lists the row of each cell. `families` maps each Python type in the cells to its family."""
    if any(issubclass(kind, Decimal) for kind in families):
        cells = [_integer_or_cell(cell) for cell in cells]
        families = _families(cells)
    present = set(families.values()) - {"nothing"}
    polars_type = _POLARS_TYPES.get(next(iter(families))) if len(families) == 1 else None
    if polars_type is not None:
        with suppress(TypeError, OverflowError):  # integers beyond 64 bits
            return pl.Series(name, cells, dtype=polars_type, nan_to_null=True)
    if not present:
        return pl.Series(name, [None] * len(cells), dtype=pl.Null)
    # pandas uses NaN for missing text.
    if present == {"text", "real"} and all(families[type(cell)] == "text" or _is_missing(cell) for cell in cells):
        present = {"text"}
    if present == {"text"}:
        return pl.Series(name, [None if _is_missing(cell) else cell for cell in cells], dtype=pl.String)
    if present == {"date"}:
        return pl.Series(name, [_utc(cell) for cell in cells], dtype=pl.Datetime("us"))
    if not present <= {"integer", "real"}:
        kinds = [families[type(cell)] for cell in cells]
        allowed = {"nothing", next(kind for kind in kinds if kind != "nothing")} - {"", "list"}
        place = next(place for place, kind in enumerate(kinds) if kind not in allowed)
        raise _cell_error(name, int(rows[place]), cells[place], "text alone, or numbers alone")
    if present == {"integer"}:
        integers = [None if families[type(cell)] == "nothing" else int(cell) for cell in cells]
        numbers = [value for value in integers if value is not None]
        for kind, least, end in ((pl.Int64, -(1 << 63), 1 << 63), (pl.UInt64, 0, 1 << 64)):
            if least <= min(numbers) and max(numbers) < end:
                return pl.Series(name, integers, dtype=kind)
    return pl.Series(
        name, [None if families[type(cell)] == "nothing" else float(cell) for cell in cells], dtype=pl.Float64
    ).fill_nan(None)


def _utc(cell: Any) -> datetime | None:
    """Return a date or time as a time in UTC without a zone; None if it is missing."""
    if not isinstance(cell, date):
        return None
    if not isinstance(cell, datetime):
        return datetime(cell.year, cell.month, cell.day)
    return cell if cell.tzinfo is None else cell.astimezone(timezone.utc).replace(tzinfo=None)


def _integer_or_cell(cell: Any) -> Any:
    """Return the integer for a decimal that is a 64-bit integer; return any other cell unchanged."""
    fits = isinstance(cell, Decimal) and cell.is_finite() and cell.adjusted() < 20
    return int(cell) if fits and cell == cell.to_integral_value() else cell


def _families(cells: list[Any]) -> dict[type, _Family]:
    return {kind: _family(kind) for kind in set(map(type, cells))}


def _family(kind: type) -> _Family:
    """Return the family of a Python type: ``integer`` for int. An empty string if the type is not supported."""
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


class PlainRowReader:
    """Reader of a few rows of Python values. It avoids the cost of library calls for each column.

    Polars takes 30 ms for one row of 26 categories and 13 numbers. Only *plain* cells are read, which need no
    conversion: integers or text with the type of the vocabulary, numbers, lists of these, and None.

    Parameters
    ----------
    schema : Schema
    types : mapping of str to DataType
        Type of the values of each vocabulary.
    """

    def __init__(self, schema: Schema, types: Mapping[str, pl.DataType]) -> None:
        self._schema, self._columns = schema, schema.scored_columns
        self._numbers = [feature.source for feature in schema.dense]
        self._features = [(feature, _python_type(feature, types[feature.vocabulary])) for feature in schema.sparse]
        # In columns of one sequence, a missing value removes values of the other columns too. Only `Converter` does
        # that.
        self._is_supported = not any(feature.kind == "sequence" or feature.weights for feature in schema.sparse)

    def read(self, frame: Any) -> tuple[NDArray[np.float64], list[list[Any]], list[list[int] | None]] | None:
        """Return ``[F_dense, N]`` numbers, NaN if missing, and for each sparse feature its values and their number in
        each row, which is None if every row has one value.

        Return None if the rows cannot be read this way, for example because a cell is not plain or there are more than
        `MAX_PLAIN_ROWS` rows. Integers may be beyond the range of their vocabulary's type.
        """
        if not self._is_supported:
            return None
        try:
            raw: dict[str, Sequence[Any]] = dict(zip(self._columns, _plain_columns(frame, self._columns), strict=True))
            rows = len(next(iter(raw.values())))
            if any(len(column) != rows for column in raw.values()):
                return None
            if self._schema.dates:
                raw |= self._compute_dates(raw)
            numbers = _plain_numbers([raw[name] for name in self._numbers], rows)
            values = [_plain_values(raw[feature.name], feature, kind) for feature, kind in self._features]
        except _NotPlain:
            return None
        return numbers, [cells for cells, _ in values], [counts for _, counts in values]

    def _compute_dates(self, raw: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the features that are computed from dates, as plain values: float, or int for a sparse feature."""
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
        singles = {feature.name for feature, _ in self._features}
        numbers = compute_dates(schema.dates, seconds)
        return {
            name: [None if cell != cell else int(cell) for cell in column.tolist()]
            if name in singles
            else column.tolist()
            for name, column in numbers.items()
        }


def _python_type(feature: SparseFeature, type: pl.DataType) -> type | None:
    """Return the Python type of plain values of a feature, str or int.

    None if no value is plain: integers that the schema reads as text must be converted, as must text that it reads as
    integers.
    """
    is_text = type == pl.String
    if feature.type not in ("auto", "text" if is_text else "integer"):
        return None
    return str if is_text else int


def _plain_columns(frame: Any, names: Sequence[str]) -> list[Sequence[Any]]:
    """Return the columns of a small frame as sequences of Python values."""
    try:
        if isinstance(frame, Mapping):
            columns = [_plain_list(frame[name]) for name in names]
        elif isinstance(frame, pl.DataFrame) and frame.height <= _TRANSPOSED_ROWS:
            columns = list(zip(*frame[list(names)].rows(), strict=True))
        elif isinstance(frame, pl.DataFrame) and frame.height <= MAX_PLAIN_ROWS:
            columns = [frame[name].to_list() for name in names]
        elif isinstance(frame, pa.Table | pa.RecordBatch) and frame.num_rows <= MAX_PLAIN_ROWS:
            columns = [frame.column(name).to_pylist() for name in names]
        else:
            raise _NotPlain
    except (LookupError, TypeError, ValueError, ArithmeticError, pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise _NotPlain from error
    if not columns or not 0 < len(columns[0]) <= MAX_PLAIN_ROWS:
        raise _NotPlain
    return columns


def _plain_list(column: Any) -> Sequence[Any]:
    if isinstance(column, list | tuple):
        return column
    is_array = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iuf"
    if (is_array or isinstance(column, pl.Series)) and len(column) <= MAX_PLAIN_ROWS:
        cells: list[Any] = column.tolist() if is_array else column.to_list()
        return cells
    raise _NotPlain


def _plain_numbers(columns: Sequence[Sequence[Any]], rows: int) -> NDArray[np.float64]:
    kinds = [_common_type(column) for column in columns]
    if any(kind not in (float, int, _NoneType) for kind in kinds):
        raise _NotPlain
    try:
        numbers = np.array(columns, dtype=np.float64).reshape(len(columns), rows)  # None becomes NaN
    except OverflowError as error:
        raise _NotPlain from error
    if (np.abs(numbers) > MAX_NUMBER).any():
        raise _NotPlain
    integers = [place for place, kind in enumerate(kinds) if kind is int]
    if integers and (np.abs(numbers[integers]) >= _INT64_END).any():
        raise _NotPlain
    return numbers


def _plain_values(
    column: Sequence[Any], feature: SparseFeature, kind: type | None
) -> tuple[list[Any], list[int] | None]:
    """Return the values of a sparse feature, and their number in each row; None if every row has one value."""
    if feature.kind == "single":
        common = _common_type(column)
        if common is kind and None not in column:
            return list(column), None
        cells = [cell for cell in column if cell is not None]
        counts = [int(cell is not None) for cell in column]
    else:
        lists = [_plain_items(cell, feature) for cell in column]
        cells, counts = list(chain.from_iterable(lists)), list(map(len, lists))
        common = _common_type(cells)
    if cells and common is not kind:
        raise _NotPlain
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
    # Frames check all values, also those that are cut.
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


def _common_type(cells: Sequence[Any]) -> type:
    """Return the one type of all cells that are not None; raise `_NotPlain` if there are several types."""
    kinds = set(map(type, cells))
    if len(kinds) > 1:
        kinds.discard(_NoneType)
        if len(kinds) > 1:
            raise _NotPlain
    return kinds.pop() if kinds else _NoneType
