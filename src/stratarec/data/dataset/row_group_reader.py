"""Read row groups and check the type and range of every column.

Kernels use these columns as indexes, so types and ranges are checked before any value is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stratarec.data.column_names import (
    ROW,
    SESSION,
    SESSION_KEYS,
    SESSIONS,
    TIME,
    WEIGHT,
    events,
    from_stored,
    label_names,
    pointer,
    stored_name,
    weights_of,
)
from stratarec.data.dataset.manifest import ADVICE, DatasetManifest, Shard
from stratarec.data.dataset.row_group import RowGroup, flat, row_numbers, split_rows
from stratarec.data.schema import UNKNOWN
from stratarec.errors import DatasetError
from stratarec.io.atomic import reporting_damage

_IDS, _FLOATS, _PLACES = pa.int32(), pa.float32(), pa.int32()
# Maximum decompressed size of a row group, because a crafted file of kilobytes can decompress to
# any size.
_MOST_BYTES = 1 << 31

# Maximum total number of events in the histories of a row group. List offsets are int32, and the
# histories of overlapping windows can be of any size.
_MOST_EVENTS = (1 << 31) - 1

Columns = Mapping[str, pa.DataType]


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Columns that the two files of a shard must have, with their types and ranges."""

    samples: Columns
    """Column of the file of samples -> type."""
    tables: Mapping[str, Columns]
    """Table -> column -> type."""
    labels: int
    """Number of labels."""
    ids: Mapping[str, int]
    """Sparse feature -> number of rows of its embedding table."""
    pointed: tuple[str, ...]
    """Names of the groups and histories, to whose tables samples point."""
    windows: tuple[str, ...]
    """Names of the histories that are stored as windows."""
    aligned: tuple[tuple[str, ...], ...]
    """Columns whose lists have equal lengths: the columns of a sequence, and a feature's values and
    weights.
    """
    weights: tuple[str, ...]
    """Names of the columns with weights of values."""
    files: int
    """Number of files of the log; 0 if rows are numbered in the order of the source."""

    @classmethod
    def of(cls, manifest: DatasetManifest) -> ShardLayout:
        schema, groups = manifest.columns, manifest.groups
        features = _features(manifest)
        histories = [feature.name for feature in schema.histories]
        grouped = {name for names in (groups or {}).values() for name in names}
        labels = dict.fromkeys(label_names(len(schema.label_columns)), pa.uint8())
        samples = {**labels, **({WEIGHT: _FLOATS} if schema.weight else {})}
        apart = grouped | set(histories if manifest.deduplicated else ())
        samples.update({name: kind for name, kind in features.items() if name not in apart})
        samples.update({weights_of(feature.name): pa.list_(_FLOATS) for feature in schema.weighted})
        samples.update({TIME: pa.int64()} if schema.time else {})
        samples.update({ROW: pa.int64()} if manifest.about.rows.kept else {})
        sessions = {"user": pa.int64(), **({"session": pa.int64()} if schema.session else {})}
        pointed = (*(groups or {}), *histories) if manifest.deduplicated else ()
        tables: dict[str, Columns] = {}
        if not manifest.deduplicated:
            samples.update(
                {SESSION_KEYS[key]: kind for key, kind in sessions.items() if schema.session_keys}
            )
        else:
            tables.update({name: {f: features[f] for f in names} for name, names in (groups or {}).items()})
            for name in histories:
                tables[name] = {"start": _PLACES, "length": _PLACES}
                tables[events(name)] = {"id": _IDS}
            tables.update({pointer(name): {"samples": _PLACES, "row": _PLACES} for name in pointed})
            tables.update({SESSIONS: {**sessions, "samples": _PLACES}} if schema.session_keys else {})
        return cls(
            samples=samples,
            tables=tables,
            labels=len(schema.label_columns),
            ids={feature.name: manifest.vocabularies[feature.vocabulary].rows for feature in schema.sparse},
            pointed=pointed,
            windows=tuple(histories) if manifest.deduplicated else (),
            aligned=(
                *(
                    tuple(f.name for f in columns)
                    for columns in schema.sequences.values()
                    if len(columns) > 1
                ),
                *((feature.name, weights_of(feature.name)) for feature in schema.weighted),
            ),
            weights=tuple(weights_of(feature.name) for feature in schema.weighted),
            files=len(manifest.about.rows.files),
        )

    @property
    def flat_tables(self) -> Columns:
        """Column of the file of tables -> type; each column is one list."""
        return {
            stored_name(table, name): pa.list_(kind)
            for table, columns in self.tables.items()
            for name, kind in columns.items()
        }

    def faults(self, row_group: RowGroup) -> Iterator[str]:
        """Yield a message for each fault of the values in a row group; columns that were not read
        are not checked.
        """
        for name in label_names(self.labels):
            label, most = row_group.samples[name].to_numpy(), UNKNOWN if self.labels > 1 else 1
            if len(label) and label.max() > most:
                yield f"a label is {label.max()}, expected 0 or 1"
        if WEIGHT in self.samples and (row_group.samples[WEIGHT].to_numpy() < 0).any():
            yield "a weight is negative"
        for name in self.weights:
            if (pc.list_flatten(row_group.samples[name]).to_numpy() < 0).any():
                yield f"column {name!r} has a weight that is negative"
        for table in (
            row_group.samples,
            *(row_group.tables[name] for name in self.pointed if name not in self.windows),
        ):
            yield from self._values(table)
            yield from self._unequal(table)
        yield from self._pointers(row_group)

    def row_faults(self, rows: NDArray[np.int64]) -> Iterator[str]:
        """Yield a message for each fault of row numbers."""
        if not len(rows):
            return
        if rows.min() < 0 or len(np.unique(rows)) != len(rows):
            yield "rows of the log are negative or repeated"
        last = int(split_rows(rows)[0].max())
        if self.files and last >= self.files:
            yield f"a row is of file {last} of the log, expected 0 to {self.files - 1}"

    def _values(self, table: pa.Table) -> Iterator[str]:
        for name in table.column_names:
            rows = self.ids.get(name)
            for part in table[name].chunks:
                values = part.flatten() if pa.types.is_list(part.type) else part
                if values.null_count:
                    yield f"column {name!r} has missing values"
                elif rows is not None:
                    yield from _ids_outside(name, values.to_numpy(), rows)
                elif values.type == _FLOATS and not np.isfinite(values.to_numpy()).all():
                    yield f"column {name!r} has a value that is not finite"

    def _unequal(self, table: pa.Table) -> Iterator[str]:
        for main, *others in self.aligned:
            for name in others if main in table.column_names else ():
                if not pc.list_value_length(table[name]).equals(pc.list_value_length(table[main])):
                    yield f"columns {main!r} and {name!r} have lists of different lengths"

    def _pointers(self, row_group: RowGroup) -> Iterator[str]:
        from stratarec.kernels.collate import outside, outside_windows  # loads torch and Numba

        for name in self.pointed:
            segments, rows = row_group.tables[pointer(name)], len(row_group.tables[name])
            places = segments["row"].to_numpy()
            wrong = outside(places, rows)
            if rows > row_group.samples.num_rows:
                yield f"{name} has {rows} rows for {row_group.samples.num_rows} samples"
            if wrong >= 0:
                yield f"{pointer(name)} points at {places[wrong]}, expected 0 to {rows - 1}"
            yield from _miscounted(segments, row_group.samples.num_rows, f"{pointer(name)} has")
        for name in self.windows:
            start, length = (row_group.tables[name][part].to_numpy() for part in ("start", "length"))
            ids = row_group.tables[events(name)]["id"].to_numpy()
            wrong = outside_windows(start, length, len(ids))
            if wrong >= 0:
                yield f"a window of {name} has {length[wrong]} events from {start[wrong]}, expected 0 to {len(ids)}"
            yield from _ids_outside(events(name), ids, self.ids[name])
            segments = row_group.tables[pointer(name)]
            total = int(
                length[segments["row"].to_numpy()].astype(np.int64)
                @ segments["samples"].to_numpy().astype(np.int64)
            )
            if total > _MOST_EVENTS:
                yield f"windows of {name} have {total:,} events, expected at most {_MOST_EVENTS:,}"
        if SESSIONS in self.tables:
            yield from _miscounted(
                row_group.tables[SESSIONS], row_group.samples.num_rows, "its sessions have"
            )


