"""Batches of a split, in an order that depends on seed and epoch only, read ahead by threads.

The row groups of all shards are permuted. The permuted list is divided into `parallel_readers`
equal parts, which are read in parallel; every batch has samples from each part. A *shuffle buffer*
holds `shuffle_row_groups` row groups of a part in memory. It permutes segments of samples (or
sessions, or single samples). Memory holds two buffers for each part, and the batches that are
ready.

The samples of a batch depend on the parts and not on the number of ranks. A rank reads the parts
that contain its share of the batches. With N parts, each of N ranks reads an N-th of the data.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.config.validate import check_ranges, check_seed
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import Unit
from stratarec.data.dataset.row_group_reader import RowGroupReader
from stratarec.data.loading.shuffle_buffer import ShuffleBuffer, assemble, empty
from stratarec.errors import ConfigError, DatasetError
from stratarec.progress import traced


def bounds(total: int, parts: int, place: int) -> tuple[int, int]:
    """Return the limits (first, end) of part `place`, if `total` items are divided into `parts`
    almost equal parts.
    """
    return total * place // parts, total * (place + 1) // parts


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """Share of every batch that a process reads. The samples of a batch are divided among the ranks
    in order.
    """

    rank: int = 0
    ranks: int = 1

    def parts(self, parts: int) -> range:
        """Return which of the epoch's parts contain samples of this rank. `parts` is the number of
        parts.
        """
        return range(parts * self.rank // self.ranks, -(-parts * (self.rank + 1) // self.ranks))

    def of(self, samples: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Return the limits (first, end) of this rank's share of the samples that a batch has from
        one part.

        `samples` is the number of these samples. Rank r of N begins at r / N of the batch.
        """
        first, last = (
            min(max(parts * rank - part * self.ranks, 0), self.ranks) for rank in (self.rank, self.rank + 1)
        )
        return samples * first // self.ranks, samples * last // self.ranks


@dataclass(frozen=True, kw_only=True)
class RowGroupSlice:
    """Samples ``first:last`` of a row group."""

    shard: int
    row_group: int
    first: int
    last: int
    """End of the slice; this sample is not included."""


def cut(row_groups: Sequence[tuple[int, int, int]], first: int, last: int) -> list[RowGroupSlice]:
    """Return slices of the row groups ``(shard, row group, samples)`` that together are the samples
    ``first:last``.
    """
    slices, begin = [], 0
    for shard, row_group, samples in row_groups:
        low, high = max(first - begin, 0), min(last - begin, samples)
        if low < high:
            slices.append(RowGroupSlice(shard=shard, row_group=row_group, first=low, last=high))
        begin += samples
    return slices


