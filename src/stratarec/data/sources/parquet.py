"""Parquet logs with any columns, by a schema in the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.schema import Schema, SparseFeature, TimeUnit
from stratarec.data.sources.base import Chunk, OnBadRow
from stratarec.data.sources.columns import Columns
from stratarec.data.sources.files import InputFile, expand, fingerprint
from stratarec.data.sources.limits import Size, set_size
from stratarec.data.sources.row_groups import RowGroups
from stratarec.data.sources.text import BadRows
from stratarec.data.span import too_coarse, unlikely_unit
from stratarec.errors import DataError

_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ParquetConfig:
    """Where the log lies and what its columns are."""

    kind: Literal["parquet"] = "parquet"
    paths: tuple[str, ...] = ()
    """Files, globs or URLs."""
    schema: Schema = field(default_factory=Schema)
    """The columns to use; others are not read."""
    max_row_group_bytes: Annotated[int, Size("data.source.max_row_group_bytes")] = 2 << 30
    """Largest row group, its columns that are used in memory: memory holds a row group."""

    def __post_init__(self) -> None:
        set_size(self, "max_row_group_bytes", "data.source.max_row_group_bytes")


class ParquetSource:
    """Rows of Parquet files in file order."""

    def __init__(self, config: ParquetConfig, on_bad_row: OnBadRow) -> None:
        self.schema = config.schema
        self._on_bad_row, self._most_bytes = on_bad_row, config.max_row_group_bytes
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self._columns = list(dict.fromkeys(_columns(self.schema)))

    def estimate_rows(self) -> int:
        return count_rows(self._files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "parquet", "files": fingerprint(self._files), "schema": repr(self.schema)}

    def chunks(self, workspace: Path, start: int = 0) -> Iterator[Chunk]:
        for piece in parquet_pieces(self._files, self._columns, self._most_bytes, start):
            bad = BadRows(self._on_bad_row)
            converter = Converter(self._files[piece.file].path, piece.first_row, piece.frame.height, bad)
            yield Chunk(
                index=piece.index,
                file=piece.file,
                frame=converter.convert(piece.frame, self.schema),
                rows=converter.rows,
                bytes_done=piece.bytes_done,
                bad_rows=bad.count,
                bad_examples=tuple(bad.examples),
            )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of one file."""

    index: int
    file: int
    first_row: int
    """Row in the file, counted from 1."""
    frame: pl.DataFrame
    bytes_done: int


def open_parquet(raw: object, file: InputFile) -> pq.ParquetFile:
    """The file's reader; `DataError` when it is no Parquet."""
    try:
        return pq.ParquetFile(raw)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: not a Parquet file, or damaged ({error})") from error


def count_rows(files: tuple[InputFile, ...]) -> int:
    """Rows of all files, by their footers."""
    total = 0
    for file in files:
        with file.open() as raw:
            total += int(open_parquet(raw, file).metadata.num_rows)
    return total


