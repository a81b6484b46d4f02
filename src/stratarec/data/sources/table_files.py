"""Files of typed columns, Parquet and Arrow (Feather), read in groups of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.data.sources.files import InputFile
from stratarec.data.sources.formats import FRONT_BYTES, refuse_foreign, table_format
from stratarec.errors import DataError

DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError)
"""Exceptions for damaged files."""


class TableFile(Protocol):
    """An open file. Its row groups can be read one by one."""

    schema: pa.Schema
    rows: int
    """Number of rows, as the file states it."""
    group_rows: list[int]
    """Number of rows of each row group."""

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of one row group."""
        ...

    def batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of some groups in batches of at most `rows` rows; by default all
        columns.
        """
        ...


class _ParquetFile:
    def __init__(self, raw: IO[bytes]) -> None:
        self._file = pq.ParquetFile(raw)
        metadata = self._file.metadata
        self.schema = self._file.schema_arrow
        self.rows = int(metadata.num_rows)
        self.group_rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._file.read_row_group(group, list(columns))

    def batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(
            rows, list(groups), columns if columns is None else list(columns)
        )


class _ArrowFile:
    """An Arrow file, whose row groups are its record batches. Memory holds the columns of one
    record batch.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.schema = self._open(None).schema
        # The format has no table of sizes, so the first column of each batch is read.
        reader = self._open([0])
        self.group_rows = [reader.get_batch(group).num_rows for group in range(reader.num_record_batches)]
        self.rows = sum(self.group_rows)

    def _open(self, fields: list[int] | None) -> pa.RecordBatchFileReader:
        self._raw.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=fields or [])
        return pa.ipc.open_file(pa.PythonFile(self._raw, mode="r"), options=options)

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_batches(list(self.batches(max(self.group_rows[group], 1), [group], columns)))

    def batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        reader = self._open(
            None if columns is None else [self.schema.get_field_index(name) for name in columns]
        )
        for group in groups:
            batch = reader.get_batch(group)
            batch.validate(full=True)  # Arrow does not check offsets, which would address other memory
            batch = batch if columns is None else batch.select(list(columns))
            for first in range(0, max(batch.num_rows, 1), rows):
                yield batch.slice(first, rows)


class _Flattened:
    """A file whose columns are the fields of its structs, such as ``user.id``."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        self._own = file.schema.names
        self.schema = _flat(file.schema.empty_table()).schema
        self.rows = file.rows
        self.group_rows = file.group_rows

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return _flat(self._file.read_group(group, self._structs(columns))).select(list(columns))

    def batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        own = None if columns is None else self._structs(columns)
        for batch in self._file.batches(rows, groups, own):
            table = _flat(pa.Table.from_batches([batch]))
            yield from (table if columns is None else table.select(list(columns))).to_batches()

    def _structs(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of the file that contain `columns`."""
        return [own for own in self._own if any(f"{name}.".startswith(f"{own}.") for name in columns)]


def _flat(table: pa.Table) -> pa.Table:
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


class _Partitioned:
    """A file with the columns that its directories give, as text."""

    def __init__(self, file: TableFile, given: Mapping[str, str | None]) -> None:
        self._file = file
        self._given = given
        self.schema = file.schema
        for name in given:
            self.schema = self.schema.append(pa.field(name, pa.string()))
        self.rows = file.rows
        self.group_rows = file.group_rows

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        table = self._file.read_group(group, [name for name in columns if name not in self._given])
        for name in columns:
            if name in self._given:
                table = table.append_column(name, self._values(name, table.num_rows))
        return table

    def batches(
        self, rows: int, groups: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        own = None if columns is None else [name for name in columns if name not in self._given]
        for batch in self._file.batches(rows, groups, own):
            for name in self._given if columns is None else columns:
                if name in self._given:
                    batch = batch.append_column(name, self._values(name, batch.num_rows))
            yield batch

    def _values(self, name: str, rows: int) -> pa.Array:
        return pa.repeat(pa.scalar(self._given[name], pa.string()), rows)


def open_table(raw: IO[bytes], file: InputFile) -> TableFile:
    """Return the reader of an open file. Raises `DataError` if it is neither a Parquet nor an Arrow
    file.
    """
    front = raw.read(FRONT_BYTES)
    raw.seek(0)
    refuse_foreign(front, file.path)
    name = table_format(front) or "Parquet"
    try:
        reader: TableFile = _ArrowFile(raw) if name == "Arrow" else _ParquetFile(raw)
        if any(pa.types.is_struct(field.type) for field in reader.schema):
            reader = _Flattened(reader)
        given = file.directory_columns(reader.schema.names)
    except DAMAGE as error:
        kind = "a Parquet" if name == "Parquet" else "an Arrow"
        raise DataError(
            f"{file.path}: not {kind} file, or damaged ({error}); write it again as {name}"
        ) from error
    return _Partitioned(reader, given) if given else reader
