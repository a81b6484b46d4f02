"""The partitions of a log, read one at a time, and stages whose pieces they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from stratarec.data.column_names import FILE, PARTITION, ROW
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.partition import Partition
from stratarec.data.prepare.spill import Spill, SpilledChunk
from stratarec.data.schema import Schema
from stratarec.data.splits import Span, Splitter
from stratarec.errors import DataError
from stratarec.io.atomic import write_json
from stratarec.progress import Progress

# Of a process without data, and of a partition's rows with the copies that sorting and encoding them makes.
_PROCESS_BYTES, _COPIES = 300 << 20, 6


class Partitions:
    """The partitions of a log, read one at a time.

    Parameters
    ----------
    spill : Spill
    chunks : sequence of SpilledChunk
        All of the log.
    schema : Schema
    splitter : Splitter
    shard_samples : int
        About how many samples a partition has where rows are not dealt by a key.
    events : DataFrame, optional
        What users did before the log, by user and time: it is in histories, and nowhere else.
    """

    def __init__(
        self,
        spill: Spill,
        chunks: Sequence[SpilledChunk],
        schema: Schema,
        splitter: Splitter,
        shard_samples: int,
        events: pl.DataFrame | None = None,
    ) -> None:
        self.chunks = chunks
        self._events = None if events is None else events.with_columns(spill.place(events[schema.user]))
        self._spill, self._schema, self._splitter = spill, schema, splitter
        self._parts = spill.shards(chunks, shard_samples)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def span(self) -> Span | None:
        """From the first to the last time of the log; None where it has no times."""
        times = [chunk.times for chunk in self.chunks if chunk.times]
        if not times:
            return None
        first, last = min(time for time, _ in times), max(time for _, time in times)
        return Span(first=first, last=last, unit=self._schema.time_unit)

    def read(self, number: int) -> Partition:
        """A partition, split and in order."""
        frame, span = self._spill.read(self.chunks, self._parts[number]), self.span
        if self._events is not None:
            frame = self._with_events(frame, self._parts[number])
        split = self._splitter.assign(frame, span.last if span else 0)
        return Partition(frame, self._schema, self._splitter.thin(frame, split))

    def _with_events(self, frame: pl.DataFrame, parts: Sequence[int]) -> pl.DataFrame:
        """Earlier events as rows that are no samples, before those of the log."""
        assert self._events is not None
        mine = self._events.filter(self._events[PARTITION].is_in(parts)).drop(PARTITION)
        for name in mine.columns:
            if mine[name].dtype != frame[name].dtype:
                raise DataError(
                    f"column {name!r} has values of type {frame[name].dtype} in the log, and of {mine[name].dtype} in "
                    "the data set that it goes on from: set `type` of the feature, or the type of the column"
                )
        # Before every row of the log, in their order; of no file in particular.
        numbers = pl.Series(ROW, np.arange(-len(mine), 0, dtype=np.int64))
        files = pl.Series(FILE, np.zeros(len(mine), dtype=np.int32))
        return pl.concat([mine.with_columns(numbers, files), frame], how="diagonal").select(frame.columns)

    @property
    def other_events(self) -> pl.DataFrame | None:
        """Earlier events of users of whom the log may have no rows: those of partitions that there are not."""
        if self._events is None:
            return None
        there = [part for parts in self._parts for part in parts]
        return self._events.filter(~self._events[PARTITION].is_in(there)).drop(PARTITION)

    def memory(self, number: int) -> int:
        """About how many bytes it takes to work with a partition."""
        stored = sum(self._stored[part] for part in self._parts[number])
        return _PROCESS_BYTES + _COPIES * int(stored * self._growth)

    @cached_property
    def _growth(self) -> float:
        """Bytes of rows in memory over spilled ones."""
        return sum(chunk.frame_bytes for chunk in self.chunks) / max(self._stored.total(), 1)

    @cached_property
    def _stored(self) -> Counter[int]:
        """Spilled bytes of each partition of the log."""
        found: Counter[int] = Counter()
        for chunk in self.chunks:
            found.update({part: size for part, (_, size, _) in chunk.places.items()})
        return found


@dataclass(frozen=True, kw_only=True)
class EachPartition:
    """A stage whose pieces are partitions."""

    partitions: Partitions
    notes: Path
    """Where the note of each partition is written when all else of it is."""
    make: Callable[[int, Partition], dict[str, Any]]
    """Does what is to be done with the partition of a number, and gives its note."""
    held: int = 0
    """Bytes that `make` holds itself."""

    def __call__(self, number: int) -> Iterator[int]:
        write_json(note_of(self.notes, number), self.make(number, self.partitions.read(number)))
        # Give Arrow's freed memory back, so that peaks of different partitions do not add up.
        pa.default_memory_pool().release_unused()
        yield 1

    def memory(self, number: int) -> int:
        return self.partitions.memory(number) + self.held

    def run(self, what: str, executor: Executor, progress: Progress) -> None:
        """Do those partitions that have no note yet."""
        left = [number for number in range(len(self.partitions)) if not note_of(self.notes, number).exists()]
        progress.start(what, len(self.partitions), "shards", len(self.partitions) - len(left))
        executor.run(self, left, progress)
        progress.finish()


def note_of(notes: Path, number: int) -> Path:
    """Where in `notes` the note of a partition lies."""
    return notes / f"{number:05d}.json"
