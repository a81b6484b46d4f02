"""Row groups read back from the files of a data set, and checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.column_names import LABEL, ROW, SESSION, SESSIONS, TIME, USER, from_stored, stored_name
from stratarec.data.dataset.manifest import ADVICE, Shard
from stratarec.data.dataset.row_group import RowGroup, SlateKey, row_numbers, slate_starts
from stratarec.data.dataset.stored_columns import ShardLayout, file_faults
from stratarec.errors import DatasetError
from stratarec.io.atomic import reading

# Columns that training has no use for.
_UNUSED = (TIME, SESSION, ROW, f"{SESSIONS}/session")
# Files that stay open: opening one and reading its footer takes as long as reading a column.
_OPEN = 64


class RowGroupReader:
    """Reads the row groups of some shards in any order, keeping files open; for one thread at a time.

    Parameters
    ----------
    root : Path
        Where the data set is.
    shards : sequence of Shard
    layout : Layout
        What their files must hold.
    unused : bool
        Read what training makes no use of too.
    """

    def __init__(self, root: Path, shards: Sequence[Shard], layout: ShardLayout, *, unused: bool) -> None:
        self._root, self._shards, self._layout = root, shards, layout
        self._without = () if unused else _UNUSED
        self._open: OrderedDict[str, tuple[pq.ParquetFile, list[str]]] = OrderedDict()

    def __enter__(self) -> RowGroupReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def read(self, shard: int, group: int) -> RowGroup:
        """One row group with its tables.

        Raises
        ------
        DatasetError
            Naming the file, when it cannot be read or holds what no data set of ours does.
        """
        whole = self._shards[shard]
        samples = self._table(shard, group)
        row = None if whole.tables is None else self._table(shard, group, tables=True)
        with reading(self._root / whole.path):
            row_group = RowGroup(samples=samples, tables={} if row is None else _split_row(row))
            for fault in self._layout.faults(row_group):
                raise self._damaged(whole.path, f", row group {group}", fault)
        return row_group

    def row_numbers(self, shard: int, group: int) -> NDArray[np.int64]:
        """Where the samples of one row group came from, without reading the rest of it."""
        found = row_numbers(self._table(shard, group, wanted=[ROW]))
        for fault in self._layout.row_faults(found):
            raise self._damaged(self._shards[shard].path, f", row group {group}", fault)
        return found

    def times(self, shard: int, group: int) -> NDArray[np.int64]:
        """Return the times of the samples of one row group, without reading the rest of it."""
        times: NDArray[np.int64] = self._table(shard, group, wanted=[TIME])[TIME].to_numpy()
        return times

    def sessions(self, shard: int, group: int) -> NDArray[np.int64]:
        """The session of each sample of one row group, likewise."""
        if self._shards[shard].tables is None:
            found: NDArray[np.int64] = self._table(shard, group, wanted=[SESSION])[SESSION].to_numpy()
            return found
        wanted = [stored_name(SESSIONS, name) for name in ("session", "samples")]
        sessions = _split_row(self._table(shard, group, tables=True, wanted=wanted))[SESSIONS]
        return np.repeat(sessions["session"].to_numpy(), sessions["samples"].to_numpy())

    def slates(self, shard: int, group: int, by: SlateKey) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The first label of each sample of one row group, and where its slates begin, likewise."""
        if self._shards[shard].tables is None:
            keys = [USER] if by == "user" else [USER, SESSION]
            row_group = RowGroup(samples=self._table(shard, group, wanted=[LABEL, *keys]), tables={})
        else:
            wanted = [stored_name(SESSIONS, name) for name in ("samples", "user")]
            row = self._table(shard, group, tables=True, wanted=wanted)
            row_group = RowGroup(samples=self._table(shard, group, wanted=[LABEL]), tables=_split_row(row))
        return row_group.samples[LABEL].to_numpy(), slate_starts(row_group, by)

    def _table(self, shard: int, group: int, *, tables: bool = False, wanted: list[str] | None = None) -> pa.Table:
        part = self._shards[shard].tables if tables else self._shards[shard]
        assert part is not None
        try:
            file, columns = self._file(shard, part.path, tables)
            # In one order for all shards, whatever that of a file is: row groups are joined.
            found = file.read_row_group(group, wanted or columns, use_threads=False).select(wanted or columns)
            for name, column in zip(found.column_names, found.columns, strict=True):
                if column.null_count:
                    raise self._damaged(part.path, f", row group {group}", f"column {name!r} has missing values")
            return found
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(part.path, f", row group {group}", " ".join(str(error).split())) from error

    def _file(self, shard: int, relative: str, tables: bool) -> tuple[pq.ParquetFile, list[str]]:
        """An open file, and the columns to read of it."""
        if relative not in self._open:
            if len(self._open) == _OPEN:
                self._open.popitem(last=False)[1][0].close()
            file = pq.ParquetFile(self._root / relative)
            columns = self._layout.flat_tables if tables else self._layout.samples
            for fault in file_faults(file, self._shards[shard], columns, tables=tables):
                file.close()
                raise self._damaged(relative, "", fault)
            self._open[relative] = (file, [name for name in columns if name not in self._without])
        self._open.move_to_end(relative)
        return self._open[relative]

    def _damaged(self, relative: str, place: str, fault: str) -> DatasetError:
        return DatasetError(f"{self._root / relative}{place}: damaged ({fault}); {ADVICE}")


def _split_row(row: pa.Table) -> dict[str, pa.Table]:
    """The tables whose columns lie in one row, a list each."""
    tables: dict[str, dict[str, pa.Array]] = {}
    for column in row.column_names:
        table, name = from_stored(column)
        # The one list is all that there is of its values.
        tables.setdefault(table, {})[name] = row[column].chunk(0).values
    return {name: pa.table(columns) for name, columns in tables.items()}
