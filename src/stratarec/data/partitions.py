"""Spilled rows as partitions, each of which becomes one shard of each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from stratarec.data.executing import Executor
from stratarec.data.partition import Partition
from stratarec.data.schema import Schema
from stratarec.data.span import Span
from stratarec.data.spill import Spill, SpilledChunk
from stratarec.data.splits import Splitter
from stratarec.files import write_json
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
