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

from stratarec.config.units import format_bytes
from stratarec.data.schema import Schema
from stratarec.data.sources.base import WHOLE, Chunk, ChunkShare, OnBadRow, Size, View, chunk_index, set_size
from stratarec.data.sources.blocks import BadRows
from stratarec.data.sources.columns import ColumnTypes
from stratarec.data.sources.files import InputFile, expand, fingerprint, no_rows
from stratarec.data.sources.footer import footer_columns
from stratarec.data.sources.typed import Converter
from stratarec.errors import DataError

_CHUNK_ROWS = 1 << 18
# Of row groups that are read together.
_RUN_BYTES = 64 << 20
# A value, as wide as any number becomes; or its place in a dictionary and among others.
_VALUE_BYTES = 8
_LONGEST_TEXT = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class ParquetConfig:
    """Where the log lies and what its columns are."""

    kind: Literal["parquet"] = "parquet"
    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs."""
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
        """Return the names of the columns of the first file with rows."""
        for _, schema in _schemas(self._files):
            return list(schema.names)
        raise no_rows(self._files[0])

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


def open_parquet(raw: IO[bytes], file: InputFile) -> pq.ParquetFile:
    """The file's reader; `DataError` when it is no Parquet."""
    try:
        return pq.ParquetFile(raw)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: not a Parquet file, or damaged ({error}); write it again as Parquet") from error


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
    """Row groups of every file, large ones cut and small ones joined; those that the share has not are not read."""
    before = 0
    checked = ColumnTypes(columns, lambda number: _schemas(files[number:]))
    for number, file in enumerate(files):
        with file.open() as raw:
            reader = open_parquet(raw, file)
            rows = reader.metadata.num_rows
            if rows == 0 and len(files) == 1:
                raise no_rows(file)
            if rows:  # writers give columns without values any type
                checked.check(number, file.path, reader.schema_arrow)
            if rows and share.has_file(number):
                groups = RowGroups(raw, reader, file, columns, most_bytes)
                yield from _slices(groups, checked, share, number, before, file.size)
        before += file.size


