"""Parquet and Arrow logs with the columns that the schema of a recipe names, read in batches of
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa

from stratarec.data.columns.converter import BadRows, Converter, OnBadRow, check_present
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare, RowsConfig, View, chunk_index
from stratarec.data.sources.files import InputFile, expand, fingerprint, no_rows
from stratarec.data.sources.table_files import DAMAGE, TableFile, open_table
from stratarec.errors import DataError

_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(RowsConfig):
    """Paths and columns of a Parquet or Arrow log."""

    kind: Literal["parquet"] = "parquet"
    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs; Parquet or Arrow (Feather) files. A directory such as
    ``day=2024-03-01`` gives the column ``day`` of the files in it, unless they have this column."""


class ParquetSource:
    """Rows of Parquet and Arrow files in file order."""

    divisible = True

    def __init__(
        self, config: ParquetConfig, on_bad_row: OnBadRow | None, view: View | None = None
    ) -> None:
        self._view = view or View(schema=config.schema)
        self.schema = self._view.schema
        self._on_bad_row = on_bad_row
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
        return {
            "kind": "parquet",
            "files": fingerprint(self._files, self._columns),
            "schema": repr(self.schema),
        }

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        for piece in parquet_pieces(self._files, self._columns, share):
            bad = BadRows(self._on_bad_row)
            rows = piece.first_row + np.arange(piece.frame.height, dtype=np.int64)
            path = self._files[piece.file].path
            converter = Converter(
                path,
                rows,
                bad,
                optional_user=self._view.optional_user,
                optional_label=self._view.optional_label,
            )
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


def count_rows(files: tuple[InputFile, ...]) -> int:
    """Return the number of rows of all files, as the files state them."""
    total = 0
    for file in files:
        with file.open() as raw:
            total += open_table(raw, file).rows
    return total


def parquet_pieces(
    files: tuple[InputFile, ...], columns: list[str], share: ChunkShare = ALL_CHUNKS
) -> Iterator[FileSlice]:
    """Yield the pieces of a share. A piece is a part of a large row group, or several small row
    groups.

    Row groups without a piece in the share are not read.
    """
    types, bytes_before = column_types(columns, _schemas(files)), 0
    for number, file in enumerate(files):
        with file.open() as raw:
            reader = open_table(raw, file)
            if not reader.rows and len(files) == 1:
                raise no_rows(file)
            for ordinal, row_groups in enumerate(
                _group_ranges(reader, file.path) if share.has_file(number) else ()
            ):
                first_row = row_groups.first_row
                indexes = [chunk_index(number, piece) for piece in row_groups.pieces]
                is_needed = [share.has(index, number, ordinal) for index in indexes]
                frames = (
                    _frames(reader, file.path, row_groups, columns, types) if any(is_needed) else iter(())
                )
                for frame, index, needed in zip(frames, indexes, is_needed, strict=False):
                    last_row = first_row + frame.height
                    if needed:
                        yield FileSlice(
                            index=index,
                            file=number,
                            first_row=first_row + 1,
                            frame=frame,
                            bytes_done=bytes_before + int(file.size * last_row / reader.rows),
                        )
                    first_row = last_row
        bytes_before += file.size


