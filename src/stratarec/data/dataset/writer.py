"""Write the files of a data set: shards, their tables, vocabularies, and copies without samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stratarec.data.click_memory import ClickMemory
from stratarec.data.column_names import stored_name
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import (
    DATASET,
    ROW_GROUP,
    CarriedClicks,
    CarriedFile,
    LabelCount,
    Shard,
    StoredFile,
    TablesFile,
    VocabularyInfo,
)
from stratarec.data.dataset.row_group import Encoded, RowGroup
from stratarec.data.splits import SPLITS
from stratarec.data.threads import map_threads
from stratarec.data.vocabulary import Vocabulary
from stratarec.io.atomic import file_hash, make_directory, write_atomic
from stratarec.io.names import file_name
from stratarec.io.owned_directory import write_marker

LEVEL = 1
"""Compression level of zstd."""

_FEW_BYTES = 1 << 14
"""Columns with fewer bytes always use a dictionary: trying every encoding took a third of the time
of `prepare` for a few thousand samples."""


def write_shard(root: Path, split: str, number: int, encoded: Encoded) -> Shard:
    """Write encoded samples and their tables as shard `number` of `split`."""
    row_groups = list(encoded.row_groups(ROW_GROUP))
    del encoded  # its tables, of which row groups have copies
    name = f"{split}/shard-{number:05d}"
    samples = _store(root, f"{name}.parquet", [row_group.samples for row_group in row_groups])
    tables = None
    if any(row_group.tables for row_group in row_groups):
        stored = _store(root, f"{name}.tables.parquet", [_one_row(row_group) for row_group in row_groups])
        tables = TablesFile(**vars(stored))
    groups = tuple(row_group.samples.num_rows for row_group in row_groups)
    return Shard(**vars(samples), samples=sum(groups), row_groups=groups, tables=tables)


def _store(root: Path, relative: str, parts: Sequence[pa.Table]) -> StoredFile:
    """Write each part as one row group."""
    path = root / relative

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, parts[0].schema, **parquet_options(parts[0])) as writer:
            for part in parts:
                writer.write_table(part, row_group_size=max(part.num_rows, 1))

    write_atomic(path, write)
    return StoredFile(path=relative, bytes=path.stat().st_size, hash=file_hash(path))


def parquet_options(sample: pa.Table) -> dict[str, Any]:
    """Return Parquet options: compression, and for each larger column the encoding that is smallest
    for `sample`.

    The best encoding depends on the column: differences for pointers, plain for precise numbers, a
    dictionary for categories. (The indexes of a dictionary are packed bits, in which zstd does not
    see repeated bytes.)
    """
    chosen: dict[str, str | None] = {}
    leaves = list(_leaves(sample.schema))
    encodings = map_threads(lambda leaf: _smallest(sample.select([leaf[0]]), leaf[1]), leaves)
    for (_, path), encoding in zip(leaves, encodings, strict=True):
        # A feature may be named like the Parquet path of another feature's list values. For such a
        # path a dictionary is chosen, because it fits any type.
        chosen[path] = None if path in chosen else encoding
    return {
        "compression": "zstd",
        "compression_level": LEVEL,
        "use_dictionary": [path for path, encoding in chosen.items() if encoding is None],
        "column_encoding": {path: encoding for path, encoding in chosen.items() if encoding is not None},
    }


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield each column name and the Parquet path of the column's values."""
    for column in schema:
        kind, path = column.type, column.name
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind, path = kind.value_type, f"{path}.list.element"
        yield column.name, path


