"""The working directory ``<data.path>.preparing``, and the first pass of `prepare`, which spills
the log into it.

    origin.json    inputs of the run: it resumes only under the same origin
    lease          token of the tasks on other machines that may write here
    source         private files of the source
    spilled        rows by partition, and spilled.done when the whole log is there
    counts         statistics of each partition
    encoded        a note for each partition whose shards were written
    output         the data set

Consecutive chunks of the source are written to one file, which has an Arrow stream for each
partition, followed by the counts of the chunks' values. (Values are counted here unless the split
depends on the log's last time.) All rows of a user or session are in the same partition. To read a
partition, its stream is read from every file, at the offset in the file's note. Parquet files with
a row group for each partition were slower. Each read parsed a footer that lists all partitions, so
the time grew with the square of the log's size.

Every row has a number, made of the index of its file and the row in this file. If a source has no
files, the number is the position of the row. The number breaks ties in sorting, and assigns samples
without user and session to splits. It is stored unless `data.keep_rows` is false, so that
predictions can be joined to the log.

A file is renamed to its final name when it is complete, so an interrupted run resumes after the
last complete file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pydantic
import xxhash
from numpy.typing import NDArray

from stratarec.data.column_names import FILE, PARTITION, ROW, SPLIT
from stratarec.data.dataset.manifest import Origin, Shard
from stratarec.data.dataset.row_group import FILE_BITS
from stratarec.data.dedup_groups import Repeats
from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.executor import LEASE, Executor, SerialExecutor
from stratarec.data.prepare.value_counts import count_values
from stratarec.data.schema import Schema
from stratarec.data.sources import Source
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare
from stratarec.data.splits import Splitter
from stratarec.data.threads import ahead, map_threads
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import VocabularyConfig
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
# Maximum number of readers that share a file: each reads the whole file, but parses and spills only
# its share.
_MOST_STRIPES = 8
# Number of shares per reader. With several shorter shares, readers end at about the same time.
_SHARES = 4
# Bytes of the frames that are spilled to one file. A file has a stream for each partition, so with
# a file for each chunk, the number of streams would grow with the square of the log's size.
_FILE_BYTES = 64 << 20
# Memory of a reader in bytes: a process without data, and a chunk or row group with all its copies.
_READER_BYTES = 1 << 30


class Place(NamedTuple):
    """Position of an Arrow stream in a file."""

    offset: int
    size: int
    digest: str
    """xxh3_64 hash of the stream, because Arrow streams have no checksum."""


@dataclass(frozen=True, kw_only=True)
class SpilledFile:
    """Description of consecutive chunks that were spilled to one file."""

    name: str
    """Name of the file without its extension."""
    indexes: tuple[int, ...]
    """Indexes of the chunks, ascending."""
    rows: int
    samples: int
    """Number of rows that are samples, without rows that are only used in histories."""
    places: dict[int, Place]
    """Partition -> its stream in the file."""
    counts: tuple[Place, ...]
    """Streams with the counts of the values, after the rows; empty if the *count* pass counts the
    values.
    """
    by_file: bool
    """Whether rows are numbered within their file. If false, they are numbered in the order of the
    source.
    """
    times: tuple[int, int] | None
    """First and last time; None if there are no times or no rows."""
    frame_bytes: int
    """Bytes of the rows in memory."""
    bytes_done: int
    bad_rows: int
    bad_examples: tuple[str, ...]
    notes: tuple[str, ...]


# Format of the notes in the directory. An interrupted run is resumed only if its notes have this
# format.
_FORMAT = [
    13,
    *(entry.name for kind in (SpilledFile, Moments, Repeats) for entry in fields(kind)),
    *Shard.model_fields,
]


def write_streams(path: Path, frames: Sequence[pl.DataFrame]) -> list[Place]:
    """Write frames to one file, as compressed Arrow streams; return the position of each."""
    streams = map_threads(_stream, frames)
    write_atomic(path, lambda file: file.writelines(streams))
    starts = accumulate((stream.size for stream in streams), initial=0)
    return [
        Place(start, stream.size, xxhash.xxh3_64_hexdigest(stream))
        for start, stream in zip(starts, streams, strict=False)
    ]


def read_streams(
    path: Path, places: Sequence[Place], columns: Sequence[str] | None = None
) -> list[pa.Table]:
    """Read streams, or some of their columns, from a file that `write_streams` wrote.

    Raises
    ------
    DatasetError
        If the file is missing or damaged.
    """
    with reporting_damage(path), path.open("rb") as file:
        return [_read_stream(file, place, columns) for place in places]


def _stream(frame: pl.DataFrame) -> pa.Buffer:
    table = frame.to_arrow()
    sink = pa.BufferOutputStream()
    # zstd takes twice the processor time for writing, and three times for reading.
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _read_stream(file: BinaryIO, place: Place, columns: Sequence[str] | None) -> pa.Table:
    file.seek(place.offset)
    content = file.read(place.size)
    if xxhash.xxh3_64_hexdigest(content) != place.digest:
        raise ValueError("its hash does not match")
    options = None
    if columns is not None:
        with pa.ipc.open_stream(content) as reader:
            names = reader.schema.names
        options = pa.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
    with pa.ipc.open_stream(content, options=options) as reader:
        return reader.read_all()


_SPILLED_FILE = pydantic.TypeAdapter(SpilledFile)


class Spill:
    """The spilled rows of one run.

    Parameters
    ----------
    folder : Path
        Directory of the spilled files.
    schema : Schema
        Columns of the data set.
    splitter : Splitter
        Chooses the split of each row.
    vocabulary : VocabularyConfig
        Kinds and limits of the vocabularies.
    partitions : int
        Number of partitions of the shard key. Without a shard key, each chunk is a partition.
    """

    def __init__(
        self,
        folder: Path,
        schema: Schema,
        splitter: Splitter,
        vocabulary: VocabularyConfig,
        partitions: int,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._splitter = splitter
        self._vocabulary = vocabulary
        self._partitions = partitions
        make_directory(folder)

    def done(self) -> list[SpilledFile]:
        """Return the complete files, in order."""
        files = []
        for path in self._folder.glob("*.json"):
            with reporting_damage(path):
                files.append(_SPILLED_FILE.validate_python(read_json(path)))
        return sorted(files, key=lambda file: file.indexes)

    def indexes(self) -> frozenset[int]:
        """Return the indexes of all spilled chunks."""
        return frozenset(index for file in self.done() for index in file.indexes)

    def gather(self, chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
        """Yield the chunks of each file. Without a shard key, a chunk is a partition and has its
        own file.
        """
        gathered, size = list[Chunk](), 0
        for chunk in chunks:
            gathered.append(chunk)
            size += int(chunk.frame.estimated_size())
            if size >= _FILE_BYTES or not self._schema.shard_key:
                yield gathered
                gathered, size = [], 0
        if gathered:
            yield gathered

    def add(self, chunks: Sequence[Chunk], before: int) -> SpilledFile:
        """Write the rows of chunks by partition, and count their values if the split of the rows is
        already known.

        Parameters
        ----------
        chunks : sequence of Chunk
            Consecutive rows of the log.
        before : int
            Number of rows in earlier chunks.
        """
        schema, name = self._schema, f"{chunks[0].index:08d}"
        frame = pl.concat([chunk.frame for chunk in chunks]).with_columns(
            pl.Series(ROW, _row_numbers(chunks, before))
        )
        counts: list[pl.DataFrame] = []
        if not self._splitter.needs_last_time:
            passed = [chunk.passed_through for chunk in chunks if chunk.passed_through is not None]
            texts = (
                [pl.concat([part.to_series().cast(pl.String) for part in passed]).alias(SPLIT)]
                if passed
                else []
            )
            split = self._splitter.split(frame.with_columns(pl.Series(FILE, _file_indexes(chunks)), *texts))
            frame = frame.with_columns(pl.Series(SPLIT, split))
            counts = count_values(frame, schema, self._vocabulary)
        key = schema.shard_key
        if key:
            partitioned = frame.with_columns(self.assign_partitions(frame[key]))
            parts = partitioned.partition_by(PARTITION, as_dict=True, include_key=False)
            frames = {int(partition[0]): part for partition, part in sorted(parts.items()) if part.height}
        else:
            frames = {chunks[0].index: frame} if frame.height else {}
        places = write_streams(self._folder / f"{name}.arrow", [*frames.values(), *counts])
        times = frame[schema.time] if schema.time and frame.height else None
        spilled = SpilledFile(
            name=name,
            indexes=tuple(chunk.index for chunk in chunks),
            rows=frame.height,
            places=dict(zip(frames, places, strict=False)),
            counts=tuple(places[len(frames) :]),
            samples=frame.height - frame[schema.label_column].null_count(),
            by_file=chunks[0].rows is not None,
            times=None if times is None else (int(times.min()), int(times.max())),  # type: ignore[arg-type]
            frame_bytes=int(frame.estimated_size()),
            bytes_done=chunks[-1].bytes_done,
            bad_rows=sum(chunk.bad_rows for chunk in chunks),
            bad_examples=tuple(text for chunk in chunks for text in chunk.bad_examples),
            notes=tuple(chunk.note for chunk in chunks if chunk.note),
        )
        write_json(self._folder / f"{name}.json", vars(spilled))
        return spilled

    def assign_partitions(self, keys: pl.Series) -> pl.Series:
        """Return the partition of each value of the shard key."""
        return pl.Series(PARTITION, (stable_hash(keys) % np.uint64(self._partitions)).astype(np.int32))

    def read(
        self, files: Sequence[SpilledFile], partitions: Sequence[int], columns: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Read the rows of some partitions, in the order of the source; columns have a chunk for
        each file.
        """
        tables = []
        for file in files:
            places = [file.places[partition] for partition in partitions if partition in file.places]
            if places:
                tables += read_streams(self._path(file), places, columns)
        frame = pl.from_arrow(pa.concat_tables(tables))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def read_counts(self, file: SpilledFile) -> list[pl.DataFrame]:
        """Read the counts of a file's values."""
        tables = read_streams(self._path(file), file.counts) if file.counts else []
        return [pl.DataFrame(table) for table in tables]

    def columns(self, files: Sequence[SpilledFile]) -> dict[str, pl.DataType]:
        """Return the type of each column of spilled rows."""
        file = next(file for file in files if file.places)
        path, place = self._path(file), next(iter(file.places.values()))
        with reporting_damage(path), path.open("rb") as raw:
            raw.seek(place.offset)
            with pa.ipc.open_stream(raw) as reader:  # reads only the front of the stream
                return dict(pl.DataFrame(reader.schema.empty_table()).schema)

    def _path(self, file: SpilledFile) -> Path:
        return self._folder / f"{file.name}.arrow"

    def shards(self, files: Sequence[SpilledFile], shard_samples: int) -> list[list[int]]:
        """Return the partitions of each shard.

        With a shard key, a shard is one partition. Without, it is consecutive chunks of about
        `shard_samples` rows.
        """
        if self._schema.shard_key:
            return [[p] for p in sorted({partition for file in files for partition in file.places})]
        shards: list[list[int]] = [[]]
        rows = 0
        for file in files:
            if rows and rows + file.rows > shard_samples:
                shards.append([])
                rows = 0
            if file.rows:
                shards[-1].append(file.indexes[0])
                rows += file.rows
        return [shard for shard in shards if shard]


