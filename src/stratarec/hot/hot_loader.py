"""Batches of hot inputs and batches of the others, of one split.

Every input is told hot or not when its shuffle buffer is read, and waits in one of two queues. How many of each a row
group has is known (`classifier`), so the order of an epoch's batches is, too, and an epoch can be taken up anywhere.
The rate of `schedule` changes from epoch to epoch alone, because batches are read ahead of evaluations.
What is left of both at the end of an epoch is one batch where it fits into one, so an epoch has as many as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group_reader import RowGroupReader
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.loading.portions import Rows, count, take
from stratarec.data.loading.shuffle_buffer import ShuffleBuffer
from stratarec.errors import ConfigError
from stratarec.hot.classifier import NeedsReader, are_hot
from stratarec.hot.schedule import Kinds, kinds_of
from stratarec.hot.table_parts import Counts, RowRange

Group = tuple[int, int, int]
"""Shard, row group, samples."""
Classified = tuple[ShuffleBuffer, NDArray[np.bool_]]
"""A shuffle buffer, and which of its samples are hot."""
Rate = Callable[[int], float | None]
"""Epoch -> per cent of a kind's batches of a buffer that are trained at a time; None for evenly."""


class HotLoader(Loader):
    """A `Loader` whose batches are of hot inputs alone, or of others alone; the last one of an epoch may be of both.

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
        parts: Sequence[RowRange],
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
        self._known: tuple[int, Kinds] | None = None

    def kinds(self, epoch: int) -> Kinds:
        """``[batches]`` which batches of an epoch are hot."""
        return kinds_of(*self._samples(self._buffers(epoch)), self.config.batch_size, self._rate(epoch))

    def is_hot(self, epoch: int, batch: int) -> bool:
        """Whether a batch of an epoch that has begun is hot."""
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self.kinds(epoch)
        return bool(self._known[1][batch])

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """See `Loader.batches`."""
        kinds, size, buffers = self.kinds(epoch), self.config.batch_size, self._buffers(epoch)
        # Samples of each kind, the others first, that earlier batches have had, and that earlier buffers held.
        done = [int(np.count_nonzero(kinds[:start_batch] == kind)) * size for kind in (False, True)]
        ends = [np.cumsum(samples) for samples in reversed(self._samples(buffers))]
        first = min(int(np.searchsorted(ends[kind], done[kind], side="right")) for kind in range(2))
        skipped = [done[kind] - int(ends[kind][first - 1] if first else 0) for kind in range(2)]
        held: list[Rows] = [[], []]
        with (
            self.dataset.reader(self.split, unused=False) as files,
            ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle") as thread,
        ):
            given = _ahead(
                thread,
                lambda number: self._classified(files, buffers[number], epoch, number),
                range(first, len(buffers)),
            )
            for place, kind in enumerate(kinds[start_batch:].astype(int), start_batch):
                while count(held[kind]) < size and (found := next(given, None)) is not None:
                    buffer, hot = found
                    for each in range(2):
                        rows = buffer.order[hot[buffer.order] == bool(each)]
                        dropped = min(skipped[each], len(rows))
                        skipped[each] -= dropped
                        if dropped < len(rows):
                            held[each].append((buffer, rows[dropped:]))
                rest = held[1 - kind] if place == len(kinds) - 1 else []
                yield self._batch(take(held[kind], size) + rest)
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


def _ahead(thread: Executor, read: Callable[[int], Classified], numbers: range) -> Iterator[Classified]:
    """Buffers by their numbers, each read while the one before is used."""
    waiting: Future[Classified] | None = None
    for number in numbers:
        found = (waiting or thread.submit(read, number)).result()
        waiting = thread.submit(read, number + 1) if number + 1 in numbers else None
        yield found