def _smallest(column: pa.Table, path: str) -> str | None:
    """Return the encoding with the smallest file, or None for a dictionary. If sizes are equal, the
    first one wins.
    """
    if column.nbytes < _FEW_BYTES:
        return None
    sizes: dict[str | None, int] = {}
    for encoding in (None, "PLAIN", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"):
        options: dict[str, Any] = {"use_dictionary": True}
        if encoding is not None:
            options = {"use_dictionary": False, "column_encoding": {path: encoding}}
        buffer = pa.BufferOutputStream()
        try:
            pq.write_table(column, buffer, compression="zstd", compression_level=LEVEL, **options)
        except (pa.ArrowException, OSError):  # the type does not support the encoding
            continue
        sizes[encoding] = buffer.getvalue().size
    return min(sizes, key=lambda encoding: sizes[encoding])


def _one_row(row_group: RowGroup) -> pa.Table:
    columns = {}
    for table, content in row_group.tables.items():
        for name in content.column_names:
            values = content[name].combine_chunks()
            offsets = pa.array([0, len(values)], pa.int32())
            columns[stored_name(table, name)] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


def write_vocabulary(root: Path, number: int, name: str, vocabulary: Vocabulary) -> VocabularyInfo:
    """Write the values and counts of vocabulary `number`."""
    relative = f"vocabulary/{file_name(name, number)}.parquet"
    stored = _write_frame(root, relative, vocabulary.frame())
    return VocabularyInfo(**vars(vocabulary.ids), rows=vocabulary.rows, **stored)


def write_counts(root: Path, number: int, name: str, counts: pl.DataFrame) -> CarriedFile:
    """Write the counts of all values of vocabulary `number`."""
    return CarriedFile(**_write_frame(root, f"carried/{file_name(name, number)}.parquet", counts))


def write_events(root: Path, number: int, events: pl.DataFrame) -> CarriedFile:
    """Write the last positive events of users as file `number`."""
    return CarriedFile(**_write_frame(root, f"carried/events-{number:05d}.parquet", events))


def write_clicks(root: Path, memory: ClickMemory) -> CarriedClicks:
    """Write the clicks that a later log of clicks needs."""
    files = {
        part: CarriedFile(**_write_frame(root, f"carried/clicks-{part}.parquet", frame))
        for part, frame in memory.frames.items()
    }
    return CarriedClicks(**files, clicks=memory.clicks)


def _write_frame(root: Path, relative: str, frame: pl.DataFrame) -> dict[str, Any]:
    path, table = root / relative, frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    # Not synced here, at 3 ms for each of thousands of files: the whole directory is synced before
    # it is published.
    write_atomic(path, lambda file: pq.write_table(table, file, compression="zstd"), synced=False)
    return {"path": relative, "bytes": path.stat().st_size, "hash": file_hash(path)}


@dataclass(frozen=True, kw_only=True)
class CarriedTables:
    """State that a later data set needs from its base data set, in memory."""

    vocabularies: dict[str, Vocabulary]
    counts: dict[str, pl.DataFrame]
    """Counts of all values of each vocabulary of kind ``count``."""
    events: pl.DataFrame | None
    clicks: ClickMemory | None

    @classmethod
    def of(cls, dataset: Dataset) -> CarriedTables:
        """Read this part of a data set."""
        infos = dataset.manifest.vocabularies
        return cls(
            vocabularies={name: dataset.vocabulary(name) for name in infos},
            counts={
                name: dataset.carried_counts(name) for name, info in infos.items() if info.kind == "count"
            },
            events=dataset.events(),
            clicks=dataset.clicks(),
        )


def write_without_samples(before: Dataset, folder: Path, carried: CarriedTables) -> Dataset:
    """Write a copy of the data set `before` to `folder`, without samples and with the tables
    `carried`.
    """
    for part in ("vocabulary", "carried"):
        make_directory(folder / part)
    old = before.manifest
    places = {name: place for place, name in enumerate(old.columns.vocabularies())}
    events = [] if carried.events is None else [write_events(folder, 0, carried.events)]
    clicks = None if carried.clicks is None else write_clicks(folder, carried.clicks)
    counts = {
        name: write_counts(folder, places[name], name, frame) for name, frame in carried.counts.items()
    }
    no_labels: Mapping[str, LabelCount] = {
        name: LabelCount(known=0, positives=0) for name in old.columns.label_columns if old.columns.labels
    }
    manifest = old.model_copy(
        update={
            "splits": dict.fromkeys(SPLITS, ()),
            "positives": dict.fromkeys(SPLITS, 0),
            "labels": {split: dict(no_labels) for split in SPLITS} if no_labels else {},
            "vocabularies": {
                name: write_vocabulary(folder, places[name], name, vocabulary)
                for name, vocabulary in carried.vocabularies.items()
            },
            "carried": old.carried.model_copy(
                update={"counts": counts, "events": tuple(events), "clicks": clicks}
            ),
        }
    )
    manifest.write(folder)
    write_marker(folder, DATASET)
    return Dataset.open(folder, verify="used")
