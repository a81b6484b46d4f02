"""The first stage of `prepare`: rows of a log are dealt to partitions, by one reader or by several at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from stratarec.data.prepare.executor import Executor, SerialExecutor
from stratarec.data.prepare.spill import Spill, SpilledChunk
from stratarec.data.sources import Source
from stratarec.data.sources.base import WHOLE, ChunkShare
from stratarec.errors import DataError
from stratarec.progress import Progress

# Each of those who share a file reads all of it, and parses and deals its part.
_MOST_STRIPES = 8
# Shares for each reader, so that none has a long one to itself in the end.
_SHARES = 4
# A block or row group in all its forms, and a process without data.
_READER_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Dealing:
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


def shares_of(source: Source, readers: int) -> tuple[ChunkShare, ...]:
    """The shares of a log for so many readers; none where one reads it in order."""
    count = len(source.files)
    if readers == 1 or not source.divisible:
        return ()
    runs = min(count, _SHARES * readers)
    edges = [count * place // runs for place in range(runs + 1)]
    stripes = min(-(-readers // count), _MOST_STRIPES)
    return tuple(
        replace(WHOLE, files=range(first, last), stripe=stripe, stripes=stripes)
        for first, last in pairwise(edges)
        for stripe in range(stripes)
    )


def _bytes(done: list[SpilledChunk]) -> int:
    """Bytes of the log up to the last chunk that is there."""
    return done[-1].bytes_done if done else 0