def parquet_pieces(
    files: tuple[InputFile, ...], columns: list[str], most_bytes: int, start: int = 0
) -> Iterator[Piece]:
    """Row groups of every file, large ones cut; pieces before `start` are not read."""
    index, before = 0, 0
    checked = Columns(columns, lambda number: _schemas(files[number:]))
    for number, file in enumerate(files):
        with file.open() as raw:
            reader = open_parquet(raw, file)
            checked.check(number, file.path, reader.schema_arrow)
            if reader.metadata.num_rows == 0:
                raise DataError(f"{file.path}: the file has no rows, expected at least one")
            row, total = 0, reader.metadata.num_rows
            groups = RowGroups(raw, reader, file, columns, most_bytes)
            for group in range(reader.metadata.num_row_groups):
                size = reader.metadata.row_group(group).num_rows
                pieces = max(-(-size // _CHUNK_ROWS), 1)
                table = None
                for piece in range(pieces):
                    first, last = size * piece // pieces, size * (piece + 1) // pieces
                    if index >= start:
                        table = table if table is not None else _read(groups, group, checked)
                        frame = pl.from_arrow(table.slice(first, last - first))
                        assert isinstance(frame, pl.DataFrame)
                        done = before + int(file.size * (row + last) / total)
                        yield Piece(index=index, file=number, first_row=row + first + 1, frame=frame, bytes_done=done)
                    index += 1
                row += size
        before += file.size


def _schemas(files: Iterable[InputFile]) -> Iterator[tuple[str, pa.Schema]]:
    for file in files:
        with file.open() as raw:
            yield file.path, open_parquet(raw, file).schema_arrow


def _read(groups: RowGroups, group: int, checked: Columns) -> pa.Table:
    table = groups.read(group)
    try:
        return checked.typed(table)
    except pa.ArrowException as error:
        raise groups.fault(group, f"damaged ({error})") from error


def _columns(schema: Schema) -> list[str]:
    derived = {feature.name for feature in schema.histories}
    names = [schema.label, *(feature.name for feature in schema.dense)]
    names += [feature.name for feature in schema.sparse if feature.name not in derived]
    return names + [name for name in (schema.time, schema.session, schema.user) if name]


class Converter:
    """Raw columns -> the types that `Source` promises, with the file and row of what does not fit."""

    def __init__(self, path: str, first_row: int, rows: int, bad: BadRows) -> None:
        self._path, self._first_row, self._bad = path, first_row, bad
        self._good = np.ones(rows, dtype=bool)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows that nothing was wrong with, counted from 1."""
        return self._first_row + np.flatnonzero(self._good)

    def good(self, columns: dict[str, pl.Series]) -> pl.DataFrame:
        """The rows that nothing was wrong with; raises what is wrong with the first bad one, if there may be none."""
        self._bad.settle()
        return pl.DataFrame(columns).filter(pl.Series(self._good))

    def convert(self, frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
        """Every column of `schema`."""
        columns = {schema.label: self._label(frame[schema.label])}
        for dense in schema.dense:
            columns[dense.name] = self.number(frame[dense.name])
        for sparse in schema.sparse:
            if sparse.kind == "single":
                columns[sparse.name] = self.category(frame[sparse.name])
            elif sparse.kind == "multi":
                columns[sparse.name] = self.values(frame[sparse.name], sparse)
        if schema.time:
            columns[schema.time] = self.time(frame[schema.time], schema.time_unit)
        for name in (schema.session, schema.user):
            if name:
                columns[name] = self.category(frame[name])
                self.require(frame[name], frame[name].is_not_null(), "a value")
        return self.good(columns)

    def require(self, raw: pl.Series, fine: pl.Series, expected: str) -> None:
        """Every row of `raw` must be `fine`."""
        wrong = ~fine.fill_null(False).to_numpy() & self._good
        for row in np.flatnonzero(wrong):
            got = "nothing" if raw[int(row)] is None else repr(raw[int(row)])
            problem = f"column {raw.name!r}: got {got}, expected {expected}"
            self._bad.add(self._path, self._first_row + int(row), problem, unit="row")
        self._good &= ~wrong

    def _type_error(self, raw: pl.Series, expected: str) -> DataError:
        return DataError(f"{self._path}: column {raw.name!r} is {raw.dtype}, expected {expected}")

    def _label(self, raw: pl.Series) -> pl.Series:
        if not _is_number(raw.dtype):
            raise self._type_error(raw, "0 and 1, or booleans")
        value = raw.cast(pl.Float64)
        self.require(raw, (value == 0) | (value == 1), "0 or 1")
        return (value == 1).fill_null(False).cast(pl.UInt8)

    def number(self, raw: pl.Series) -> pl.Series:
        """``Float64``; null where missing."""
        if not _is_number(raw.dtype):
            raise self._type_error(raw, "numbers for a dense feature")
        value = raw.cast(pl.Float64).fill_nan(None)
        self.require(raw, value.is_null() | (value.abs() <= 3.0e38), "a finite number or nothing")
        return value

    def category(self, raw: pl.Series) -> pl.Series:
        """``Int64``, ``UInt64`` where the column is that, or ``String``; null where missing."""
        if raw.dtype == pl.UInt64:
            return raw
        if raw.dtype.is_integer() or raw.dtype in (pl.Boolean, pl.Null):
            return raw.cast(pl.Int64)
        if raw.dtype in (pl.String, pl.Categorical, pl.Enum):
            return raw.cast(pl.String)
        raise self._type_error(raw, "integers or text for a category")

    def values(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        """Lists of what `category` gives, none of it missing; the first `max_length` of each."""
        if feature.separator:
            if raw.dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
                raise self._type_error(raw, f"text to split at {feature.separator!r}")
            parts = raw.cast(pl.String).str.split(feature.separator)
            return parts.list.eval(pl.element().filter(pl.element() != "")).list.head(feature.max_length)
        if raw.dtype == pl.Null:
            raw = raw.cast(pl.List(pl.Int64))
        if raw.dtype.base_type() != pl.List:
            raise self._type_error(raw, "lists, or text with a `separator` in the schema")
        inner = raw.dtype.inner  # type: ignore[attr-defined]
        if not (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Null)):
            raise self._type_error(raw, "lists of integers or text")
        text, kept = inner in (pl.String, pl.Categorical), inner == pl.UInt64
        lists = raw if kept else raw.cast(pl.List(pl.String if text else pl.Int64))
        return lists.list.drop_nulls().list.head(feature.max_length)

    def time(self, raw: pl.Series, unit: TimeUnit) -> pl.Series:
        """``Int64`` in `unit`.

        Raises
        ------
        DataError
            Where `unit` loses what tells times apart, or makes no dates of numbers of which another unit does.
        """
        if raw.dtype.is_integer() or raw.dtype == pl.Null:
            value = raw.cast(pl.Int64, strict=False)
            fault = unlikely_unit(value, unit)
        elif raw.dtype.base_type() == pl.Datetime:
            value = raw.dt.epoch(unit)
            fault = too_coarse(raw, unit)
        else:
            raise self._type_error(raw, "integers or timestamps for the time")
        if fault:
            raise DataError(f"{self._path}: column {raw.name!r} {fault}")
        self.require(raw, value.is_not_null(), "a time")
        return value


def _is_number(kind: pl.DataType) -> bool:
    """Numbers, truth values, or nothing at all."""
    return kind.is_numeric() or kind in (pl.Boolean, pl.Null)