@dataclass(frozen=True, kw_only=True)
class _GroupRange:
    """Row groups that are read together: a large one in several pieces, or small ones in one
    piece.
    """

    groups: range
    first_row: int
    rows: int
    pieces: range
    """Numbers of the pieces, counted over the whole file."""

    @property
    def piece_rows(self) -> int:
        """Rows of each piece. The last piece may have fewer rows."""
        return -(-self.rows // len(self.pieces))


def _group_ranges(reader: TableFile, path: str) -> Iterator[_GroupRange]:
    sizes = reader.group_rows
    if min(sizes, default=0) < 0 or sum(sizes) != reader.rows:
        raise DataError(f"{path}: damaged (its footer counts more or fewer rows than its row groups have)")
    first = 0
    first_row = 0
    rows = 0
    piece = 0
    for group, size in enumerate([*sizes, _CHUNK_ROWS]):
        if rows and rows + size > _CHUNK_ROWS:
            pieces = range(piece, piece - (-rows // _CHUNK_ROWS))
            yield _GroupRange(groups=range(first, group), first_row=first_row, rows=rows, pieces=pieces)
            first = group
            first_row = first_row + rows
            rows = 0
            piece = pieces.stop
        rows += size


def _frames(
    reader: TableFile,
    path: str,
    row_groups: _GroupRange,
    columns: list[str],
    types: Mapping[str, pa.DataType],
) -> Iterator[pl.DataFrame]:
    """Read the pieces one after another, so that memory holds one piece and not a whole row
    group.
    """
    rows = 0
    try:
        for table in _tables(reader, row_groups, columns):
            rows += table.num_rows
            if rows > row_groups.rows:
                break
            yield to_frame(table, types, path)
    except DAMAGE as error:
        raise _damaged(path, row_groups, _reason(error)) from error
    if rows != row_groups.rows:
        raise _damaged(
            path, row_groups, f"damaged (it has {rows:,} rows, and {row_groups.rows:,} by its footer)"
        )


def _tables(reader: TableFile, row_groups: _GroupRange, columns: list[str]) -> Iterator[pa.Table]:
    if len(row_groups.pieces) == 1:
        # Row groups are read one by one, because pyarrow cannot read dictionary-encoded lists of
        # text from several.
        yield pa.concat_tables(reader.read_group(group, columns) for group in row_groups.groups)
        return
    batches: list[pa.RecordBatch] = []
    for batch in reader.batches(row_groups.piece_rows, row_groups.groups, columns):
        batches.append(batch)
        if sum(part.num_rows for part in batches) >= row_groups.piece_rows:
            yield pa.Table.from_batches(batches)
            batches = []
    if batches:
        yield pa.Table.from_batches(batches)


def _damaged(path: str, row_groups: _GroupRange, fault: str) -> DataError:
    first, last = row_groups.groups[0], row_groups.groups[-1]
    return DataError(
        f"{path}, row group{f' {first}' if first == last else f's {first} to {last}'}: {fault}"
    )


def _reason(error: BaseException) -> str:
    if "Expected all lists to be of size" in str(error):
        return (
            f"pyarrow {pa.__version__} cannot read fixed-size lists if some are null; install pyarrow>=26"
        )
    return f"damaged ({error})"


def _schemas(files: Iterable[InputFile]) -> Iterator[tuple[str, pa.Schema]]:
    """Yield path and schema of each file with rows. Without rows, the types of columns are
    arbitrary.
    """
    for file in files:
        with file.open() as raw:
            reader = open_table(raw, file)
            if reader.rows:
                yield file.path, reader.schema


def column_types(names: Sequence[str], schemas: Iterable[tuple[str, pa.Schema]]) -> dict[str, pa.DataType]:
    """Return the type of each column in the first file in which the column is not all null.

    Raises
    ------
    DataError
        If a file lacks a column, has it twice, or has other kinds of values in it than earlier
        files.
    """
    first: dict[str, tuple[pa.DataType, str]] = {}
    for path, schema in schemas:
        present = schema.names  # a new list each time: 2,000 of them took two seconds a file
        check_present(present, names, path)
        for name in names:
            kind = schema.field(name).type
            if _value_kind(kind) is None:
                continue
            expected, first_path = first.setdefault(name, (kind, path))
            if _value_kind(kind) != _value_kind(expected):
                raise DataError(
                    f"{path}: column {name!r} is {kind}, but {expected} in "
                    f"{first_path}; convert one of them"
                )
    return {
        name: kind.value_type if pa.types.is_dictionary(kind) else _plain(kind)
        for name, (kind, _) in first.items()
    }


def to_frame(table: pa.Table, types: Mapping[str, pa.DataType], path: str) -> pl.DataFrame:
    """Convert a table of the file `path` to a frame. If a column has only nulls and no type, it
    gets its type in `types`.

    Raises
    ------
    DataError
        If a column has a type that Polars cannot read, such as a union.
    """
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        stored = column.type
        kind = types.get(name, stored) if _value_kind(stored) is None else _plain(stored)
        columns.append(column if kind is stored else column.cast(kind))
    # The schema's metadata is not given to Polars, which panics if it is not UTF-8, and a name may
    # end at a zero byte.
    frame = pl.DataFrame(
        {
            str(place): _series(name, column, path)
            for place, (name, column) in enumerate(zip(table.column_names, columns, strict=True))
        }
    )
    frame.columns = table.column_names
    return frame


def _series(name: str, column: pa.ChunkedArray, path: str) -> pl.Series:
    try:
        return pl.Series(column)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(
            f"{path}: column {name!r} is {column.type}, expected numbers, text, times or lists of "
            "these; convert it, or remove it from the file"
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type that can be compared in Polars: no extensions, maps, 256-bit
    decimals, fixed-size lists, or metadata of lists.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_map(kind):
        return pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
    if pa.types.is_decimal256(kind):
        return pa.decimal128(38, kind.scale)
    if pa.types.is_fixed_size_list(kind):  # Polars cannot read a slice of them with nulls
        return pa.list_(kind.value_type)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not kind.value_field.metadata:
        return kind
    make_list = pa.list_ if pa.types.is_list(kind) else pa.large_list
    return make_list(kind.value_field.remove_metadata())


def _value_kind(kind: pa.DataType) -> Literal["text", "unsigned", "other"] | None:
    """Return the kind of values; None for a column of nulls.

    Text and numbers that look alike are different values, and no integer type holds both negative
    numbers and numbers from 2^63.
    """
    while hasattr(kind, "value_type"):  # dictionaries and lists
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    return "unsigned" if pa.types.is_uint64(kind) else "other"
