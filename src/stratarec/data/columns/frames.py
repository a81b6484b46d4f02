"""Read the columns of DataFrames, tables, mappings and Python objects, for `Converter`; and a few rows without Polars.

pyarrow determines the types of Python objects. Polars would read 2.5 as 2 in a list of integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.columns.converter import MAX_NUMBER, BadRows, Converter, check_present, naming_column
from stratarec.data.columns.text_values import split_text
from stratarec.data.schema import Schema, SparseFeature
from stratarec.errors import DataError

FRAME = "the frame"
"""Name of a frame in error messages."""
MAX_PLAIN_ROWS = 32
"""Maximum number of rows that are converted cell by cell; for more rows, conversion by column is faster."""
_UNLIMITED = 1 << 62
# pyarrow infers neither uint64 nor the common type of booleans and numbers; float64 refuses inexact integers.
_CELL_TYPES = (None, pa.float64(), pa.list_(pa.float64()), pa.uint64(), pa.list_(pa.uint64()))
_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Errors of pyarrow for objects that have no common type."""
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
        If a column or value cannot be read; names the column and the row, counted from 1.
    """
    sparse = tuple(
        replace(f, kind="multi", of="", max_length=_UNLIMITED, separator="") if f.kind == "history" else f
        for f in schema.sparse
    )
    features = replace(schema, sparse=sparse, weight="", time="", session="", user="")
    names, columns = _column_names(frame), {}
    for name in (*schema.names, *(feature.weights for feature in schema.weighted)):
        check_present(names, name, FRAME)
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
        If a column cannot be read; names the column.
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
    for name in names:
        check_present([str(other) for other in names], str(name), FRAME)
        with naming_column(FRAME, str(name)):
            columns[str(name)] = read_column(str(name), frame[name])
    return columns


def check_lengths(columns: Mapping[str, pl.Series]) -> int:
    """Return the number of rows; `DataError` if columns have different lengths."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        sizes = ", ".join(f"{name!r} {len(column):,}" for name, column in list(columns.items())[-6:])
        raise DataError(f"{FRAME}: columns of different lengths, expected as many values in each: {sizes}")
    return lengths.pop()


def has_column_names(frame: Any) -> bool:
    """Whether a frame has column names, which a 2-d array has not."""
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
    if column.ndim not in (1, 2) or kind.kind not in "biufUO":
        raise DataError(
            f"{FRAME}: column {name!r} is an array of {kind} of {column.ndim} dimensions, expected one of numbers or "
            "text, and a second dimension where values are lists"
        )
    if kind.kind in "UO" or isinstance(column, np.ma.MaskedArray):
        return _from_cells(name, column.tolist())
    if kind.itemsize > 8:
        column = column.astype(np.float64)
    return pl.Series(name, column, nan_to_null=True)


def _from_cells(name: str, cells: list[Any]) -> pl.Series:
    """Convert a column of Python objects, which are values or lists of values; None and NaN become null."""
    cells = [cell.to_list() if isinstance(cell, pl.Series) else cell for cell in cells]
    for kind in _CELL_TYPES[: 1 if any(isinstance(cell, Decimal) for cell in cells) else None]:  # uint64 would cut them
        with suppress(*_NO_COLUMN):
            return pl.Series(name, pa.array(cells, kind, from_pandas=True))
    seen: list[Any] = []
    for row, cell in enumerate(cells, 1):
        try:
            both = pa.array([*seen, cell], from_pandas=True)
        except _NO_COLUMN as error:
            raise DataError(
                f"{FRAME}, row {row}: column {name!r}: got {_describe(cell)}, expected text alone, numbers alone, or "
                "lists of these"
            ) from error
        seen = seen or [cell] * (not both.null_count)
    raise DataError(f"{FRAME}: column {name!r} has values of several types, expected text alone, or numbers alone")


def _describe(value: Any) -> str:
    is_value = value is None or isinstance(value, str | int | float)
    return repr(value)[:80] if is_value else f"an object of type {type(value).__name__[:80]}"


class _NotPlain(Exception):
    """A cell that cannot be read as it is; `Converter` must convert or refuse it."""


