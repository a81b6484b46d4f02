"""Columns of raw values, as a log has them, from whatever frame they come in.

What Python objects are, is decided here and not by Polars: it takes the third power of their depth for lists in lists,
reads 2.5 among whole numbers as 2 where they are in lists, and for some objects ends in an error that nobody expects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from itertools import chain
from numbers import Integral
from typing import Any, Literal, TypeAlias

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
_LONGEST = 300
_PLAIN: Mapping[type, Any] = {float: pl.Float64, int: pl.Int64, str: pl.String}
"""What columns of one type need no second look."""
Family: TypeAlias = Literal["", "nothing", "text", "whole", "real", "list"]


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
    wanted = [*(feature.name for feature in features), *(feature.weights for feature in schema.weighted)]
    names = _names(frame)
    columns = {name: _column(frame, name, names) for name in wanted}
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
    if isinstance(frame, list) or (hasattr(frame, "__array__") and not has_names(frame)):
        frame = _named_columns(np.asarray(frame))
    columns, names = {}, _names(frame)
    for name in names:
        _check_once(str(name), list(map(str, names)))
        with _readable(str(name)):
            columns[str(name)] = _series(str(name), frame[name])
    return columns


def has_names(frame: Any) -> bool:
    """Whether the columns of a frame have names."""
    return isinstance(frame, Mapping) or any(hasattr(frame, name) for name in ("columns", "column_names"))


def _named_columns(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    if values.ndim != 2:
        raise DataError(f"got an array of {values.ndim} dimensions, expected two: rows and columns. Reshape your data")
    if values.dtype.kind == "c":
        raise DataError("Complex data not supported: expected numbers, texts or truth values")
    return {f"x{place}": np.ascontiguousarray(column) for place, column in enumerate(values.T)}


def _column(frame: Any, name: str, names: Sequence[Any]) -> pl.Series:
    if name not in names:
        there = [str(each) for each in names]
        close = difflib.get_close_matches(name, there, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(
            f"{_FRAME}: no column {name!r}{hint}; it has {', '.join(there[:20])[:_LONGEST] or 'none'}"
        )  # fmt: skip
    _check_once(name, names)
    with _readable(name):
        return _series(name, frame[name])


def _check_once(name: str, names: Sequence[Any]) -> None:
    if names.count(name) > 1:
        raise DataError(f"{_FRAME}: {names.count(name)} columns are named {name!r}; rename or drop all but one")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """What a library finds no type for, or a type without room, is the frame's fault."""
    try:
        yield
    except DataError:
        raise
    except (
        TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, pl.exceptions.PolarsError,
        pl.exceptions.PanicException, pa.ArrowException,
    ) as error:  # fmt: skip
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{_FRAME}: column {name!r} cannot be read: {text}") from error


def _names(frame: Any) -> list[Any]:
    names = frame if isinstance(frame, Mapping) else None
    if names is None and not isinstance(frame, pl.LazyFrame):
        names = getattr(frame, "column_names", None)
        names = getattr(frame, "columns", None) if names is None else names
    try:
        return list(names)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"got {type(frame).__name__}, expected a DataFrame or a mapping of columns") from None


