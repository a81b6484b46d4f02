"""Columns of raw values, as a log has them, from whatever frame they come in."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.blocks import BadRows
from stratarec.data.sources.typed import Converter
from stratarec.errors import DataError

# How messages name it.
_FRAME = "the frame"


def read_frame(frame: Any, schema: Schema) -> dict[str, pl.Series]:
    """Every feature's column, typed as `prepare` types those of a log; null where a value is missing.

    Parameters
    ----------
    frame : DataFrame or mapping of columns
        Of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series; other columns are not read.

    Raises
    ------
    DataError
        Naming column and row, counted from 1.
    """
    features: tuple[DenseFeature | SparseFeature, ...] = (*schema.dense, *schema.sparse)
    names = [*(feature.name for feature in features), *(feature.weights for feature in schema.weighted)]
    columns = {name: _column(frame, name) for name in names}
    rows = {len(column) for column in columns.values()}
    if len(rows) != 1:
        sizes = ", ".join(f"{name!r} {len(column):,}" for name, column in list(columns.items())[:6])
        raise DataError(f"{_FRAME}: columns of different lengths, expected as many values in each: {sizes}")
    bad = BadRows(None)
    converter = Converter(_FRAME, 1 + np.arange(rows.pop(), dtype=np.int64), bad)
    typed = {}
    for feature in features:
        with _readable(feature.name):
            if isinstance(feature, DenseFeature) or not (feature.kind == "sequence" or feature.weights):
                typed[feature.name] = _typed(columns[feature.name], feature, converter)
    for weighted in schema.weighted:
        with _readable(weighted.name):
            pair = [_as_lists(columns[name]) for name in (weighted.name, weighted.weights)]
            typed |= converter.weighted(pair[0], pair[1], weighted)
    for name, parts in schema.sequences.items():
        with _readable(name):
            typed |= converter.sequence([_as_lists(columns[part.name]) for part in parts], parts)
    bad.settle()
    return typed


def read_columns(frame: Any) -> dict[str, pl.Series]:
    """Every column of a frame, or of a 2-d array, whose columns are called x0, x1 and so on.

    Raises
    ------
    DataError
        Naming the column that cannot be read.
    """
    if hasattr(frame, "toarray"):
        raise DataError("got a sparse matrix, and sparse input is not supported; give a DataFrame or a dense array")
    if isinstance(frame, list) or (hasattr(frame, "__array__") and not _has_names(frame)):
        return _of_array(np.asarray(frame))
    return {name: _column(frame, name) for name in _names(frame)}


def _of_array(values: NDArray[Any]) -> dict[str, pl.Series]:
    if values.ndim != 2:
        raise DataError(f"got an array of {values.ndim} dimensions, expected two: rows and columns. Reshape your data")
    if values.dtype.kind == "c":
        raise DataError("Complex data not supported: expected numbers, texts or truth values")
    found = {}
    for place, column in enumerate(values.T):
        with _readable(f"x{place}"):
            # Of Python's objects Polars makes the type that they have; of NumPy's array of them an opaque one.
            plain = column.tolist() if column.dtype == object else np.ascontiguousarray(column)
            found[f"x{place}"] = pl.Series(f"x{place}", plain, nan_to_null=True)
    return found


def _column(frame: Any, name: str) -> pl.Series:
    names = _names(frame)
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{_FRAME}: no column {name!r}{hint}; it has {', '.join(names[:20]) or 'none'}")
    with _readable(name):
        column = frame[name]
        if isinstance(column, pa.Array | pa.ChunkedArray):
            column.validate(full=True)  # Polars does not see that bytes are no text
        return pl.Series(name, column, nan_to_null=True)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """What Polars finds no type for, or a type without room, is the frame's fault."""
    try:
        yield
    except DataError:
        raise
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{_FRAME}: column {name!r} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _has_names(frame: Any) -> bool:
    return isinstance(frame, Mapping) or any(hasattr(frame, name) for name in ("columns", "column_names"))


def _names(frame: Any) -> list[str]:
    if isinstance(frame, Mapping):
        return [str(name) for name in frame]
    names = None
    if not isinstance(frame, pl.LazyFrame):
        names = getattr(frame, "column_names", None) or getattr(frame, "columns", None)
    if names is None:
        raise DataError(f"got {type(frame).__name__}, expected a DataFrame or a mapping of columns")
    return [str(name) for name in names]


def _typed(raw: pl.Series, feature: DenseFeature | SparseFeature, converter: Converter) -> pl.Series:
    if isinstance(feature, DenseFeature):
        return converter.number(raw)
    if feature.kind == "single":
        return converter.category(raw, feature.type)
    return converter.values(_as_lists(raw), feature)


def _as_lists(raw: pl.Series) -> pl.Series:
    return raw.arr.to_list() if isinstance(raw.dtype, pl.Array) else raw