class PlainRowReader:
    """Reader of a few rows, cell by cell. It avoids the cost of library calls for each column.

    Polars takes 30 ms for one row of 26 categories and 13 numbers. Only *plain* cells are read, which need no
    conversion: integers or text with the type of the vocabulary, numbers, lists of these, and None.

    Parameters
    ----------
    schema : Schema
    types : mapping of str to DataType
        Type of the values of each vocabulary.
    """

    def __init__(self, schema: Schema, types: Mapping[str, pl.DataType]) -> None:
        self._names, self._dense = schema.names, len(schema.dense)
        self._features = [(feature, types[feature.vocabulary]) for feature in schema.sparse]
        # In columns of one sequence, a missing value removes values of the other columns too. Only `Converter` does
        # that.
        self._is_supported = not any(feature.kind == "sequence" or feature.weights for feature in schema.sparse)

    def read(self, frame: Any) -> tuple[NDArray[np.float64], list[list[list[Any]]]] | None:
        """Return ``[F_dense, N]`` numbers, NaN if missing, and for each sparse feature the values of each row.

        Return None if the rows cannot be read this way, for example because a cell is not plain or there are more than
        `MAX_PLAIN_ROWS` rows.
        """
        if not self._is_supported:
            return None
        try:
            columns = _plain_columns(frame, self._names)
            if any(len(column) != len(columns[0]) for column in columns):
                return None
            numbers = _plain_numbers(columns[: self._dense], len(columns[0]))
            sparse = zip(columns[self._dense :], self._features, strict=True)
            return numbers, [_plain_values(column, feature, type) for column, (feature, type) in sparse]
        except _NotPlain:
            return None


def _plain_columns(frame: Any, names: Sequence[str]) -> list[Sequence[Any]]:
    """Return the columns of a small frame as sequences of Python values."""
    try:
        if isinstance(frame, Mapping):
            columns = [_plain_list(frame[name]) for name in names]
        elif isinstance(frame, pl.DataFrame) and frame.height <= MAX_PLAIN_ROWS:
            columns = list(zip(*frame[list(names)].rows(), strict=True))
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
    for column in columns:
        kind = _common_type(column)
        if kind not in (float, int, _NoneType) or (kind is int and not _in_range(column, -(1 << 63), 1 << 63)):
            raise _NotPlain
    numbers = np.array(columns, dtype=np.float64).reshape(len(columns), rows)  # None becomes NaN
    if (np.abs(numbers) > MAX_NUMBER).any():
        raise _NotPlain
    return numbers


def _plain_values(column: Sequence[Any], feature: SparseFeature, type: pl.DataType) -> list[list[Any]]:
    """Return a list with the values of each row."""
    if feature.kind == "single":
        lists = [[] if cell is None else [cell] for cell in column]
    else:
        lists = [_plain_items(cell, feature) for cell in column]
    cells = [cell for items in lists for cell in items]
    is_text = type == pl.String
    if cells:
        # Integers that the schema reads as text must be converted, as must text that it reads as integers.
        has_type = feature.type in ("auto", "text" if is_text else "integer")
        if not has_type or _common_type(cells) is not (str if is_text else int):
            raise _NotPlain
    if not is_text and not _in_range(cells, *((0, 1 << 64) if type == pl.UInt64 else (-(1 << 63), 1 << 63))):
        raise _NotPlain
    return lists


def _plain_items(cell: Any, feature: SparseFeature) -> list[Any]:
    if type(cell) is str:
        parts = split_text(cell, feature.separator)
        if parts is None:
            raise _NotPlain
        return parts[: feature.max_length]
    if cell is None:
        return []
    if type(cell) is not list or feature.separator:
        raise _NotPlain
    present = [item for item in cell if item is not None]
    return present[-feature.max_length :] if feature.kind == "history" else present[: feature.max_length]


def _common_type(cells: Sequence[Any]) -> type:
    """Return the type that all cells have except None; `_NotPlain` if they differ."""
    kinds = set(map(type, cells)) - {_NoneType}
    if len(kinds) > 1:
        raise _NotPlain
    return kinds.pop() if kinds else _NoneType


def _in_range(cells: Sequence[Any], least: int, end: int) -> bool:
    return all(cell is None or least <= cell < end for cell in cells)
