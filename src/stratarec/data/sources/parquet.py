"""Parquet logs with the columns that the schema of a recipe names. A row group is read only if it fits in memory.

A kilobyte of Parquet can expand to many gigabytes, because a repeated value is stored once, with a count. So the
number of values is first taken from the footer. Text is read as a dictionary, which has each distinct value once, and
is expanded only when its total length is known to fit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.data.columns.converter import BadRows, Converter, OnBadRow, check_present
from stratarec.data.schema import Schema
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare, Size, View, chunk_index, set_size
from stratarec.data.sources.files import InputFile, expand, fingerprint, no_rows
from stratarec.errors import DataError

_CHUNK_ROWS = 1 << 18
# Maximum total size of row groups that are read together.
_RUN_BYTES = 64 << 20
# Assumed bytes per value. No number is larger; it is also the size of a dictionary index and the offset of its text.
_VALUE_BYTES = 8
_MAX_TEXT_BYTES = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class ParquetConfig:
    """Paths and columns of a Parquet log."""

    kind: Literal["parquet"] = "parquet"
    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs."""
    schema: Schema = field(default_factory=Schema)
    """Columns to use, and the role of each. Other columns are not read."""
    max_row_group_bytes: Annotated[int, Size("data.source.max_row_group_bytes")] = 2 << 30
    """Maximum size of the used columns of a row group, because a row group is read into memory."""

    def __post_init__(self) -> None:
        set_size(self, "max_row_group_bytes", "data.source.max_row_group_bytes")