def _slices(
    groups: RowGroups, checked: ColumnTypes, share: ChunkShare, number: int, before: int, size: int
) -> Iterator[FileSlice]:
    """The wanted pieces of a file, `before` which there are so many bytes of others, and which has `size` itself."""
    row, place = 0, 0
    for ordinal, run in enumerate(groups.runs()):
        rows = groups.rows(run)
        pieces, table = max(-(-rows // _CHUNK_ROWS), 1), None
        for piece in range(pieces):
            first, last = rows * piece // pieces, rows * (piece + 1) // pieces
            index = chunk_index(number, place)
            if share.has(index, number, ordinal):
                table = table if table is not None else _read(groups, run, checked)
                frame = pl.from_arrow(table.slice(first, last - first))
                assert isinstance(frame, pl.DataFrame)
                done = before + int(size * (row + last) / groups.total)
                yield FileSlice(index=index, file=number, first_row=row + first + 1, frame=frame, bytes_done=done)
            place += 1
        row += rows


def _schemas(files: Iterable[InputFile]) -> Iterator[tuple[str, pa.Schema]]:
    """Path and schema of each file with rows: a column without values may have any type."""
    for file in files:
        with file.open() as raw:
            reader = open_parquet(raw, file)
            if reader.metadata.num_rows:
                yield file.path, reader.schema_arrow


def _read(groups: RowGroups, run: range, checked: ColumnTypes) -> pa.Table:
    table = groups.read(run)
    try:
        return without_notes(checked.typed(table))
    except pa.ArrowException as error:
        raise groups.fault(run, f"damaged ({error})") from error


def without_notes(table: pa.Table) -> pa.Table:
    """The same columns without what writers note beside them: Polars ends with a panic where that is no UTF-8."""
    columns = [_bare(column) for column in table.columns]
    return pa.Table.from_arrays(columns, names=table.schema.names)


def _bare(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_decimal256(kind):  # which Polars does not know
        return column.cast(pa.decimal128(38, kind.scale))
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
        self,
        raw: IO[bytes],
        reader: pq.ParquetFile,
        file: InputFile,
        columns: Sequence[str],
        most_bytes: int,
    ) -> None:
        self._file, self._most, self.total = file, most_bytes, reader.metadata.num_rows
        self._columns, self._schema = list(columns), reader.schema_arrow
        schema = reader.schema
        places = [
            place
            for place in range(len(schema))
            if any(
                schema.column(place).path == name or schema.column(place).path.startswith(f"{name}.")
                for name in columns
            )
        ]
        found = footer_columns(raw, file.path, places)
        # Numbers that no file has are of a damaged footer, and as floats their products stay what they are.
        self._values, sizes = found[..., 0].astype(np.float64), found[..., 1].astype(np.float64)
        widths = [max(schema.column(place).length or 0, _VALUE_BYTES) for place in places]
        self._bytes = (self._values * widths + sizes).sum(1)
        self._is_whole = np.asarray((self._values >= 0).all(1) & (sizes >= 0).all(1))
        self._rows = [reader.metadata.row_group(group).num_rows for group in range(len(found))]
        shared = np.asarray(found[..., 2].any(0))
        text = [
            schema.column(place).path
            for place, is_shared in zip(places, shared, strict=True)
            if is_shared and schema.column(place).physical_type == "BYTE_ARRAY"
        ]
        self._reader = pq.ParquetFile(raw, metadata=reader.metadata, read_dictionary=text) if text else reader
        if min(self._rows, default=0) < 0 or self.total != sum(self._rows):
            raise DataError(f"{file.path}: damaged (its footer counts other rows than its row groups have)")

    def runs(self) -> Iterator[range]:
        """Row groups that are read together: one, or small ones that are no more than a chunk, which reading each by
        itself would take long for."""
        first, rows, size = 0, 0, 0.0
        for group, (more, bytes_more) in enumerate(zip(self._rows, self._bytes.tolist(), strict=True)):
            if group > first and (rows + more > _CHUNK_ROWS or size + bytes_more > min(_RUN_BYTES, self._most)):
                yield range(first, group)
                first, rows, size = group, 0, 0.0
            rows, size = rows + more, size + bytes_more
        if first < len(self._rows):
            yield range(first, len(self._rows))

    def rows(self, run: range) -> int:
        """Of all its row groups."""
        return sum(self._rows[run.start : run.stop])

    def read(self, run: range) -> pa.Table:
        """Some row groups.

        Raises
        ------
        DataError
            Naming file and row group where one is too large, or damaged.
        """
        # One by one: pyarrow reads no lists of shared text out of several.
        table = pa.concat_tables(self._read_group(range(group, group + 1)) for group in run)
        try:
            return self._written_out(run, table)
        except (pa.ArrowException, MemoryError) as error:  # places outside of a dictionary
            raise self.fault(run, _reason(error)) from error

    def _read_group(self, run: range) -> pa.Table:
        self._check(run.start)
        rows = self.rows(run)
        try:
            table = self._reader.read_row_group(run.start, columns=self._columns)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self.fault(run, _reason(error)) from error
        if table.num_rows != rows:
            raise self.fault(run, f"damaged (it has {table.num_rows:,} rows, and {rows:,} by its footer)")
        return table

    def _written_out(self, run: range, table: pa.Table) -> pa.Table:
        """The table with every value of a dictionary written out, where that fits."""
        sizes = {name: sum(_written_bytes(chunk) for chunk in table[name].chunks) for name in self._columns}
        if sum(sizes.values()) > self._most:
            raise self._too_large(run, sum(sizes.values()))
        for name, size in sizes.items():
            kind = _target(self._schema.field(name).type, table[name].type, size)
            if kind is not None:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        return table

    def _check(self, group: int) -> None:
        """Refuse a row group that is too large by its footer."""
        rows, values = self._rows[group], self._values[group].min(initial=np.inf)
        run = range(group, group + 1)
        if values < rows or not self._is_whole[group]:
            raise self.fault(run, f"damaged ({rows:,} rows, and {values:,.0f} values in a column of it)")
        if self._bytes[group] > self._most:
            raise self._too_large(run, int(self._bytes[group]))

    def fault(self, run: range, what: str) -> DataError:
        """What is wrong with row groups, as an error."""
        which = f"row group {run.start}" if len(run) == 1 else f"row groups {run.start} to {run.stop - 1}"
        return DataError(f"{self._file.path}, {which}: {what}")

    def _too_large(self, run: range, size: int) -> DataError:
        return self.fault(
            run,
            f"takes {format_bytes(size)} in memory, more than {format_bytes(self._most)}; write the log with smaller "
            "row "
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
