"""The working directory ``<data.path>.preparing``, and the first stage of `prepare`, which spills the log into it.

    origin.json    inputs of the run: it resumes only under the same origin
    lease          token of the tasks on other machines that may write here
    source         private files of the source
    spilled        rows by partition, and spilled.done when the whole log is there
    counts         what was counted in each partition
    encoded        a note for each partition whose shards are written
    output         the data set

A source chunk becomes one file with an Arrow stream for each partition. Rows that belong together (a user, a session)
share a partition. Reading a partition reads its stream from the file of every chunk, at the offset in the chunk's note.
(A Parquet file with a row group for each partition was slower: every read parsed a footer that lists all partitions,
so the cost grew with the square of the log.)
Every row gets a number: its file and its row in the file, or its position in the order of a source that generates rows.
The number breaks ties, assigns samples without user and session to splits, and is stored unless `data.keep_rows` is
false, so that predictions can be joined to the log.
A chunk's file is renamed into place when it is complete, so an interrupted run resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from stratarec.data.column_names import FILE, PARTITION, ROW
from stratarec.data.dataset.manifest import Origin, Shard
from stratarec.data.dataset.row_group import FILE_BITS
from stratarec.data.dedup_groups import Repeats
from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.executor import LEASE, Executor, SerialExecutor
from stratarec.data.schema import Schema
from stratarec.data.sources import Source
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare
from stratarec.data.transforms import Moments
from stratarec.errors import DataError, DatasetError
from stratarec.io.atomic import make_directory, read_json, reporting_damage, write_atomic, write_json
from stratarec.io.owned_directory import DirectoryKind, clear_directory, list_entries
from stratarec.progress import Progress

ORIGIN = "origin.json"
WORK = DirectoryKind(
    name="half-prepared data set",
    field="data.path",
    content=(ORIGIN, LEASE, "source", "spilled", "spilled.done", "counts", "encoded", "output"),
)


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
    with reporting_damage(path):
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
            parts = frame.with_columns(self.assign_partitions(frame[key])).partition_by(
                PARTITION, as_dict=True, include_key=False
            )
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

    def assign_partitions(self, keys: pl.Series) -> pl.Series:
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
                with reporting_damage(path), path.open("rb") as file:
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


# What a run leaves here; a later version whose notes have other fields starts anew.
_FORMAT = [
    9,
    *(entry.name for kind in (SpilledChunk, Moments, Repeats) for entry in fields(kind)),
    *Shard.model_fields,
]


class Workspace:
    """The work directory of one data set, which this process holds.

    Parameters
    ----------
    root : Path
    origin : Origin
        Of the data set that is being prepared.
    schema : Schema
    """

    def __init__(self, root: Path, origin: Origin, schema: Schema) -> None:
        self.root, self._origin, self._schema = root, origin, schema
        self.output = root / "output"

    def open(self, estimate_partitions: Callable[[], int], say: Callable[[str], None]) -> bool:
        """Make the directory ready; true when an earlier run's work goes on.

        Parameters
        ----------
        estimate_partitions : callable
            How many partitions rows are to be dealt to; asked where work begins.
        """
        path = self.root / ORIGIN
        resumed = self._is_ours(path)
        if not resumed and len(list_entries(self.root)) > 1:
            self.start_anew(f"{self.root} is of other logs, settings or another version", say)
        make_directory(self.source)
        if not resumed:
            partitions = estimate_partitions()
            write_json(path, {"format": _FORMAT, "partitions": partitions, "origin": self._origin.to_dict()})
        self.spill = Spill(self.root / "spilled", self._schema, read_json(path)["partitions"])
        return resumed

    def start_anew(self, reason: str, say: Callable[[str], None]) -> None:
        """Remove everything."""
        say(f"{reason}; starting anew")
        clear_directory(self.root)

    @property
    def source(self) -> Path:
        """Where the source has files of its own."""
        return self.root / "source"

    def folder(self, stage: str) -> Path:
        """The directory of a stage's outcomes, which now exists."""
        path = self.root / stage
        make_directory(path)
        return path

    def spilled(self) -> list[SpilledChunk] | None:
        """All chunks, where every one of the log is spilled; else None."""
        note = self.root / "spilled.done"
        if not note.exists():
            return None
        done = self.spill.done()
        if read_json(note) != len(done):
            raise DatasetError(f"{self.root / 'spilled'} is damaged: some of its chunks are missing")
        return done

    def finish_spilling(self, chunks: int) -> None:
        """Note that these are all."""
        write_json(self.root / "spilled.done", chunks)

    def _is_ours(self, path: Path) -> bool:
        try:
            found = read_json(path)
        except DatasetError:  # absent or damaged
            return False
        if not isinstance(found, dict) or not isinstance(found.get("partitions"), int):
            return False
        return found.get("format") == _FORMAT and found.get("origin") == self._origin.to_dict()


# Each of those who share a file reads all of it, and parses and deals its part.
_MOST_STRIPES = 8
# Shares for each reader, so that none has a long one to itself in the end.
_SHARES = 4
# A block or row group in all its forms, and a process without data.
_READER_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PartitionStage:
    """A stage whose one piece is the log in order, or whose pieces are shares of it."""

    source: Source
    folder: Path
    """The source's own directory."""
    spill: Spill
    shares: tuple[ChunkShare, ...] = ()

    def __call__(self, number: int) -> Iterator[int]:
        return self._share(self.shares[number]) if self.shares else self._in_order()

    def _share(self, share: ChunkShare) -> Iterator[int]:
        for chunk in self.source.chunks(self.folder, replace(share, done=self.spill.indexes())):
            self.spill.add(chunk, 0)  # rows of a divisible source are not counted from the first file on
            yield 0
        yield 1

    def _in_order(self) -> Iterator[int]:
        done = self.spill.done()
        before, rows = _bytes(done), sum(chunk.rows for chunk in done)
        for chunk in self.source.chunks(self.folder, ChunkShare(done=frozenset(known.index for known in done))):
            self.spill.add(chunk, rows)
            rows += chunk.frame.height
            yield max(chunk.bytes_done - before, 0)
            before = max(chunk.bytes_done, before)

    def memory(self, number: int) -> int:
        return _READER_BYTES

    def run(self, executor: Executor, progress: Progress) -> list[SpilledChunk]:
        """Deal what is not dealt yet; gives all chunks."""
        if self.shares:
            progress.start("read", len(self.shares), "shares of the log")
            try:
                executor.run(self, range(len(self.shares)), progress)
            except DataError:
                # Which fault of the log is the first, only a reader in order can tell.
                progress.finish()
                return replace(self, shares=()).run(SerialExecutor(), progress)
        else:
            unit = "B" if self.source.files else ""
            progress.start("read", self.source.total_bytes, unit, _bytes(self.spill.done()))
            SerialExecutor().run(self, [0], progress)
        progress.finish()
        return self.spill.done()


def log_shares(source: Source, readers: int) -> tuple[ChunkShare, ...]:
    """The shares of a log for so many readers; none where one reads it in order."""
    count = len(source.files)
    if readers == 1 or not source.divisible:
        return ()
    runs = min(count, _SHARES * readers)
    edges = [count * place // runs for place in range(runs + 1)]
    stripes = min(-(-readers // count), _MOST_STRIPES)
    return tuple(
        replace(ALL_CHUNKS, files=range(first, last), stripe=stripe, stripes=stripes)
        for first, last in pairwise(edges)
        for stripe in range(stripes)
    )


def _bytes(done: list[SpilledChunk]) -> int:
    """Bytes of the log up to the last chunk that is there."""
    return done[-1].bytes_done if done else 0
