"""Parquet logs with any columns, by a schema in the recipe; row groups are read only once it is known that they fit.

A kilobyte of Parquet can stand for many gigabytes: a value that is repeated is stored once, with a count. So the
columns that are wanted are counted first, by the footer. Text is read as a dictionary, each distinct value once, and
written out when the sum of the lengths is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stratarec.config.units import readable
from stratarec.data.schema import Schema
from stratarec.data.sources.base import WHOLE, Chunk, ChunkShare, OnBadRow, Size, View, set_size
from stratarec.data.sources.blocks import BadRows
from stratarec.data.sources.columns import ColumnTypes
from stratarec.data.sources.files import InputFile, expand, fingerprint
from stratarec.data.sources.typed import Converter
from stratarec.errors import DataError

_CHUNK_ROWS = 1 << 18
# A value, as wide as any number becomes; or its place in a dictionary and among others.
_VALUE_BYTES = 8
_LONGEST_TEXT = (1 << 31) - 1


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

    divisible = True

    def __init__(self, config: ParquetConfig, on_bad_row: OnBadRow, view: View | None = None) -> None:
        self._view = view or View(schema=config.schema)
        self.schema = self._view.schema
        self._on_bad_row, self._most_bytes = on_bad_row, config.max_row_group_bytes
        self._files = expand(config.paths)
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self._columns = list(self._view.names)

    def column_names(self) -> list[str]:
        """Of the first file."""
        return list(next(_schemas(self._files))[1].names)

    def estimate_rows(self) -> int:
        return count_rows(self._files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "parquet", "files": fingerprint(self._files), "schema": repr(self.schema)}

    def chunks(self, workspace: Path, share: ChunkShare = WHOLE) -> Iterator[Chunk]:
        for piece in parquet_pieces(self._files, self._columns, self._most_bytes, share):
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
                kept=converter.kept(piece.frame, self._view.keep) if self._view.keep else None,
            )


@dataclass(frozen=True, kw_only=True)
class FileSlice:
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
    files: tuple[InputFile, ...], columns: list[str], most_bytes: int, share: ChunkShare = WHOLE
) -> Iterator[FileSlice]:
    """Row groups of every file, large ones cut; those that the share has not are not read."""
    index, before = 0, 0
    checked = ColumnTypes(columns, lambda number: _schemas(files[number:]))
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
                    if share.has(index, number, group):
                        table = table if table is not None else _read(groups, group, checked)
                        frame = pl.from_arrow(table.slice(first, last - first))
                        assert isinstance(frame, pl.DataFrame)
                        done = before + int(file.size * (row + last) / total)
                        yield FileSlice(
                            index=index, file=number, first_row=row + first + 1, frame=frame, bytes_done=done
                        )
                    index += 1
                row += size
        before += file.size


def _schemas(files: Iterable[InputFile]) -> Iterator[tuple[str, pa.Schema]]:
    for file in files:
        with file.open() as raw:
            yield file.path, open_parquet(raw, file).schema_arrow


def _read(groups: RowGroups, group: int, checked: ColumnTypes) -> pa.Table:
    table = groups.read(group)
    try:
        return _without_notes(checked.typed(table))
    except pa.ArrowException as error:
        raise groups.fault(group, f"damaged ({error})") from error


def _without_notes(table: pa.Table) -> pa.Table:
    """The same columns without what writers note beside them: Polars ends with a panic where that is no UTF-8."""
    columns = [_bare(column) for column in table.columns]
    return pa.Table.from_arrays(columns, names=table.schema.names)


def _bare(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not kind.value_field.metadata:
        return column
    make = pa.list_ if pa.types.is_list(kind) else pa.large_list
    return column.cast(make(kind.value_field.remove_metadata()))


class RowGroups:
    """Wanted columns of one open file.

    Parameters
    ----------
    raw : file
        The file, open for reading.
    reader : ParquetFile
        Of it.
    most_bytes : int
        That a row group may take in memory.
    """

    def __init__(
        self, raw: IO[bytes], reader: pq.ParquetFile, file: InputFile, columns: Sequence[str], most_bytes: int
    ) -> None:
        self._file, self._metadata, self._most = file, reader.metadata, most_bytes
        self._columns, self._schema = list(columns), reader.schema_arrow
        schema = reader.schema
        self._places = [
            place
            for place in range(len(schema))
            if any(
                schema.column(place).path == name or schema.column(place).path.startswith(f"{name}.")
                for name in columns
            )
        ]
        self._widths = {place: max(schema.column(place).length or 0, _VALUE_BYTES) for place in self._places}
        texts = [place for place in self._places if schema.column(place).physical_type == "BYTE_ARRAY"]
        text = [schema.column(place).path for place in texts if self._is_shared(place)]
        self._reader = pq.ParquetFile(raw, metadata=reader.metadata, read_dictionary=text) if text else reader
        if self._metadata.num_rows != sum(self._rows(group) for group in range(self._metadata.num_row_groups)):
            raise DataError(f"{file.path}: damaged (its footer counts other rows than its row groups have)")

    def _is_shared(self, place: int) -> bool:
        """Whether a column has a dictionary in some row group; early writers left out where it is."""
        columns = (self._metadata.row_group(group).column(place) for group in range(self._metadata.num_row_groups))
        return any(each.has_dictionary_page or any("DICTIONARY" in how for how in each.encodings) for each in columns)

    def _rows(self, group: int) -> int:
        return int(self._metadata.row_group(group).num_rows)

    def read(self, group: int) -> pa.Table:
        """One row group.

        Raises
        ------
        DataError
            Naming file and row group where it is too large, or damaged.
        """
        rows = self._check(group)
        try:
            table = self._reader.read_row_group(group, columns=self._columns)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self.fault(group, _reason(error)) from error
        if table.num_rows != rows:
            raise self.fault(group, f"damaged (it has {table.num_rows:,} rows, and {rows:,} by its footer)")
        try:
            return self._written_out(group, table)
        except (pa.ArrowException, MemoryError) as error:  # places outside of a dictionary
            raise self.fault(group, _reason(error)) from error

    def _written_out(self, group: int, table: pa.Table) -> pa.Table:
        """The table with every value of a dictionary written out, where that fits."""
        sizes = {name: sum(_written_bytes(chunk) for chunk in table[name].chunks) for name in self._columns}
        if sum(sizes.values()) > self._most:
            raise self._too_large(group, sum(sizes.values()))
        for name, size in sizes.items():
            kind = _target(self._schema.field(name).type, table[name].type, size)
            if kind is not None:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        return table

    def _check(self, group: int) -> int:
        """Refuse a row group that is too large by its footer; returns its rows."""
        metadata, rows, size = self._metadata.row_group(group), self._rows(group), 0
        for place in self._places:
            column = metadata.column(place)
            if column.num_values < rows or column.total_uncompressed_size < 0:
                raise self.fault(group, f"damaged ({rows:,} rows, and {column.num_values:,} values in a column of it)")
            size += column.num_values * self._widths[place] + column.total_uncompressed_size
        if size > self._most:
            raise self._too_large(group, size)
        return rows

    def fault(self, group: int, what: str) -> DataError:
        """What is wrong with a row group, as an error."""
        return DataError(f"{self._file.path}, row group {group}: {what}")

    def _too_large(self, group: int, size: int) -> DataError:
        return self.fault(
            group,
            f"takes {readable(size)} in memory, more than {readable(self._most)}; write the log with smaller row "
            "groups, or raise data.source.max_row_group_bytes",
        )


def _reason(error: BaseException) -> str:
    if "Expected all lists to be of size" in str(error):
        return f"pyarrow {pa.__version__} reads no lists of a fixed size of which some are null; install pyarrow>=26"
    return f"damaged ({error})"


def _written_bytes(array: pa.Array) -> int:
    """Bytes of an array when every value of a dictionary is written out."""
    return sum(
        int(pc.sum(pc.binary_length(part.dictionary).take(part.indices)).as_py() or 0) + _VALUE_BYTES * len(part)
        if isinstance(part, pa.DictionaryArray) and _is_text(part.type.value_type)
        else part.nbytes
        for part in _leaves(array)
    )


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    while any(test(array.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        array = array.flatten()
    yield array


def _is_text(kind: pa.DataType) -> bool:
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def _target(kind: pa.DataType, found: pa.DataType, size: int) -> pa.DataType | None:
    """What a column that was read as a dictionary becomes; None where it stays."""
    if kind == found:
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _target(kind.value_type, found.value_type, size)
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return None if inner is None else make(inner)
    return pa.large_string() if pa.types.is_string(kind) and size > _LONGEST_TEXT else kind