def _features(manifest: DatasetManifest) -> dict[str, pa.DataType]:
    """Return feature -> type of its column."""
    schema = manifest.columns
    types: dict[str, pa.DataType] = {feature.name: _FLOATS for feature in schema.dense}
    for feature in schema.sparse:
        types[feature.name] = pa.list_(_IDS) if feature.traits.lists else _IDS
    return {name: types[name] for name in schema.names}


def _ids_outside(name: str, ids: np.ndarray, rows: int) -> Iterator[str]:
    if not len(ids):
        return
    least, most = int(ids.min()), int(ids.max())
    if least < -1 or most >= rows:
        yield f"column {name!r} has ids of {least} to {most}, expected -1 to {rows - 1}"


def _miscounted(parts: pa.Table, samples: int, what: str) -> Iterator[str]:
    """Yield a message if the parts of a row group (sessions or segments) have sizes below 1 or a
    wrong total.
    """
    from stratarec.kernels.collate import least_and_total  # loads torch and Numba

    least, counted = least_and_total(parts["samples"].to_numpy())
    if counted != samples or least < 1:
        yield f"{what} {counted} samples in parts of {least} and more, expected {samples} in parts of 1 and more"


def file_faults(file: pq.ParquetFile, shard: Shard, columns: Columns, *, tables: bool) -> Iterator[str]:
    """Yield a message for each fault in the footer of a file. `tables` says whether it is a file of
    tables.
    """
    types = {field.name: field.type for field in file.schema_arrow}
    if len(types) != len(file.schema_arrow):
        yield "a column is repeated"
    for name in sorted({*columns, *types}):
        if not _alike(types.get(name), columns.get(name)):
            yield f"column {name!r} is of {types.get(name, 'no')} type, expected {columns.get(name, 'no such column')}"
    metadata = file.metadata
    rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if rows != (tuple(1 for _ in shard.row_groups) if tables else shard.row_groups):
        yield f"row groups of {str(rows)[:60]} rows, expected {len(shard.row_groups)} with {shard.samples} samples"
    # The sizes of columns are not checked: pyarrow ends the process if the statistics of columns
    # are damaged.
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        if not 0 <= size <= _MOST_BYTES:
            yield f"row group {group} decompresses to {size:,} bytes, expected at most {_MOST_BYTES:,}"


