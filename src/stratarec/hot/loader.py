"""Batches of hot inputs and batches of the others, of one split.

Every input is told hot or not when its shuffle buffer is read, and waits in one of two queues. How many of each a row
group has is known (`classifier`), so the order of an epoch's batches is, too, and an epoch can be taken up anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.data.parts import Rows, count, take
from stratarec.data.reading import RowGroupReader
from stratarec.data.shuffling import ShuffleBuffer
from stratarec.errors import ConfigError
from stratarec.hot.needs import NeedsReader, are_hot
from stratarec.hot.order import Kinds, batches_of, evenly, in_turns
from stratarec.hot.parts import Counts, Part

Group = tuple[int, int, int]
"""Shard, row group, samples."""
Classified = tuple[ShuffleBuffer, NDArray[np.bool_]]
"""A shuffle buffer, and which of its samples are hot."""
Rate = Callable[[int], float | None]
"""Epoch -> per cent of a kind's batches of a buffer that are trained at a time; None for evenly."""


class HotLoader(Loader):
    """A `Loader` whose batches are of hot inputs alone, or of others alone.

    Parameters
    ----------
    parts : sequence of Part
        Of the tables.
    hot : ndarray
        ``[parts]`` how many first rows of each are hot.
    counts : mapping
        Path of a shard -> hot inputs of each row group, as `classify` counts them.
    rate : callable
        See `Rate`; asked when an epoch begins.

    Notes
    -----
    Memory holds two shuffle buffers, as in any loader, and of those before no more than a batch of each kind.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        config: LoaderConfig,
        parts: Sequence[Part],
        hot: Counts,
        counts: Mapping[str, Sequence[int]],
        rate: Rate,
    ) -> None:
        super().__init__(dataset, split, config)
        if config.portions > 1:
            raise ConfigError(
                f"train.portions is {config.portions}, expected 1 with hot.batches: inputs are dealt anew"
            )
        self._hot, self._rate = hot, rate
        self._needs = NeedsReader(dataset, parts)
        self._counts = [counts[shard.path] for shard in dataset.shards(split)]
        self.hot_samples = sum(sum(each) for each in self._counts)

    def __len__(self) -> int:
        """Batches an epoch."""
        size = self.config.batch_size
        return -(-self.hot_samples // size) - (-(self.samples - self.hot_samples) // size)

    def kinds(self, epoch: int) -> Kinds:
        """``[batches]`` which batches of an epoch are hot."""
        buffers, size, rate = self._buffers(epoch), self.config.batch_size, self._rate(epoch)
        numbers = zip(*(batches_of(samples, size).tolist() for samples in self._samples(buffers)), strict=True)
        found = [evenly(hot, mixed) if rate is None else in_turns(hot, mixed, rate) for hot, mixed in numbers]
        return np.concatenate(found)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """See `Loader.batches`."""
        kinds, size, buffers = self.kinds(epoch), self.config.batch_size, self._buffers(epoch)
        # Samples of each kind, the others first, that earlier batches have had, and that earlier buffers held.
        done = [int(np.count_nonzero(kinds[:start_batch] == kind)) * size for kind in (False, True)]
        ends = [np.cumsum(samples) for samples in reversed(self._samples(buffers))]
        first = min(int(np.searchsorted(ends[kind], done[kind], side="right")) for kind in range(2))
        skipped = [done[kind] - int(ends[kind][first - 1] if first else 0) for kind in range(2)]
        held: list[Rows] = [[], []]
        with self.dataset.reader(self.split, unused=False) as files, _Ahead(len(buffers), first) as ahead:
            for kind in kinds[start_batch:].astype(int):
                while count(held[kind]) < size and ahead.left:
                    buffer, hot = ahead.next(lambda number: self._classified(files, buffers[number], epoch, number))
                    for place in range(2):
                        rows = buffer.order[hot[buffer.order] == bool(place)]
                        dropped = min(skipped[place], len(rows))
                        skipped[place] -= dropped
                        if dropped < len(rows):
                            held[place].append((buffer, rows[dropped:]))
                yield self._batch(take(held[kind], size))
                held[kind] = [(buffer, rows) for buffer, rows in held[kind] if len(rows)]

    def _buffers(self, epoch: int) -> list[list[Group]]:
        """The row groups of each shuffle buffer of an epoch."""
        groups, width = self.row_groups(epoch), self.config.shuffle_row_groups
        return [groups[first : first + width] for first in range(0, len(groups), width)]

    def _samples(self, buffers: Sequence[Sequence[Group]]) -> tuple[list[int], list[int]]:
        """Hot samples of each buffer, and others."""
        hot = [sum(self._counts[shard][group] for shard, group, _ in buffer) for buffer in buffers]
        return hot, [sum(size for *_, size in buffer) - each for buffer, each in zip(buffers, hot, strict=True)]

    def _classified(self, files: RowGroupReader, groups: Sequence[Group], epoch: int, number: int) -> Classified:
        found = [files.read(shard, group) for shard, group, _ in groups]
        hot = np.concatenate([are_hot(self._needs.of(row_group), self._hot) for row_group in found])
        return ShuffleBuffer.of(found, self.dataset, self.draws(epoch, number), self.config.unit), hot


class _Ahead:
    """Reads one buffer ahead of the one that is asked for, on a thread; a context manager."""

    def __init__(self, buffers: int, first: int) -> None:
        self._buffers, self._next = buffers, first
        self._future: Future[Classified] | None = None

    @property
    def left(self) -> bool:
        """Whether there are more."""
        return self._next < self._buffers

    def next(self, read: Callable[[int], Classified]) -> Classified:
        """The next one."""
        future = self._future or self._thread.submit(read, self._next)
        found = future.result()
        self._next += 1
        self._future = self._thread.submit(read, self._next) if self.left else None
        return found

    def __enter__(self) -> _Ahead:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle")
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
