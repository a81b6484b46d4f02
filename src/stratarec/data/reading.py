"""Row groups read back from the files of a data set, and checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.blocks import Block, row_numbers
from stratarec.data.names import ROW, SESSION, SESSIONS, TIME, events, pointer
from stratarec.errors import DatasetError
from stratarec.kernels.batches import least_and_total, outside, outside_windows

# Columns that training has no use for.
_UNUSED = (TIME, SESSION, ROW, f"{SESSIONS}/session")
# Files that stay open: opening one and reading its footer takes as long as reading a column.
_OPEN = 64


class BlockReader:
    """Reads the row groups of some shards in any order, keeping files open; for one thread at a time.

    Parameters
    ----------
    root : Path
        Where the data set is.
    files : sequence
        Of each shard, its file of samples and that of its tables or None, relative to `root`.
    groups, windows : sequence of str
        What samples point at.
    unused : bool
        Read what training makes no use of too.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[tuple[str, str | None]],
        groups: Sequence[str],
        windows: Sequence[str],
        *,
        unused: bool,
    ) -> None:
        self._root, self._files, self._groups, self._windows = root, files, groups, windows
        self._without = () if unused else _UNUSED
        self._open: OrderedDict[str, tuple[pq.ParquetFile, list[str]]] = OrderedDict()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def read(self, shard: int, group: int) -> Block:
        """One row group with its tables.

        Raises
        ------
        DatasetError
            Naming the file, when it cannot be read or a pointer points outside its table.
        """
        samples, tables = self._files[shard]
        block = Block(
            samples=self._table(samples, group),
            tables={} if tables is None else _split_row(self._table(tables, group)),
        )
        if fault := self._fault(block):
            raise DatasetError(f"{self._root / samples}, row group {group}: damaged ({fault}); prepare the data again")
        return block

    def row_numbers(self, shard: int, group: int) -> NDArray[np.int64]:
        """Where the samples of one row group came from, without reading the rest of it."""
        return row_numbers(self._table(self._files[shard][0], group, [ROW]))

    def _table(self, relative: str, group: int, wanted: list[str] | None = None) -> pa.Table:
        try:
            file, columns = self._file(relative)
            return file.read_row_group(group, wanted or columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{self._root / relative}, row group {group}: damaged ({error})") from error

    def _file(self, relative: str) -> tuple[pq.ParquetFile, list[str]]:
        """An open file, and the columns to read of it."""
        if relative not in self._open:
            if len(self._open) == _OPEN:
                self._open.popitem(last=False)[1][0].close()
            file = pq.ParquetFile(self._root / relative)
            self._open[relative] = (file, [name for name in file.schema_arrow.names if name not in self._without])
        self._open.move_to_end(relative)
        return self._open[relative]

    def _fault(self, block: Block) -> str:
        """What is wrong with the pointers of a block; empty when nothing is."""
        for name in (*self._groups, *self._windows):
            if name not in block.tables or pointer(name) not in block.tables:
                return f"no table or no pointers for {name}"
            runs, rows = block.tables[pointer(name)], len(block.tables[name])
            places = runs["row"].to_numpy()
            wrong = outside(places, rows)
            if wrong >= 0:
                return f"{pointer(name)} points at {places[wrong]}, expected 0 to {rows - 1}"
            if fault := _miscounted(runs, block.samples.num_rows, f"{pointer(name)} has"):
                return fault
        for name in self._windows:
            start, length = (block.tables[name][part].to_numpy() for part in ("start", "length"))
            limit = len(block.tables[events(name)])
            wrong = outside_windows(start, length, limit)
            if wrong >= 0:
                return f"a window of {name} has {length[wrong]} events from {start[wrong]}, expected 0 to {limit}"
        if SESSIONS in block.tables:
            return _miscounted(block.tables[SESSIONS], block.samples.num_rows, "its sessions have")
        return ""


def _miscounted(parts: pa.Table, samples: int, what: str) -> str:
    """Whether parts of a block have other than its samples."""
    least, counted = least_and_total(parts["samples"].to_numpy())
    if counted != samples or least < 1:
        return f"{what} {counted} samples in parts of {least} and more, expected {samples} in parts of 1 and more"
    return ""


def _split_row(row: pa.Table) -> dict[str, pa.Table]:
    """The tables whose columns lie in one row, a list each."""
    tables: dict[str, dict[str, pa.Array]] = {}
    for column in row.column_names:
        table, _, name = column.rpartition("/")
        # The one list is all that there is of its values.
        tables.setdefault(table, {})[name] = row[column].chunk(0).values
    return {name: pa.table(columns) for name, columns in tables.items()}