class ParquetSource:
    """Rows of Parquet files in file order."""

    divisible = True

    def __init__(self, config: ParquetConfig, on_bad_row: OnBadRow, view: View | None = None) -> None:
        self._view = view or View(schema=config.schema)
        self.schema = self._view.schema
        self._on_bad_row, self._max_bytes = on_bad_row, config.max_row_group_bytes
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self._columns = list(self._view.names)

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first file with rows."""
        for _, schema in _schemas(self._files):
            return list(schema.names)
        raise no_rows(self._files[0])

    def estimate_rows(self) -> int:
        return count_rows(self._files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "parquet", "files": fingerprint(self._files), "schema": repr(self.schema)}

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        for piece in parquet_pieces(self._files, self._columns, self._max_bytes, share):
            bad = BadRows(self._on_bad_row)
            rows = piece.first_row + np.arange(piece.frame.height, dtype=np.int64)
            converter = Converter(self._files[piece.file].path, rows, bad)
            yield Chunk(
                index=piece.index,
                file=piece.file,
                frame=converter.convert(piece.frame, self.schema),
                rows=converter.rows,
                bytes_done=piece.bytes_done,
                bad_rows=bad.count,
                bad_examples=tuple(bad.examples),
                passed_through=converter.passed_through(piece.frame, self._view.pass_through),
            )


@dataclass(frozen=True, kw_only=True)
class FileSlice:
    """Consecutive rows of one file."""

    index: int
    file: int
    first_row: int
    """Row in the file, counted from 1."""
    frame: pl.DataFrame
    bytes_done: int


def open_parquet(raw: IO[bytes], file: InputFile) -> pq.ParquetFile:
    """Return the reader of a file; `DataError` if it is not a Parquet file."""
    try:
        return pq.ParquetFile(raw)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: not a Parquet file, or damaged ({error}); write it again as Parquet") from error


def count_rows(files: tuple[InputFile, ...]) -> int:
    """Return the number of rows of all files, according to their footers."""
    total = 0
    for file in files:
        with file.open() as raw:
            total += int(open_parquet(raw, file).metadata.num_rows)
    return total


def parquet_pieces(
    files: tuple[InputFile, ...], columns: list[str], max_bytes: int, share: ChunkShare = ALL_CHUNKS
) -> Iterator[FileSlice]:
    """Yield the row groups of a share; large row groups are split and small ones joined. Others are not read."""
    bytes_before = 0
    types = ColumnTypes(columns, lambda number: _schemas(files[number:]))
    for number, file in enumerate(files):
        with file.open() as raw:
            reader = open_parquet(raw, file)
            rows = reader.metadata.num_rows
            if rows == 0 and len(files) == 1:
                raise no_rows(file)
            if rows:  # writers give columns without values any type
                types.check(number, file.path, reader.schema_arrow)
            if rows and share.has_file(number):
                groups = RowGroups(raw, reader, file, columns, max_bytes)
                yield from _slices(groups, types, share, number, bytes_before, file.size)
        bytes_before += file.size


def _slices(
    groups: RowGroups, types: ColumnTypes, share: ChunkShare, number: int, bytes_before: int, size: int
) -> Iterator[FileSlice]:
    """Yield the pieces of a file of `size` bytes, after files of `bytes_before` bytes."""
    first_row, place = 0, 0
    for ordinal, run in enumerate(groups.runs()):
        rows = groups.rows(run)
        pieces, table = max(-(-rows // _CHUNK_ROWS), 1), None
        for piece in range(pieces):
            first, last = rows * piece // pieces, rows * (piece + 1) // pieces
            index = chunk_index(number, place)
            if share.has(index, number, ordinal):
                table = table if table is not None else _read_run(groups, run, types)
                frame = pl.from_arrow(table.slice(first, last - first))
                assert isinstance(frame, pl.DataFrame)
                bytes_done = bytes_before + int(size * (first_row + last) / groups.total)
                yield FileSlice(
                    index=index, file=number, first_row=first_row + first + 1, frame=frame, bytes_done=bytes_done
                )
            place += 1
        first_row += rows


def _schemas(files: Iterable[InputFile]) -> Iterator[tuple[str, pa.Schema]]:
    """Yield path and schema of each file with rows. Files without rows are left out, as their types mean nothing."""
    for file in files:
        with file.open() as raw:
            reader = open_parquet(raw, file)
            if reader.metadata.num_rows:
                yield file.path, reader.schema_arrow


def _read_run(groups: RowGroups, run: range, types: ColumnTypes) -> pa.Table:
    table = groups.read(run)
    try:
        return without_metadata(types.typed(table))
    except pa.ArrowException as error:
        raise groups.error(run, f"damaged ({error})") from error


def without_metadata(table: pa.Table) -> pa.Table:
    """Return the columns without the metadata of writers, because Polars panics if the metadata is not UTF-8."""
    columns = [_without_metadata(column) for column in table.columns]
    return pa.Table.from_arrays(columns, names=table.schema.names)


def _without_metadata(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_decimal256(kind):  # which Polars does not know
        return column.cast(pa.decimal128(38, kind.scale))
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not kind.value_field.metadata:
        return column
    make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
    return column.cast(make_list(kind.value_field.remove_metadata()))


class RowGroups:
    """Some columns of the row groups of one open file.

    Parameters
    ----------
    raw : file
        The file, open for reading.
    reader : ParquetFile
        The reader of `raw`.
    max_bytes : int
        Maximum memory of a row group.
    """

    def __init__(
        self, raw: IO[bytes], reader: pq.ParquetFile, file: InputFile, columns: Sequence[str], max_bytes: int
    ) -> None:
        self._file, self._max_bytes, self.total = file, max_bytes, reader.metadata.num_rows
        self._columns, self._schema = list(columns), reader.schema_arrow
        schema = reader.schema
        paths = [schema.column(place).path for place in range(len(schema))]
        places = [
            place
            for place, path in enumerate(paths)
            if any(path == name or path.startswith(f"{name}.") for name in columns)
        ]
        footer = footer_columns(raw, file.path, places)
        # A damaged footer may have impossible numbers, whose products would overflow as integers.
        self._values, sizes = footer[..., 0].astype(np.float64), footer[..., 1].astype(np.float64)
        widths = [max(schema.column(place).length or 0, _VALUE_BYTES) for place in places]
        self._bytes = (self._values * widths + sizes).sum(1)
        self._is_valid = np.asarray((self._values >= 0).all(1) & (sizes >= 0).all(1))
        self._rows = [reader.metadata.row_group(group).num_rows for group in range(len(footer))]
        has_dictionary = np.asarray(footer[..., 2].any(0))
        text = [
            paths[place]
            for place, is_shared in zip(places, has_dictionary, strict=True)
            if is_shared and schema.column(place).physical_type == "BYTE_ARRAY"
        ]
        self._reader = pq.ParquetFile(raw, metadata=reader.metadata, read_dictionary=text) if text else reader
        if min(self._rows, default=0) < 0 or self.total != sum(self._rows):
            raise DataError(f"{file.path}: damaged (its footer counts other rows than its row groups have)")

    def runs(self) -> Iterator[range]:
        """Yield the row groups to read together: one large row group, or several with at most a chunk of rows."""
        first, rows, size = 0, 0, 0.0
        for group, (more, bytes_more) in enumerate(zip(self._rows, self._bytes.tolist(), strict=True)):
            if group > first and (rows + more > _CHUNK_ROWS or size + bytes_more > min(_RUN_BYTES, self._max_bytes)):
                yield range(first, group)
                first, rows, size = group, 0, 0.0
            rows, size = rows + more, size + bytes_more
        if first < len(self._rows):
            yield range(first, len(self._rows))

    def rows(self, run: range) -> int:
        """Return the number of rows in a run."""
        return sum(self._rows[run.start : run.stop])

    def read(self, run: range) -> pa.Table:
        """Read some row groups.

        Raises
        ------
        DataError
            If a row group is too large, or damaged; the message names file and row group.
        """
        # One by one: pyarrow cannot read lists of text with dictionaries from several row groups.
        table = pa.concat_tables(self._read_group(group) for group in run)
        try:
            return self._expanded(run, table)
        except (pa.ArrowException, MemoryError) as error:  # indexes outside of a dictionary
            raise self.error(run, _reason(error)) from error

    def _read_group(self, group: int) -> pa.Table:
        run, rows = range(group, group + 1), self._rows[group]
        values = self._values[group].min(initial=np.inf)
        if values < rows or not self._is_valid[group]:
            raise self.error(run, f"damaged ({rows:,} rows, and {values:,.0f} values in a column of it)")
        if self._bytes[group] > self._max_bytes:
            raise self._too_large(run, int(self._bytes[group]))
        try:
            table = self._reader.read_row_group(group, columns=self._columns)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self.error(run, _reason(error)) from error
        if table.num_rows != rows:
            raise self.error(run, f"damaged (it has {table.num_rows:,} rows, and {rows:,} by its footer)")
        return table

    def _expanded(self, run: range, table: pa.Table) -> pa.Table:
        """Replace dictionaries by their values; `DataError` if the values do not fit in memory."""
        sizes = {name: sum(_expanded_bytes(chunk) for chunk in table[name].chunks) for name in self._columns}
        if sum(sizes.values()) > self._max_bytes:
            raise self._too_large(run, sum(sizes.values()))
        for name, size in sizes.items():
            kind = _expanded_type(self._schema.field(name).type, table[name].type, size)
            if kind is not None:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        return table

    def error(self, run: range, fault: str) -> DataError:
        """Return the error for a fault in the row groups `run`."""
        groups = f"row group {run.start}" if len(run) == 1 else f"row groups {run.start} to {run.stop - 1}"
        return DataError(f"{self._file.path}, {groups}: {fault}")

    def _too_large(self, run: range, size: int) -> DataError:
        return self.error(
            run,
            f"takes {format_bytes(size)} in memory, more than {format_bytes(self._max_bytes)}; write the log with "
            "smaller row groups, or raise data.source.max_row_group_bytes",
        )


def _reason(error: BaseException) -> str:
    if "Expected all lists to be of size" in str(error):
        return f"pyarrow {pa.__version__} reads no lists of a fixed size of which some are null; install pyarrow>=26"
    return f"damaged ({error})"


def _expanded_bytes(array: pa.Array) -> int:
    """Return the number of bytes of an array after its dictionaries are replaced by their values."""
    while any(test(array.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        array = array.flatten()
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not isinstance(array, pa.DictionaryArray) or not any(test(array.type.value_type) for test in text):
        return int(array.nbytes)
    lengths = pc.binary_length(array.dictionary).take(array.indices)
    return int(pc.sum(lengths).as_py() or 0) + _VALUE_BYTES * len(array)


def _expanded_type(kind: pa.DataType, read: pa.DataType, size: int) -> pa.DataType | None:
    """Return the type to which a column of `size` bytes with type `read` must be cast; None if it already is `kind`."""
    if kind == read:
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _expanded_type(kind.value_type, read.value_type, size)
        make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return None if inner is None else make_list(inner)
    return pa.large_string() if pa.types.is_string(kind) and size > _MAX_TEXT_BYTES else kind


class ColumnTypes:
    """Type of each column of a log with several files: the type in the first file in which the column is not all null.

    Parameters
    ----------
    names : sequence of str
        The columns to read.
    schemas : callable
        Returns the path and schema of each file from the given index on. It is called only for a column that is all
        null in a file and so has no type there.
    """

    def __init__(self, names: Sequence[str], schemas: Callable[[int], Iterable[tuple[str, pa.Schema]]]) -> None:
        self._names, self._schemas = names, schemas
        self._types: dict[str, tuple[pa.DataType, str]] = {}

    def check(self, number: int, path: str, schema: pa.Schema) -> None:
        """Raise `DataError` if a file lacks a column, has it twice, or has other types of values than earlier files."""
        for name in self._names:
            check_present(schema.names, name, path)
            kind = schema.field(name).type
            if _value_kind(kind) is None:
                self._look_ahead(number + 1, name)
                continue
            expected, first_path = self._types.setdefault(name, (kind, path))
            if _value_kind(kind) != _value_kind(expected):
                raise DataError(
                    f"{path}: column {name!r} is {kind}, but {expected} in {first_path}; convert one of them"
                )

    def typed(self, table: pa.Table) -> pa.Table:
        """Give columns of nulls the type that they have in other files, and make fixed-size lists lists.

        Polars cannot read a slice of a column of fixed-size lists with nulls.
        """
        for name in self._names:
            kind = table[name].type
            if pa.types.is_fixed_size_list(kind):
                kind = pa.list_(kind.value_type)
            if _value_kind(kind) is None and name in self._types:
                kind = self._types[name][0]
                if pa.types.is_dictionary(kind):
                    kind = kind.value_type
                elif pa.types.is_fixed_size_list(kind):
                    kind = pa.list_(kind.value_type)
            if kind != table[name].type:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        return table

    def _look_ahead(self, number: int, name: str) -> None:
        if name in self._types:
            return
        for path, schema in self._schemas(number):
            if name in schema.names and _value_kind(schema.field(name).type) is not None:
                self._types[name] = (schema.field(name).type, path)
                return


def _value_kind(kind: pa.DataType) -> Literal["text", "unsigned", "other"] | None:
    """Return the kind of values; None for a column of nulls.

    Text and numbers that look alike are different values, and no integer type holds both negative numbers and numbers
    from 2^63.
    """
    while hasattr(kind, "value_type"):  # dictionaries and lists
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    return "unsigned" if pa.types.is_uint64(kind) else "other"


# The footer is read here, as pyarrow ends the process for some damaged ones. It is one struct of Thrift's compact
# protocol, with the field numbers of parquet.thrift. Reading it in another process takes 0.2 s of a processor, here
# about 30 us for each column of a row group.

# The length of the footer and a magic number end every file.
_END_BYTES = 8
# Encodings of values as indexes into a dictionary; early writers left out the place of the dictionary.
_DICTIONARY_ENCODINGS = {2, 8}
# Types of the protocol; integers of every width are written alike.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


def footer_columns(raw: IO[bytes], path: str, places: Sequence[int]) -> NDArray[np.int64]:
    """Return ``[row groups, places, 3]``: values, uncompressed bytes, and whether it has a dictionary, of each column.

    Raises
    ------
    DataError
        If the footer of the Parquet file `path` is damaged.
    """
    raw.seek(-_END_BYTES, 2)
    size = struct.unpack("<i", raw.read(4))[0] + _END_BYTES
    raw.seek(-size, 2)
    try:
        columns = [group[1][place][3] for group in _row_groups(raw.read(size)) for place in places]
        numbers = [
            (column[5], column[6], 11 in column or not _DICTIONARY_ENCODINGS.isdisjoint(column[2]))
            for column in columns
        ]
        return np.array(numbers, dtype=np.int64).reshape(-1, len(places), 3)
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise DataError(f"{path}: damaged (its footer makes no sense)") from error


def _row_groups(footer: bytes) -> Iterator[dict[int, Any]]:
    reader = _ThriftReader(footer)
    for field_number, kind in reader.fields():
        if field_number == 4 and kind == _LIST:
            yield from reader.items()
        else:
            reader.value(kind)


class _ThriftReader:
    """Reader of consecutive values in Thrift's compact protocol; a struct is a dictionary by field number."""

    def __init__(self, content: bytes) -> None:
        self._bytes = iter(content)
        self._next = self._bytes.__next__

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct; the caller reads the value before the next one."""
        number = 0
        while head := self._next():
            number = number + (head >> 4) if head >> 4 else self._signed()
            yield number, head & 15

    def items(self) -> Iterator[Any]:
        """Yield the values of a list."""
        head = self._next()
        kind = head & 15
        for _ in range(head >> 4 if head >> 4 < 15 else self._unsigned()):
            yield self._next() if kind in (_TRUE, _FALSE) else self.value(kind)

    def value(self, kind: int) -> Any:
        """Read the next value, which has the type `kind`."""
        if _BYTE < kind < _DOUBLE:
            return self._signed()
        if kind == _STRUCT:
            return {number: self.value(inner) for number, inner in self.fields()}
        if kind in (_LIST, _SET):
            return list(self.items())
        if kind == _BINARY:
            return self._read(self._unsigned())
        if kind == _MAP:
            count = self._unsigned()
            kinds = self._next() if count else 0
            return [(self.value(kinds >> 4), self.value(kinds & 15)) for _ in range(count)]
        if kind in (_BYTE, _DOUBLE):
            return self._read(1 if kind == _BYTE else 8)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        raise ValueError("no such type")

    def _read(self, size: int) -> bytes:
        content = bytes(islice(self._bytes, size))
        if len(content) < size:
            raise ValueError("the footer ends early")
        return content

    def _unsigned(self) -> int:
        byte = self._next()
        number, shift = byte & 127, 0
        while byte & 128:
            byte, shift = self._next(), shift + 7
            number |= (byte & 127) << shift
        return number

    def _signed(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)
