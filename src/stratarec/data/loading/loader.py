"""Batches of a split, in an order fixed by (seed, epoch), read ahead by threads.

The row groups of all shards are permuted. This order is cut into `portions` equal parts, which are read in parallel;
every batch has samples of each part. `shuffle_row_groups` of a part's row groups at a time are held in memory, a
*shuffle buffer*, in which runs of samples (or sessions, or samples) are permuted. Memory holds two buffers for each
part that is read, and the batches that are ready.

Parts, not ranks, determine the samples of a batch. A rank reads the parts that its share of a batch comes from: N ranks
with N parts each read an N-th of the data, and any number of ranks has the batches of one process.
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
from stratarec.config.validate import check_seed
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import SlateKey
from stratarec.data.dataset.row_group_reader import RowGroupReader
from stratarec.data.loading.shuffle_buffer import ShuffleBuffer, Unit, assemble, empty
from stratarec.errors import ConfigError, DatasetError
from stratarec.progress import traced


def bounds(total: int, parts: int, place: int) -> tuple[int, int]:
    """First and last (not included) of part `place`, where `total` things are cut into parts that differ by one."""
    return total * place // parts, total * (place + 1) // parts


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """Which part of every batch a process reads: samples of rank r of N follow those of the ranks before it."""

    rank: int = 0
    ranks: int = 1

    def portions(self, portions: int) -> range:
        """Those that this rank's samples come from."""
        return range(portions * self.rank // self.ranks, -(-portions * (self.rank + 1) // self.ranks))

    def of(self, samples: int, portion: int = 0, portions: int = 1) -> tuple[int, int]:
        """First and last (not included) of a batch's `samples` of a portion: rank r of N begins at r / N of all."""
        first, last = (
            min(max(portions * rank - portion * self.ranks, 0), self.ranks) for rank in (self.rank, self.rank + 1)
        )
        return samples * first // self.ranks, samples * last // self.ranks


@dataclass(frozen=True, kw_only=True)
class RowGroupSlice:
    """Samples of a row group, in the order of storage."""

    shard: int
    row_group: int
    first: int
    last: int
    """Not included."""


def cut(row_groups: Sequence[tuple[int, int, int]], first: int, last: int) -> list[RowGroupSlice]:
    """Samples `first` to `last` (not included) of row groups ``(shard, row group, samples)`` one after another."""
    found, begin = [], 0
    for shard, row_group, samples in row_groups:
        low, high = max(first - begin, 0), min(last - begin, samples)
        if low < high:
            found.append(RowGroupSlice(shard=shard, row_group=row_group, first=low, last=high))
        begin += samples
    return found


def batches(samples: int, batch_size: int, portions: int) -> int:
    """How many an epoch has: until the last portion has given all of its samples."""

    def of(portion: int) -> int:
        (first, last), (low, high) = (bounds(total, portions, portion) for total in (samples, batch_size))
        return -(-(last - first) // (high - low))

    return max(of(portion) for portion in range(portions))


Rows: TypeAlias = list[tuple[ShuffleBuffer, NDArray[np.int32]]]


def parts(
    buffers: Sequence[Sequence[RowGroupSlice]],
    read: Callable[[int], ShuffleBuffer],
    thread: Executor,
    *,
    size: int,
    start: int,
) -> Iterator[Rows]:
    """`size` rows at a time, the last time what is left; parts before number `start` are left out. Slates are whole:
    one that goes beyond the last row is of the next part.

    Parameters
    ----------
    buffers : sequence of sequence of Piece
        What each shuffle buffer holds; those wholly before `start` are not read.
    read : callable
        Makes one of them by its number.
    thread : Executor
        Calls `read`.
    """
    ends = np.cumsum([sum(piece.last - piece.first for piece in buffer) for buffer in buffers])
    position = start * size
    first = int(np.searchsorted(ends, position, side="right"))
    ahead: Future[ShuffleBuffer] | None = None
    held: Rows = []
    for number in range(first, len(buffers)):
        buffer = (ahead or thread.submit(read, number)).result()
        ahead = thread.submit(read, number + 1) if number + 1 < len(buffers) else None
        begin = int(ends[number]) - len(buffer.order)
        done = buffer.cut(max(position - begin, 0))
        for bound in range(max(start, begin // size) * size + size, int(ends[number]) + 1, size):
            last = buffer.cut(bound - begin)
            yield [*held, *([(buffer, buffer.order[done:last])] if last > done else [])]
            held, done = [], last
        if done < len(buffer.order):
            held.append((buffer, buffer.order[done:]))
    if held:
        yield held


def count(held: Rows) -> int:
    """How many rows these are."""
    return sum(len(rows) for _, rows in held)


def between(held: Rows, first: int, last: int) -> Rows:
    """Rows `first` to `last` (not included) of `held`."""
    found, begin = [], 0
    for buffer, rows in held:
        found.append((buffer, rows[max(first - begin, 0) : max(last - begin, 0)]))
        begin += len(rows)
    return [(buffer, rows) for buffer, rows in found if len(rows)]


def take(held: Rows, size: int) -> Rows:
    """Take `size` rows off the front of `held`."""
    taken = []
    for place, (buffer, rows) in enumerate(held):
        found = min(size, len(rows))
        taken.append((buffer, rows[:found]))
        held[place] = (buffer, rows[found:])
        size -= found
    return [(buffer, rows) for buffer, rows in taken if len(rows)]


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made."""

    batch_size: int = 4096
    """Samples a batch; the last one of an epoch may be smaller."""
    shuffle: bool = True
    """Permute row groups, and within a shuffle buffer what `unit` says; else the order of storage."""
    unit: Unit = "auto"
    """What is permuted within a shuffle buffer: ``sample``, single samples; ``session``, all samples of a session
    together; or ``run``, neighbouring samples of a session together that agree in every group with ids and every
    history, so that batches repeat values and stay deduplicated. ``auto``: runs where the data set has groups, else
    samples."""
    slate: SlateKey | None = None
    """Keep the samples of a session, or of a user, in one batch, and permute these. A batch that would end within one
    ends before it, and the last of an epoch has what is left; a slate must not be larger than a batch."""
    expand: bool = False
    """Give batches without groups: every feature with a bag for each sample."""
    shuffle_row_groups: int = 8
    """Row groups (65,536 samples each) that are shuffled together; bounds memory."""
    portions: int = 1
    """Equal parts of an epoch's order that are read side by side; each gives its part of every batch."""
    prefetch_batches: int = 8
    """Batches made ahead of the consumer."""
    seed: int = 0
    """Fixes every epoch's order."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "shuffle_row_groups", "portions", "prefetch_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"loader.{name} is {getattr(self, name)}, expected at least 1")
        if self.portions > self.batch_size:
            raise ConfigError(
                f"loader.portions is {self.portions}, expected at most loader.batch_size, which is {self.batch_size}: "
                "every batch has samples of each"
            )
        check_seed(self.seed, "loader.seed")


class Loader:
    """Iterates over a split of a data set.

    Parameters
    ----------
    dataset : Dataset
        Open data set.
    split : str
        ``train``, ``valid`` or ``test``.
    config : LoaderConfig
        Batch size and shuffling.
    share : Share
        Of each batch; by default all of it. A share without samples is a batch of none, without groups. Portions that
        a share has nothing of are not read.

    Notes
    -----
    Threads only, never fork. An iterator that is closed or dropped stops its threads; what goes wrong in a thread is
    raised in the consumer.
    """

    def __init__(self, dataset: Dataset, split: str, config: LoaderConfig, share: BatchShare | None = None) -> None:
        self.dataset, self.split, self.config = dataset, split, config
        self._share = share or BatchShare()
        self.samples = dataset.samples(split)
        self._sparse = [feature.name for feature in dataset.schema.sparse]
        if not self.samples:
            raise DatasetError(f"{dataset.path}: the split {split!r} has no samples; check data.split in the recipe")
        sessions = dataset.deduplicated and dataset.schema.session_keys
        if config.unit in ("session", "run") and config.shuffle and not sessions:
            raise ConfigError(
                f"{dataset.path} has no sessions to shuffle by {config.unit}; shuffle by sample, or name "
                "schema.session and prepare again with groups"
            )
        if config.slate and (config.portions > 1 or not getattr(dataset.schema, config.slate)):
            raise ConfigError(
                f"loader.slate is {config.slate}, which {dataset.path} was prepared without, or portions are several"
            )

    def __len__(self) -> int:
        """Batches an epoch."""
        return batches(self.samples, self.config.batch_size, self.config.portions)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_batch` on: a function of (seed, epoch, start_batch) alone.

        Shuffle buffers that lie wholly before `start_batch` are not read.
        """
        return run_ahead(lambda: self.batches(epoch, start_batch), self.config.prefetch_batches)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """As `epoch`, made when they are asked for instead of ahead; shuffle buffers are read ahead all the same."""
        portions, row_groups = self.config.portions, self.row_groups(epoch)
        with (
            self.dataset.reader(self.split, unused=self.config.slate == "session") as files,
            ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle") as thread,
        ):
            read = {
                portion: self._parts(portion, row_groups, files, thread, epoch, start_batch)
                for portion in self._share.portions(portions)
            }
            for _ in range(start_batch, len(self)):
                held: Rows = []
                for portion, given in read.items():
                    part = next(given, [])
                    held += between(part, *self._share.of(count(part), portion, portions))
                yield self._batch(held)

    def _parts(
        self, portion: int, row_groups: Sequence[tuple[int, int, int]], files: RowGroupReader, thread: Executor,
        epoch: int, start_batch: int,
    ) -> Iterator[Rows]:  # fmt: skip
        """What a portion gives to each batch from `start_batch` on, as long as it has samples."""
        config = self.config
        pieces = cut(row_groups, *bounds(self.samples, config.portions, portion))
        width = config.shuffle_row_groups
        buffers = [pieces[first : first + width] for first in range(0, len(pieces), width)]
        low, high = bounds(config.batch_size, config.portions, portion)

        def read(number: int) -> ShuffleBuffer:
            return self._read(files, buffers[number], self.draws(epoch, number, portion))

        return parts(buffers, read, thread, size=high - low, start=start_batch)

    def draws(self, epoch: int, number: int, portion: int = 0) -> np.random.Generator | None:
        """What permutes a shuffle buffer; None where nothing does."""
        # The first portion is drawn as an epoch of one portion is.
        entropy = [self.config.seed, epoch, 1, number, *([portion] if portion else [])]
        return np.random.default_rng(entropy) if self.config.shuffle else None

    @traced("read row groups")
    def _read(
        self, files: RowGroupReader, pieces: Sequence[RowGroupSlice], draws: np.random.Generator | None
    ) -> ShuffleBuffer:
        row_groups = [files.read(piece.shard, piece.row_group) for piece in pieces]
        whole = ShuffleBuffer.of(row_groups, self.dataset, draws, self.config.unit, self.config.slate)
        return whole.only(
            [(piece.first, piece.last) for piece in pieces], [group.samples.num_rows for group in row_groups]
        )

    def row_groups(self, epoch: int) -> list[tuple[int, int, int]]:
        """(shard, row group, samples) in the order of an epoch."""
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
    def _batch(self, held: Rows) -> Batch:
        if not held:
            return empty(self.dataset)
        batch = assemble(held, self.dataset)
        return batch.expanded(self._sparse) if self.config.expand else batch


def run_ahead(make: Callable[[], Iterator[Item]], depth: int) -> Iterator[Item]:
    """Run an iterator in a thread of its own, at most `depth` items ahead.

    Closing it, or dropping it, stops the thread; what goes wrong there is raised here.
    """
    ready: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
    # One for each item that may be handed over before the consumer takes another.
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
        except BaseException as error:  # handed to the consumer, which raises it
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