def batches(samples: int, batch_size: int, parts: int) -> int:
    """Return the number of batches in an epoch. The epoch ends when all parts are exhausted."""

    def of(part: int) -> int:
        (first, last), (low, high) = (bounds(total, parts, part) for total in (samples, batch_size))
        return -(-(last - first) // (high - low))

    return max(of(part) for part in range(parts))


Rows: TypeAlias = list[tuple[ShuffleBuffer, NDArray[np.int32]]]


def parts(
    buffers: Sequence[Sequence[RowGroupSlice]],
    read: Callable[[int], ShuffleBuffer],
    thread: Executor,
    *,
    size: int,
    start: int,
) -> Iterator[Rows]:
    """Yield groups of `size` rows from shuffle buffers, beginning with group `start`; the last
    group may be smaller.

    Parameters
    ----------
    buffers : sequence of sequence of RowGroupSlice
        Samples of each shuffle buffer; buffers before group `start` are not read.
    read : callable
        Reads the buffer with a given number.
    thread : Executor
        Thread on which `read` is called.
    """
    ends = np.cumsum([sum(piece.last - piece.first for piece in buffer) for buffer in buffers])
    position = start * size
    first = int(np.searchsorted(ends, position, side="right"))
    ahead: Future[ShuffleBuffer] | None = None
    pending: Rows = []
    for number in range(first, len(buffers)):
        buffer = (ahead or thread.submit(read, number)).result()
        ahead = thread.submit(read, number + 1) if number + 1 < len(buffers) else None
        begin = int(ends[number]) - len(buffer.order)
        done = max(position - begin, 0)
        for bound in range(max(start, begin // size) * size + size, int(ends[number]) + 1, size):
            last = bound - begin
            yield [*pending, *([(buffer, buffer.order[done:last])] if last > done else [])]
            pending, done = [], last
        if done < len(buffer.order):
            pending.append((buffer, buffer.order[done:]))
    if pending:
        yield pending


def count(buffered: Rows) -> int:
    """Return the number of rows."""
    return sum(len(rows) for _, rows in buffered)


def between(buffered: Rows, first: int, last: int) -> Rows:
    """Return rows ``first:last``."""
    slices, begin = [], 0
    for buffer, rows in buffered:
        slices.append((buffer, rows[max(first - begin, 0) : max(last - begin, 0)]))
        begin += len(rows)
    return [(buffer, rows) for buffer, rows in slices if len(rows)]


def take(buffered: Rows, size: int) -> Rows:
    """Remove the first `size` rows from `buffered` and return them."""
    front = []
    for place, (buffer, rows) in enumerate(buffered):
        length = min(size, len(rows))
        front.append((buffer, rows[:length]))
        buffered[place] = (buffer, rows[length:])
        size -= length
    return [(buffer, rows) for buffer, rows in front if len(rows)]


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Size and order of batches.

    Examples
    --------
    >>> from stratarec import LoaderConfig
    >>> LoaderConfig(batch_size=256, shuffle=False).batch_size
    256
    """

    batch_size: int = 4096
    """Samples per batch; the last batch of an epoch may be smaller."""
    shuffle: bool = True
    """Whether to permute row groups, and units within a shuffle buffer. If false, the stored order
    is kept.
    """
    unit: Unit = "auto"
    """Unit that is permuted within a shuffle buffer: ``sample``, ``session`` or ``run``, which is a
    segment: adjacent samples of a session with equal values in every deduplication group and
    history, so the values of a batch stay deduplicated. ``auto`` is ``run`` if the data set has
    groups, else ``sample``."""
    expand: bool = False
    """Whether to expand deduplication groups, so that every feature has a bag for each sample."""
    shuffle_row_groups: int = 8
    """Number of row groups (of 65,536 samples) that are in memory and shuffled together."""
    parallel_readers: int = 1
    """Number of equal parts of an epoch that are read in parallel; every batch has samples from
    each part.
    """
    prefetch_batches: int = 8
    """Number of batches that are assembled ahead of the consumer."""
    seed: int = 0
    """Seed of the order of samples, together with the number of the epoch."""

    def __post_init__(self) -> None:
        counts = ("batch_size", "shuffle_row_groups", "parallel_readers", "prefetch_batches")
        check_ranges(self, "loader.", **dict.fromkeys(counts, "[1, inf)"))
        if self.parallel_readers > self.batch_size:
            raise ConfigError(
                f"loader.parallel_readers is {self.parallel_readers}, expected at most loader.batch_size, "
                f"which is {self.batch_size}: every batch has samples of each part"
            )
        check_seed(self.seed, "loader.seed")


class Loader:
    """Iterable over the batches of a split of a data set.

    Parameters
    ----------
    dataset : Dataset
        Open data set.
    split : str
        ``train``, ``valid`` or ``test``.
    config : LoaderConfig
        Batch size and shuffling.
    share : BatchShare, optional
        Share of each batch to read; by default the complete batch. If a batch has no samples for
        the share, an empty batch is returned. Parts of the epoch without samples of the share are
        not read.

    Notes
    -----
    Threads read ahead. They stop when the iterator is closed or deleted; an error in a thread is
    raised in the consumer.

    Examples
    --------
    >>> from stratarec import Dataset, Loader, LoaderConfig
    >>> config = LoaderConfig(batch_size=256, shuffle=False)
    >>> loader = Loader(Dataset.open("data/clicks"), "valid", config)
    >>> len(loader), loader.samples
    (1, 193)
    """

    def __init__(
        self, dataset: Dataset, split: str, config: LoaderConfig, share: BatchShare | None = None
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.config = config
        self._share = share or BatchShare()
        self.samples = dataset.samples(split)
        self._sparse = [feature.name for feature in dataset.schema.sparse]
        if not self.samples:
            raise DatasetError(
                f"{dataset.path}: the split {split!r} has no samples; check data.split in the recipe"
            )
        sessions = dataset.deduplicated and dataset.schema.session_keys
        if config.unit in ("session", "run") and config.shuffle and not sessions:
            raise ConfigError(
                f"{dataset.path} has no sessions to shuffle by {config.unit}; shuffle by sample, or name "
                "schema.session and prepare again with groups"
            )

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return batches(self.samples, self.config.batch_size, self.config.parallel_readers)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch. Batches are assembled ahead, on a thread.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0, which determines the order of samples.
        start_batch : int
            Number of the first batch, from 0. Shuffle buffers before this batch are not read.

        Examples
        --------
        >>> [batch.size for batch in loader.epoch(0)]
        [193]
        """
        return run_ahead(lambda: self.batches(epoch, start_batch), self.config.prefetch_batches)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Iterate like `epoch`, but assemble each batch when it is requested; only shuffle buffers
        are read ahead.

        Examples
        --------
        >>> next(loader.batches(0)).label.sum()
        tensor(41.)
        """
        count_parts, row_groups = self.config.parallel_readers, self.row_groups(epoch)
        with (
            self.dataset.reader(self.split, unused=False) as files,
            ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle") as thread,
        ):
            streams = {
                part: self._rows(part, row_groups, files, thread, epoch, start_batch)
                for part in self._share.parts(count_parts)
            }
            for _ in range(start_batch, len(self)):
                buffered: Rows = []
                for part, stream in streams.items():
                    rows = next(stream, [])
                    buffered += between(rows, *self._share.of(count(rows), part, count_parts))
                yield self._batch(buffered)

    def _rows(
        self,
        part: int,
        row_groups: Sequence[tuple[int, int, int]],
        files: RowGroupReader,
        thread: Executor,
        epoch: int,
        start_batch: int,
    ) -> Iterator[Rows]:
        """Yield the rows that a part of the epoch contributes to each batch, beginning with
        `start_batch`.
        """
        config = self.config
        pieces = cut(row_groups, *bounds(self.samples, config.parallel_readers, part))
        width = config.shuffle_row_groups
        buffers = [pieces[first : first + width] for first in range(0, len(pieces), width)]
        low, high = bounds(config.batch_size, config.parallel_readers, part)

        def read(number: int) -> ShuffleBuffer:
            return self._read(files, buffers[number], self.draws(epoch, number, part))

        return parts(buffers, read, thread, size=high - low, start=start_batch)

    def draws(self, epoch: int, number: int, part: int = 0) -> np.random.Generator | None:
        """Return the random generator that permutes shuffle buffer `number` of a part; None without
        shuffling.
        """
        # The first of several parts gets the same random numbers as a single part.
        entropy = [self.config.seed, epoch, 1, number, *([part] if part else [])]
        return np.random.default_rng(entropy) if self.config.shuffle else None

    @traced("read row groups")
    def _read(
        self, files: RowGroupReader, pieces: Sequence[RowGroupSlice], draws: np.random.Generator | None
    ) -> ShuffleBuffer:
        row_groups = [files.read(piece.shard, piece.row_group) for piece in pieces]
        buffer = ShuffleBuffer.of(row_groups, self.dataset, draws, self.config.unit)
        return buffer.only(
            [(piece.first, piece.last) for piece in pieces],
            [group.samples.num_rows for group in row_groups],
        )

    def row_groups(self, epoch: int) -> list[tuple[int, int, int]]:
        """Return the row groups of an epoch in order, each as (shard, row group, number of
        samples).
        """
        groups = [
            (number, group, size)
            for number, shard in enumerate(self.dataset.shards(self.split))
            for group, size in enumerate(shard.row_groups)
        ]
        if self.config.shuffle:
            order = np.random.default_rng([self.config.seed, epoch, 0]).permutation(len(groups))
            groups = [groups[place] for place in order]
        return groups

    @traced("collate")
    def _batch(self, buffered: Rows) -> Batch:
        if not buffered:
            return empty(self.dataset)
        batch = assemble(buffered, self.dataset)
        return batch.expanded(self._sparse) if self.config.expand else batch


def run_ahead(make: Callable[[], Iterator[Item]], depth: int) -> Iterator[Item]:
    """Run an iterator in a separate thread, at most `depth` items ahead.

    The thread stops when the iterator is closed or deleted. An error in the thread is raised in the
    consumer.
    """
    ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
    # Used as a semaphore: one token for each item that may be queued.
    tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in make():
                tokens.get()
                if stopped.is_set():
                    return
                ready.put(item)
            ready.put(None)
        except BaseException as error:  # raised in the consumer
            ready.put(error)

    for _ in range(depth):
        tokens.put(None)
    thread = threading.Thread(target=work, name="stratarec-loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            tokens.put(None)
            yield item
    finally:
        stopped.set()
        tokens.put(None)
        thread.join()