def _series(name: str, column: Any) -> pl.Series:
    """A column of any kind; of Python objects one of text, whole numbers or numbers, or of lists of them."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column.validate(full=True)  # Polars does not see that bytes are no text
        inner = getattr(column.type, "value_type", None)
        if inner is None or not pa.types.is_nested(inner):
            return pl.Series(name, column)
    elif isinstance(column, pl.Series):
        return column.alias(name) if column.dtype != pl.Object else _of_cells(name, column.to_list())
    elif type(column).__module__.split(".")[0] == "pandas" and hasattr(column, "dtype"):
        return _of_cells(name, column.tolist()) if column.dtype == object else pl.Series(name, column)
    elif isinstance(column, np.ndarray) or hasattr(column, "__array__"):
        return _of_array(name, column if isinstance(column, np.ndarray) else np.asarray(column))
    elif isinstance(column, Sequence) and not isinstance(column, str | bytes | bytearray | memoryview):
        return _of_cells(name, list(column))
    raise DataError(f"{_FRAME}: column {name!r} is {_described(column)}, expected a list, an array or a series")


def _of_array(name: str, column: np.ndarray[Any, Any]) -> pl.Series:
    kind = column.dtype
    if column.ndim not in (1, 2) or kind.kind not in "biufUO":
        raise DataError(
            f"{_FRAME}: column {name!r} is an array of {kind} of {column.ndim} dimensions, expected one of numbers or "
            "text, and a second dimension where values are lists"
        )
    if kind.kind in "UO" or kind.itemsize > 8 or isinstance(column, np.ma.MaskedArray):
        return _of_cells(name, column.tolist())
    return pl.Series(name, column, nan_to_null=True)


def _of_cells(name: str, cells: list[Any]) -> pl.Series:
    """A column of Python objects: values, or lists of values; nothing where they are None or NaN."""
    families = {kind: _family(kind) for kind in set(map(type, cells))}
    if "list" not in families.values():
        return _of_values(name, cells, range(len(cells)), families)
    lists = [_nothing_or_list(name, row, cell) for row, cell in enumerate(cells)]
    lengths = np.array([0 if each is None else len(each) for each in lists], dtype=np.int64)
    flat = list(chain.from_iterable(each for each in lists if each is not None))
    values = _of_values(
        name, flat, np.repeat(np.arange(len(lists)), lengths), {kind: _family(kind) for kind in set(map(type, flat))}
    )
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]))
    missing = pa.array([each is None for each in lists], type=pa.bool_())
    return pl.Series(name, pa.LargeListArray.from_arrays(offsets, values.to_arrow(), mask=missing))


def _nothing_or_list(name: str, row: int, cell: Any) -> list[Any] | None:
    if type(cell) is list or cell is None:
        return cell
    if _is_nothing(cell):
        return None
    if isinstance(cell, np.ndarray) and (cell.ndim != 1 or cell.dtype.kind not in "biufUO"):
        raise _odd(name, row, cell, "a list of numbers or text")
    if _family(type(cell)) != "list":
        raise _odd(name, row, cell, "a list, as in other rows")
    return cell.to_list() if isinstance(cell, pl.Series) else cell.tolist() if hasattr(cell, "tolist") else list(cell)


def _of_values(
    name: str, cells: list[Any], rows: Sequence[int] | NDArray[np.int64], families: Mapping[type, Family]
) -> pl.Series:
    """Text, whole numbers or numbers; `rows` says where each value is, and `families` what its type is."""
    if any(issubclass(kind, Decimal) for kind in families):
        cells = [_plain_decimal(cell) for cell in cells]
        families = {kind: _family(kind) for kind in set(map(type, cells))}
    found = set(families.values()) - {"nothing"}
    only = _PLAIN.get(next(iter(families))) if len(families) == 1 else None
    if only is not None:
        with suppress(TypeError, OverflowError):  # of whole numbers beyond 64 bits
            return pl.Series(name, cells, dtype=only, nan_to_null=True)
    if not found:
        return pl.Series(name, [None] * len(cells), dtype=pl.Null)
    # Where text is missing, pandas has NaN.
    if found == {"text", "real"} and all(families[type(cell)] == "text" or _is_nothing(cell) for cell in cells):
        found = {"text"}
    if found == {"text"}:
        return pl.Series(name, [None if _is_nothing(cell) else cell for cell in cells], dtype=pl.String)
    if not found <= {"whole", "real"}:
        kinds = [families[type(cell)] for cell in cells]
        fits = {"nothing", next(kind for kind in kinds if kind != "nothing")} - {"", "list"}
        place = next(place for place, kind in enumerate(kinds) if kind not in fits)
        raise _odd(name, int(rows[place]), cells[place], "text alone, or numbers alone")
    if found == {"whole"}:
        whole = [None if families[type(cell)] == "nothing" else int(cell) for cell in cells]
        kept = [each for each in whole if each is not None]
        for kind, least, end in ((pl.Int64, -(1 << 63), 1 << 63), (pl.UInt64, 0, 1 << 64)):
            if least <= min(kept) and max(kept) < end:
                return pl.Series(name, whole, dtype=kind)
    return pl.Series(
        name, [None if families[type(cell)] == "nothing" else float(cell) for cell in cells], dtype=pl.Float64
    ).fill_nan(None)


def _plain_decimal(cell: Any) -> Any:
    """Return a decimal that is a whole number of 64 bits as such, and any other cell as it is."""
    fits = isinstance(cell, Decimal) and cell.is_finite() and cell.adjusted() < 20
    return int(cell) if fits and cell == cell.to_integral_value() else cell


def _family(kind: type) -> Family:
    """What a cell of that type is; nothing known of it is an empty word."""
    if issubclass(kind, str):
        return "text"
    if issubclass(kind, Integral | np.bool_):
        return "whole"
    if issubclass(kind, float | np.floating | Decimal):
        return "real"
    if issubclass(kind, list | tuple | np.ndarray | pl.Series):
        return "list"
    # The last two are pandas'.
    return "nothing" if kind is type(None) or kind.__name__ in ("NAType", "NaTType") else ""


def _is_nothing(cell: Any) -> bool:
    kind = _family(type(cell))
    return kind == "nothing" or (kind == "real" and cell != cell)


def _odd(name: str, row: int, cell: Any, expected: str) -> DataError:
    return DataError(f"{_FRAME}, row {row + 1}: column {name!r}: got {_described(cell)}, expected {expected}")


def _described(value: Any) -> str:
    kind = type(value)
    plain = _family(kind) not in ("", "list")
    return repr(value)[:80] if plain else f"an object of type {kind.__name__[:80]}"


def _typed(raw: pl.Series, feature: DenseFeature | SparseFeature, converter: Converter) -> pl.Series:
    if isinstance(feature, DenseFeature):
        return converter.number(raw)
    if feature.kind == "single":
        return converter.category(raw, feature.type)
    return converter.values(_as_lists(raw), feature)


def _as_lists(raw: pl.Series) -> pl.Series:
    return raw.arr.to_list() if isinstance(raw.dtype, pl.Array) else raw
