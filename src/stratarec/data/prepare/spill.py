"""Raw rows on their way to shards: one file a source chunk, in it one Arrow stream a partition.

Rows that belong together (a user, a session) share a partition; reading a partition reads its stream out of every
chunk's file, at the place that the chunk's note names. (Row groups of a Parquet file did this first: each read parsed a
footer that lists all partitions, so that the cost grew with the square of the log.)
Every row has a number from here on: its file and row as messages count them, or its place in the order of a source that
makes samples up. It breaks ties, deals samples without users and sessions to splits, and is stored unless
`data.keep_rows` is false, so that predictions can be joined to the log.
A chunk's file is renamed into place when it is whole, so an interrupted run goes on behind the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from stratarec.data.column_names import FILE, PARTITION, ROW
from stratarec.data.dataset.row_group import FILE_BITS
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import Schema
from stratarec.data.sources.base import Chunk
from stratarec.io.atomic import make_directory, read_json, reading, write_atomic, write_json


@dataclass(frozen=True, kw_only=True)
class SpilledChunk:
    """What is known of one spilled chunk."""

    index: int
    rows: int
    samples: int
    """Rows without the events that only enter histories."""
    places: dict[int, tuple[int, int, str]]
    """Partition -> offset, bytes and hash of its stream in the chunk's file."""
    by_file: bool
    """Whether rows are numbered within their file; else they are counted in the order of the source."""
    times: tuple[int, int] | None
    """The first and the last; None without times or rows."""
    frame_bytes: int
    """Of the rows in memory."""
    bytes_done: int
    bad_rows: int
    bad_examples: tuple[str, ...]
    note: str


def _spilled(path: Path) -> SpilledChunk:
    with reading(path):
        note = read_json(path)
        places = {int(key): (int(place[0]), int(place[1]), str(place[2])) for key, place in note["places"].items()}
        times = tuple(note["times"]) if note["times"] else None
        changes = {"places": places, "times": times, "bad_examples": tuple(note["bad_examples"])}
        return SpilledChunk(**{**note, **changes})


class Spill:
    """The spilled chunks of one run in `folder`.

    Parameters
    ----------
    partitions : int
        How many partitions rows are dealt to by their shard key; without a shard key each chunk is its own partition.
    """

    def __init__(self, folder: Path, schema: Schema, partitions: int) -> None:
        self._folder, self._schema, self._partitions = folder, schema, partitions
        make_directory(folder)

    def done(self) -> list[SpilledChunk]:
        """Finished chunks in order."""
        return [_spilled(self._note(index)) for index in sorted(self.indexes())]

    def indexes(self) -> frozenset[int]:
        """Of finished chunks."""
        return frozenset(int(path.stem) for path in self._folder.glob("*.json"))

    def add(self, chunk: Chunk, before: int) -> SpilledChunk:
        """Write a chunk, partition by partition; `before` rows were spilled before it."""
        file = np.broadcast_to(np.asarray(chunk.file, dtype=np.int32), chunk.frame.height)
        frame = chunk.frame.with_columns(pl.Series(ROW, _number(chunk, before)), pl.Series(FILE, file))
        key = self._schema.shard_key
        if key:
            parts = frame.with_columns(self.place(frame[key])).partition_by(PARTITION, as_dict=True, include_key=False)
            named = {int(partition[0]): part for partition, part in parts.items()}
        else:
            named = {chunk.index: frame}
        order = [partition for partition in sorted(named) if named[partition].height]
        streams = [_stream(named[partition]) for partition in order]
        write_atomic(self._file(chunk.index), lambda file: file.writelines(streams))
        sizes = [stream.size for stream in streams]
        digests = [xxhash.xxh3_64_hexdigest(stream) for stream in streams]
        starts = [0, *accumulate(sizes)][:-1]
        times = frame[self._schema.time] if self._schema.time and frame.height else None
        spilled = SpilledChunk(
            index=chunk.index,
            rows=frame.height,
            places=dict(zip(order, zip(starts, sizes, digests, strict=True), strict=True)),
            samples=frame.height - frame[self._schema.label_column].null_count(),
            by_file=chunk.rows is not None,
            times=None if times is None else (int(times.min()), int(times.max())),  # type: ignore[arg-type]
            frame_bytes=int(frame.estimated_size()),
            bytes_done=chunk.bytes_done,
            bad_rows=chunk.bad_rows,
            bad_examples=chunk.bad_examples,
            note=chunk.note,
        )
        write_json(self._note(chunk.index), vars(spilled))
        return spilled

    def place(self, keys: pl.Series) -> pl.Series:
        """The partition of each value of the shard key."""
        return pl.Series(PARTITION, (stable_hash(keys) % np.uint64(self._partitions)).astype(np.int32))

    def _note(self, index: int) -> Path:
        return self._folder / f"{index:08d}.json"

    def _file(self, index: int) -> Path:
        return self._folder / f"{index:08d}.arrow"

    def read(self, chunks: Sequence[SpilledChunk], partitions: Sequence[int]) -> pl.DataFrame:
        """All rows of some partitions, in the order of the source."""
        frames = []
        for chunk in chunks:
            places = [chunk.places[partition] for partition in partitions if partition in chunk.places]
            if places:
                path = self._file(chunk.index)
                with reading(path), path.open("rb") as file:
                    frames += [_read(file, *place) for place in places]
        whole = pl.from_arrow(pa.concat_tables(frames))
        assert isinstance(whole, pl.DataFrame)
        return whole.rechunk()

    def shards(self, chunks: Sequence[SpilledChunk], shard_samples: int) -> list[list[int]]:
        """The partitions of each shard: one each with a shard key, else runs of chunks of about `shard_samples`."""
        if self._schema.shard_key:
            return [[p] for p in sorted({partition for chunk in chunks for partition in chunk.places})]
        runs: list[list[int]] = [[]]
        held = 0
        for chunk in chunks:
            if held and held + chunk.rows > shard_samples:
                runs.append([])
                held = 0
            if chunk.rows:
                runs[-1].append(chunk.index)
                held += chunk.rows
        return [run for run in runs if run]


def _number(chunk: Chunk, before: int) -> NDArray[np.int64]:
    """The number of each row, rising in the order of the source."""
    if chunk.rows is None:
        return before + 1 + np.arange(chunk.frame.height, dtype=np.int64)
    return (np.int64(chunk.file) << FILE_BITS) + np.asarray(chunk.rows, dtype=np.int64)


def _stream(part: pl.DataFrame) -> pa.Buffer:
    """Rows as one compressed Arrow stream."""
    table = part.to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _read(file: BinaryIO, first: int, size: int, digest: str) -> pa.Table:
    file.seek(first)
    content = file.read(size)
    # Arrow streams carry no checksum of their own.
    if xxhash.xxh3_64_hexdigest(content) != digest:
        raise ValueError("its hash does not match")
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
