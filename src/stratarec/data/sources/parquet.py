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

from stratarec.data.schema import Schema
from stratarec.data.sources.base import WHOLE, Chunk, OnBadRow, Share
from stratarec.data.sources.columns import Columns
from stratarec.data.sources.converting import Converter
from stratarec.data.sources.files import InputFile, expand, fingerprint
from stratarec.data.sources.limits import Size, set_size
from stratarec.data.sources.row_groups import RowGroups
from stratarec.data.sources.text import BadRows
from stratarec.data.sources.view import View
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

    def chunks(self, workspace: Path, share: Share = WHOLE) -> Iterator[Chunk]:
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
    files: tuple[InputFile, ...], columns: list[str], most_bytes: int, share: Share = WHOLE
) -> Iterator[Piece]:
    """Row groups of every file, large ones cut; those that the share has not are not read."""
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
                    if share.has(index, number, group):
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