def _file_indexes(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    """Return the index of the input file of each row."""
    return np.concatenate(
        [np.broadcast_to(np.asarray(chunk.file, np.int32), chunk.frame.height) for chunk in chunks]
    )


def _row_numbers(chunks: Sequence[Chunk], before: int) -> NDArray[np.int64]:
    """Return the row number of each row. Row numbers ascend in the order of the source."""
    if chunks[0].rows is None:
        return before + 1 + np.arange(sum(chunk.frame.height for chunk in chunks), dtype=np.int64)
    rows = np.concatenate([np.asarray(chunk.rows, dtype=np.int64) for chunk in chunks])
    rows += _file_indexes(chunks).astype(np.int64) << FILE_BITS
    return rows


class Workspace:
    """The working directory of one data set, which this process has locked.

    Parameters
    ----------
    root : Path
        The directory.
    origin : Origin
        Inputs of the data set.
    schema : Schema
        Columns of the data set.
    splitter : Splitter
        Chooses the split of each row.
    vocabulary : VocabularyConfig
        Kinds and limits of the vocabularies.
    """

    def __init__(
        self, root: Path, origin: Origin, schema: Schema, splitter: Splitter, vocabulary: VocabularyConfig
    ) -> None:
        self.root = root
        self._origin = origin
        self._schema = schema
        self._splitter = splitter
        self._vocabulary = vocabulary
        self.output = root / "output"
        self.source = root / "source"

    def open(self, estimate_partitions: Callable[[], int], say: Callable[[str], None]) -> bool:
        """Create or check the directory. Return whether an earlier run is resumed.

        Parameters
        ----------
        estimate_partitions : callable
            Returns the number of partitions; it is called only for a new run.
        """
        path = self.root / ORIGIN
        resumed = self._is_resumable(path)
        if not resumed and len(list_entries(self.root)) > 1:
            self.restart(f"{self.root} belongs to other logs, settings or another version", say)
        make_directory(self.source)
        if not resumed:
            partitions = estimate_partitions()
            write_json(
                path, {"format": _FORMAT, "partitions": partitions, "origin": self._origin.to_dict()}
            )
        partitions = read_json(path)["partitions"]
        self.spill = Spill(
            self.root / "spilled", self._schema, self._splitter, self._vocabulary, partitions
        )
        return resumed

    def restart(self, reason: str, say: Callable[[str], None]) -> None:
        """Remove the results of an earlier run, and report the reason."""
        say(f"{reason}; starting from the beginning")
        clear_directory(self.root)

    def folder(self, name: str) -> Path:
        """Create and return the directory of a pass's results."""
        path = self.root / name
        make_directory(path)
        return path

    def spilled(self) -> list[SpilledFile] | None:
        """Return all files if the whole log is spilled, else None."""
        note = self.root / "spilled.done"
        if not note.exists():
            return None
        done = self.spill.done()
        if read_json(note) != len(done):
            raise DatasetError(f"{self.root / 'spilled'} is damaged: some of its files are missing")
        return done

    def finish_spilling(self, files: int) -> None:
        """Record that the log is completely spilled, into `files` files."""
        write_json(self.root / "spilled.done", files)

    def _is_resumable(self, path: Path) -> bool:
        try:
            note = read_json(path)
        except DatasetError:  # absent or damaged
            return False
        if not isinstance(note, dict) or not isinstance(note.get("partitions"), int):
            return False
        return note.get("format") == _FORMAT and note.get("origin") == self._origin.to_dict()


@dataclass(frozen=True, kw_only=True)
class SpillPass:
    """The pass that spills a log. It has one piece that reads the log in order, or one for each
    share of the log.
    """

    source: Source
    folder: Path
    """Private directory of the source."""
    spill: Spill
    shares: tuple[ChunkShare, ...] = ()

    def __call__(self, number: int) -> Iterator[int]:
        return self._share(self.shares[number]) if self.shares else self._in_order()

    def _share(self, share: ChunkShare) -> Iterator[int]:
        for chunks in self._gathered(share):
            self.spill.add(chunks, 0)  # rows of a divisible source are numbered within their file
            yield 0
        yield 1

    def _in_order(self) -> Iterator[int]:
        done = self.spill.done()
        before, rows = _bytes(done), sum(file.rows for file in done)
        for chunks in self._gathered(ALL_CHUNKS):
            file = self.spill.add(chunks, rows)
            rows += file.rows
            yield max(file.bytes_done - before, 0)
            before = max(file.bytes_done, before)

    def _gathered(self, share: ChunkShare) -> Iterator[list[Chunk]]:
        """Yield the chunks of each file that was not spilled before. Those of the next file are
        read ahead.
        """
        chunks = self.source.chunks(self.folder, replace(share, done=self.spill.indexes()))
        return ahead(self.spill.gather(chunks))

    def memory(self, number: int) -> int:
        return _READER_BYTES

    def run(self, executor: Executor, progress: Progress) -> list[SpilledFile]:
        """Spill the rows that were not spilled before, and return all files."""
        if self.shares:
            progress.start("read", len(self.shares), "shares of the log")
            try:
                executor.run(self, range(len(self.shares)), progress)
            except DataError:
                # Parallel readers do not know which bad row of the log is the first, so the log is
                # read again in order.
                progress.finish()
                return replace(self, shares=()).run(SerialExecutor(), progress)
        else:
            unit = "B" if self.source.files else ""
            progress.start("read", self.source.total_bytes, unit, _bytes(self.spill.done()))
            SerialExecutor().run(self, [0], progress)
        progress.finish()
        return self.spill.done()


def log_shares(source: Source, readers: int) -> tuple[ChunkShare, ...]:
    """Return the shares of a log for parallel readers; empty if one reader reads it in order."""
    count = len(source.files)
    if readers == 1 or not source.divisible:
        return ()
    parts = min(count, _SHARES * readers)
    edges = [count * part // parts for part in range(parts + 1)]
    stripes = min(-(-readers // count), _MOST_STRIPES)
    return tuple(
        replace(ALL_CHUNKS, files=range(first, last), stripe=stripe, stripes=stripes)
        for first, last in pairwise(edges)
        for stripe in range(stripes)
    )


def _bytes(done: list[SpilledFile]) -> int:
    """Return the number of bytes of the log up to the end of the last complete file."""
    return done[-1].bytes_done if done else 0
