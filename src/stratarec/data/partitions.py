"""Spilled rows as partitions, each of which becomes one shard of each split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from stratarec.data.partition import Partition
from stratarec.data.schema import Schema
from stratarec.data.span import Span
from stratarec.data.spill import Spill, SpilledChunk
from stratarec.data.splits import Splitter
from stratarec.progress import Progress


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
    """

    def __init__(
        self, spill: Spill, chunks: Sequence[SpilledChunk], schema: Schema, splitter: Splitter, shard_samples: int
    ) -> None:
        self.chunks = chunks
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
        split = self._splitter.assign(frame, span.last if span else 0)
        return Partition(frame, self._schema, self._splitter.thin(frame, split))

    def left(self, notes: Path, what: str, progress: Progress) -> Iterator[tuple[int, Partition, Path]]:
        """Number and content of each partition whose note in `notes` is still to be written, and the note's path."""
        progress.start(what, len(self), "shards")
        for number in range(len(self)):
            note = note_of(notes, number)
            if not note.exists():
                yield number, self.read(number), note
                # Give Arrow's freed memory back, so that peaks of different partitions do not add up.
                pa.default_memory_pool().release_unused()
            progress.advance(1)
        progress.finish()


def note_of(notes: Path, number: int) -> Path:
    """Where in `notes` the note of a partition lies."""
    return notes / f"{number:05d}.json"