def _alike(actual: pa.DataType | None, expected: pa.DataType | None) -> bool:
    """Whether two types are equal, except that lists may name the field of their values
    differently.
    """
    if actual is None or expected is None:
        return False
    if pa.types.is_list(actual) and pa.types.is_list(expected):
        return _alike(actual.value_type, expected.value_type)
    return bool(actual == expected)


# Columns that training does not use.
_UNUSED = (TIME, SESSION, ROW, f"{SESSIONS}/session")
# Maximum number of open files. Opening a file and reading its footer takes as long as reading a
# column.
_OPEN = 64


class RowGroupReader:
    """Reader of the row groups of some shards, in any order. Files stay open. Use it from one
    thread at a time.

    Parameters
    ----------
    root : Path
        Directory of the data set.
    shards : sequence of Shard
        Shards to read from.
    layout : ShardLayout
        Expected columns of their files.
    unused : bool
        Whether to read also the columns that training does not use.
    rare : mapping of str to array
        Feature -> tail buckets of its held-out values, which have the last ids.
    rare_share : float
        Share of the lookups of held-out values in which the buckets replace the ids. The random
        choice depends only on the row group.
    """

    def __init__(
        self,
        root: Path,
        shards: Sequence[Shard],
        layout: ShardLayout,
        *,
        unused: bool,
        rare: Mapping[str, NDArray[np.int64]],
        rare_share: float,
    ) -> None:
        self._root = root
        self._shards = shards
        self._layout = layout
        self._rare = {name: buckets.astype(np.int32) for name, buckets in rare.items()}
        self._rare_share = rare_share
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
        """Read one row group with its tables.

        Raises
        ------
        DatasetError
            If the file cannot be read or has a fault. The message names the file.
        """
        info = self._shards[shard]
        samples = self._table(shard, group)
        row = None if info.tables is None else self._table(shard, group, tables=True)
        with reporting_damage(self._root / info.path):
            row_group = RowGroup(samples=samples, tables={} if row is None else _split_row(row))
            for fault in self._layout.faults(row_group):
                raise self._damaged(info.path, f", row group {group}", fault)
        return self._in_buckets(row_group, shard, group) if self._rare else row_group

    def _in_buckets(self, row_group: RowGroup, shard: int, group: int) -> RowGroup:
        """Replace ids of held-out values by their tail buckets."""
        windows, draws = self._layout.windows, np.random.default_rng((shard, group))
        features: dict[str, dict[str, str]] = {  # table -> its columns with ids -> their features
            **{
                name: {column: column for column in self._rare}
                for name in {*self._layout.pointed} - {*windows}
            },
            **{events(name): {"id": name} for name in windows if name in self._rare},
        }

        def replaced(table: pa.Table, of: Mapping[str, str]) -> pa.Table:
            for place, column in enumerate(table.column_names):
                if column in of:
                    ids, others = flat(table[column]), self._rare[of[column]]
                    numbers = (ids.values if pa.types.is_list(ids.type) else ids).to_numpy(
                        zero_copy_only=False
                    )
                    first = self._layout.ids[of[column]] - len(others)
                    is_rare = (numbers >= first) & (
                        self._rare_share == 1 or draws.random(len(numbers)) < self._rare_share
                    )
                    lowered = pa.array(np.where(is_rare, others[np.maximum(numbers - first, 0)], numbers))
                    if pa.types.is_list(ids.type):
                        lowered = pa.ListArray.from_arrays(ids.offsets, lowered)
                    table = table.set_column(place, column, lowered)
            return table

        return RowGroup(
            samples=replaced(row_group.samples, dict(zip(self._rare, self._rare, strict=True))),
            tables={
                name: replaced(table, features.get(name, {})) for name, table in row_group.tables.items()
            },
        )

    def row_numbers(self, shard: int, group: int) -> NDArray[np.int64]:
        """Read only the row numbers of a row group's samples."""
        numbers = row_numbers(self._table(shard, group, names=[ROW]))
        for fault in self._layout.row_faults(numbers):
            raise self._damaged(self._shards[shard].path, f", row group {group}", fault)
        return numbers

    def times(self, shard: int, group: int) -> NDArray[np.int64]:
        """Read only the times of a row group's samples."""
        times: NDArray[np.int64] = self._table(shard, group, names=[TIME])[TIME].to_numpy()
        return times

    def sessions(self, shard: int, group: int) -> NDArray[np.int64]:
        """Read only the sessions of a row group's samples."""
        if self._shards[shard].tables is None:
            numbers: NDArray[np.int64] = self._table(shard, group, names=[SESSION])[SESSION].to_numpy()
            return numbers
        names = [stored_name(SESSIONS, name) for name in ("session", "samples")]
        sessions = _split_row(self._table(shard, group, tables=True, names=names))[SESSIONS]
        return np.repeat(sessions["session"].to_numpy(), sessions["samples"].to_numpy())

    def _table(
        self, shard: int, group: int, *, tables: bool = False, names: list[str] | None = None
    ) -> pa.Table:
        part = self._shards[shard].tables if tables else self._shards[shard]
        assert part is not None
        try:
            file, columns = self._file(shard, part.path, tables)
            # Columns have the same order in all shards, so that row groups can be concatenated.
            table = file.read_row_group(group, names or columns, use_threads=False).select(names or columns)
            for name, column in zip(table.column_names, table.columns, strict=True):
                if column.null_count:
                    raise self._damaged(
                        part.path, f", row group {group}", f"column {name!r} has missing values"
                    )
            return table
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(part.path, f", row group {group}", " ".join(str(error).split())) from error

    def _file(self, shard: int, relative: str, tables: bool) -> tuple[pq.ParquetFile, list[str]]:
        """Return an open file, and the names of the columns to read from it."""
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
    """Return the tables whose columns are stored as lists in one row."""
    tables: dict[str, dict[str, pa.Array]] = {}
    for column in row.column_names:
        table, name = from_stored(column)
        # Each column has a single list, whose values are the column of the table.
        tables.setdefault(table, {})[name] = row[column].chunk(0).values
    return {name: pa.table(columns) for name, columns in tables.items()}
