"""Batches of a split, in an order that (seed, epoch) fixes, read ahead by threads.

The row groups of all shards are permuted. `shuffle_row_groups` of them at a time are held in memory, a *shuffle
buffer*, in which runs of samples (or sessions, or samples) are permuted. Memory holds two of them and the batches that
are ready.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stratarec.batch import Batch
from stratarec.checks import check_seed
from stratarec.data.batches import assemble, empty
from stratarec.data.dataset import Dataset
from stratarec.data.reading import RowGroupReader
from stratarec.data.shuffling import ShuffleBuffer, Unit
from stratarec.errors import ConfigError, DatasetError

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
    expand: bool = False
    """Give batches without groups: every feature with a bag for each sample."""
    shuffle_row_groups: int = 8
    """Row groups (65,536 samples each) that are shuffled together; bounds memory."""
    prefetch_batches: int = 8
    """Batches made ahead of the consumer."""
    seed: int = 0
    """Fixes every epoch's order."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "shuffle_row_groups", "prefetch_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"loader.{name} is {getattr(self, name)}, expected at least 1")
        check_seed(self.seed, "loader.seed")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every batch a process reads: samples of rank r of N follow those of the ranks before it.

    All ranks together have the very batches that one process has, whatever N is.
    """

    rank: int = 0
    ranks: int = 1

    def of(self, samples: int) -> tuple[int, int]:
        """First and last (not included) of a batch's samples."""
        return samples * self.rank // self.ranks, samples * (self.rank + 1) // self.ranks


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
        Of each batch; by default all of it. A share without samples is a batch of none, without groups.

    Notes
    -----
    Threads only, never fork. An iterator that is closed or dropped stops its threads; what goes wrong in a thread is
    raised in the consumer.
    """

    def __init__(self, dataset: Dataset, split: str, config: LoaderConfig, share: Share | None = None) -> None:
        self.dataset, self.split, self.config = dataset, split, config
        self._share = share or Share()
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

    def __len__(self) -> int:
        """Batches an epoch."""
        return (self.samples + self.config.batch_size - 1) // self.config.batch_size

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_batch` on: a function of (seed, epoch, start_batch) alone.

        Shuffle buffers that lie wholly before `start_batch` are not read.
        """
        return run_ahead(lambda: self.batches(epoch, start_batch), self.config.prefetch_batches)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """As `epoch`, made when they are asked for instead of ahead; shuffle buffers are read ahead all the same."""
        return self._batches(self._buffers(epoch), epoch, start_batch)

    def _buffers(self, epoch: int) -> list[list[tuple[int, int, int]]]:
        """(shard, row group, samples) of each shuffle buffer in order."""
        groups = [
            (number, group, size)
            for number, shard in enumerate(self.dataset.shards(self.split))
            for group, size in enumerate(shard.row_groups)
        ]
        if self.config.shuffle:
            order = np.random.default_rng([self.config.seed, epoch, 0]).permutation(len(groups))
            groups = [groups[place] for place in order]
        width = self.config.shuffle_row_groups
        return [groups[first : first + width] for first in range(0, len(groups), width)]

    def _batches(self, buffers: list[list[tuple[int, int, int]]], epoch: int, start_batch: int) -> Iterator[Batch]:
        size = self.config.batch_size
        ends = np.cumsum([sum(samples for _, _, samples in buffer) for buffer in buffers])
        position = start_batch * size
        first = int(np.searchsorted(ends, position, side="right"))
        with (
            self.dataset.reader(self.split, unused=False) as files,
            ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle") as reader,
        ):
            ahead: Future[ShuffleBuffer] | None = None
            held: list[tuple[ShuffleBuffer, NDArray[np.int32]]] = []
            for number in range(first, len(buffers)):
                buffer = (ahead or reader.submit(self._read, files, buffers[number], epoch, number)).result()
                more = number + 1 < len(buffers)
                ahead = reader.submit(self._read, files, buffers[number + 1], epoch, number + 1) if more else None
                begin = position - (int(ends[number]) - len(buffer.order)) if number == first else 0
                held.append((buffer, buffer.order[begin:]))
                while sum(len(rows) for _, rows in held) >= size:
                    yield self._batch(_cut(held, size))
                held = [(buffer, rows) for buffer, rows in held if len(rows)]
            if held:
                yield self._batch(held)

    def _batch(self, held: list[tuple[ShuffleBuffer, NDArray[np.int32]]]) -> Batch:
        held = _slice(held, *self._share.of(sum(len(rows) for _, rows in held)))
        if not held:
            return empty(self.dataset)
        batch = assemble(held, self.dataset)
        return batch.expanded(self._sparse) if self.config.expand else batch

    def _read(
        self, files: RowGroupReader, buffer: list[tuple[int, int, int]], epoch: int, number: int
    ) -> ShuffleBuffer:
        row_groups = [files.read(shard, group) for shard, group, _ in buffer]
        draws = np.random.default_rng([self.config.seed, epoch, 1, number]) if self.config.shuffle else None
        return ShuffleBuffer.of(row_groups, self.dataset, draws, self.config.unit)


def _cut(
    held: list[tuple[ShuffleBuffer, NDArray[np.int32]]], size: int
) -> list[tuple[ShuffleBuffer, NDArray[np.int32]]]:
    """Take `size` rows off the front of `held`."""
    taken = []
    for place, (buffer, rows) in enumerate(held):
        count = min(size, len(rows))
        taken.append((buffer, rows[:count]))
        held[place] = (buffer, rows[count:])
        size -= count
    return [(buffer, rows) for buffer, rows in taken if len(rows)]


def _slice(
    held: list[tuple[ShuffleBuffer, NDArray[np.int32]]], first: int, last: int
) -> list[tuple[ShuffleBuffer, NDArray[np.int32]]]:
    """Rows ``first`` to ``last`` (not included) of `held`."""
    found, begin = [], 0
    for buffer, rows in held:
        found.append((buffer, rows[max(first - begin, 0) : max(last - begin, 0)]))
        begin += len(rows)
    return [(buffer, rows) for buffer, rows in found if len(rows)]


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
