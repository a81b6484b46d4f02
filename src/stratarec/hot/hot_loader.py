"""Hot inputs of a split: which inputs are hot, the order of hot batches, and the loader of such
batches.

``needs[i, p]`` is the number of first rows of part p (the rows of one table) that contain all
lookups of sample i. It is 0 if the sample looks up no row of the part; otherwise it includes at
least all tail buckets. A sample is hot if every part has at least as many hot rows as the sample
needs. A bag that several samples share is examined once.

Whether an input is hot follows from its ids and a hot profile, so it is computed whenever the input
is read. The hot inputs of each row group are counted before the first epoch. The length and the
order of an epoch follow from these counts, so training can resume anywhere in an epoch.

The loader sorts each shuffle buffer into hot and other (*mixed*) samples. Samples that do not fill
a batch wait for the next buffer. So at most one batch of each kind is in memory in addition to a
buffer, and every input is trained once per epoch. The last batch of each kind may be smaller; if
both last batches fit into one, they are merged into the last batch of the epoch. So an epoch has as
many batches as without hot inputs. Within a buffer the two kinds are interleaved evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.column_names import events
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import RowGroup
from stratarec.data.dataset.row_group_reader import RowGroupReader
from stratarec.data.loading.loader import Loader, LoaderConfig, Rows, count, take
from stratarec.data.loading.shuffle_buffer import ShuffleBuffer
from stratarec.errors import ConfigError
from stratarec.hot.selection import Counts, Needs, RowRange
from stratarec.kernels.runtime.cores import cores
from stratarec.progress import Progress, SilentProgress

Kinds = NDArray[np.bool_]
"""``[batches]`` whether each batch of an epoch is hot."""


def kinds_of(hot: Sequence[int], mixed: Sequence[int], size: int) -> Kinds:
    """Return whether each batch of an epoch is hot, ``[batches]``. A batch with samples of both
    kinds is not.

    Parameters
    ----------
    hot, mixed : sequence of int
        Numbers of hot samples and of other samples in each shuffle buffer of the epoch, in order.
    size : int
        Number of samples in a batch.
    """
    numbers = [batches_of(samples, size) for samples in (hot, mixed)]
    remainders = [sum(samples) % size for samples in (hot, mixed)]
    merged = min(remainders) > 0 and sum(remainders) <= size
    if merged:
        for batches in numbers:
            batches[-1] -= 1
    pairs = zip(*(batches.tolist() for batches in numbers), strict=True)
    kinds = [evenly(one, other) for one, other in pairs]
    return np.concatenate([*kinds, np.zeros(int(merged), dtype=bool)])


def batches_of(samples: Sequence[int], size: int) -> NDArray[np.int64]:
    """Return how many batches of one kind each shuffle buffer completes, ``[buffers]`` int64.

    Parameters
    ----------
    samples : sequence of int
        Number of samples of this kind in each buffer.
    size : int
        Number of samples in a batch. The last buffer also completes a smaller batch.
    """
    ends = np.cumsum(samples, dtype=np.int64)
    filled = ends // size
    if len(filled):
        filled[-1] = -(-ends[-1] // size)
    return np.diff(filled, prepend=0)


def evenly(hot: int, mixed: int) -> Kinds:
    """Interleave `hot` hot and `mixed` other batches evenly; return whether each is hot."""
    places = np.concatenate([(np.arange(number) + 0.5) / max(number, 1) for number in (hot, mixed)])
    # At equal positions, the mixed batch is first.
    order = np.lexsort((np.repeat([1, 0], [hot, mixed]), places))
    kinds: Kinds = (np.arange(hot + mixed) < hot)[order]
    return kinds


class NeedsReader:
    """Computes how many first rows of each table the samples of a data set need.

    Parameters
    ----------
    dataset : Dataset
        Data set whose row groups are read.
    parts : sequence of RowRange
        Rows of the data set's tables.
    """

    def __init__(self, dataset: Dataset, parts: Sequence[RowRange]) -> None:
        self._parts = parts
        self._windows = dataset.windows
        self._tables = {feature.name: feature.vocabulary for feature in dataset.schema.sparse}
        self._groups = {name: group for group, names in dataset.groups.items() for name in names}

    def of(self, row_group: RowGroup) -> Needs:
        """Return the needs of the row group's samples, in order, ``[samples, parts]`` int32."""
        needs = np.zeros((row_group.samples.num_rows, len(self._parts)), dtype=np.int32)
        for feature, table in self._tables.items():
            for place, needed in self._feature(row_group, feature, table):
                np.maximum(needs[:, place], needed, out=needs[:, place])
        return needs

    def _feature(self, row_group: RowGroup, feature: str, table: str) -> Iterator[tuple[int, Needs]]:
        """Yield the index of each part of a feature's table, and the samples' needs of it."""
        holder = feature if feature in self._windows else self._groups.get(feature)
        values, start, length = _bags(row_group, feature, holder)
        pointers = None if holder is None else row_group.pointers(holder)
        for place, part in enumerate(self._parts):
            if part.table == table:
                needed = bag_needs(values, start, length, part)
                yield place, needed if pointers is None else needed[pointers]


def bag_needs(
    values: NDArray[np.int32],
    start: NDArray[np.int64] | None,
    length: NDArray[np.int64] | None,
    part: RowRange,
) -> Needs:
    """Return how many first rows of a table contain all ids of a bag, ``[bags]`` int32.

    Parameters
    ----------
    values : ndarray
        Ids, int32. Bag i is ``values[start[i]:start[i] + length[i]]``; bags may overlap.
    start, length : ndarray or None
        ``[bags]`` int64. None if every value is a separate bag; a negative value is then an empty
        bag.
    part : RowRange
        Rows of the table. A bag with any id needs at least all tail buckets.
    """
    value_needs: Needs = np.where(
        values >= 0, np.maximum(values + np.int32(1), np.int32(part.tail)), np.int32(0)
    )
    if start is None or length is None:
        return value_needs
    # Every second result of `reduceat` is for the gap between two bags, and is dropped. The
    # appended zero is for bags that end with the last value.
    bounds = np.stack([start, start + length], axis=1).ravel()
    needs = (
        np.maximum.reduceat(np.append(value_needs, np.int32(0)), bounds)[::2]
        if len(bounds)
        else value_needs[:0]
    )
    return np.where(length > 0, needs, np.int32(0))


def are_hot(needs: Needs, hot: Counts) -> NDArray[np.bool_]:
    """Return whether each sample needs only hot rows, ``[N]`` bool.

    Parameters
    ----------
    needs : ndarray
        ``[N, parts]`` int32 number of first rows of each part that a sample needs.
    hot : ndarray
        ``[parts]`` int64 number of hot rows of each part, which are its first rows.
    """
    is_hot: NDArray[np.bool_] = np.all(needs <= hot.astype(np.int32), axis=1)
    return is_hot


def _bags(
    row_group: RowGroup, feature: str, holder: str | None
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return values, starts and lengths of distinct bags; only values if all have one id."""
    if holder == feature and feature in row_group.tables:
        windows, values = row_group.tables[feature], row_group.tables[events(feature)]["id"].to_numpy()
        return values, *(windows[name].to_numpy().astype(np.int64) for name in ("start", "length"))
    column = (row_group.samples if holder is None else row_group.tables[holder])[feature]
    if not pa.types.is_list(column.type):
        return column.to_numpy(), None, None
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty column stays chunked
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.to_numpy(), offsets[:-1], np.diff(offsets)


def classify(
    dataset: Dataset, parts: Sequence[RowRange], hot: Counts, split: str, progress: Progress | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the number of hot inputs of each row group of a split, by path of its shard.

    Parameters
    ----------
    dataset : Dataset
        Data set to read.
    parts : sequence of RowRange
        Rows of its tables.
    hot : ndarray
        ``[parts]`` int64 number of hot rows of each part, which are its first rows.
    split : str
        ``train``, ``valid`` or ``test``.
    progress : Progress, optional
        Receives the number of classified samples.

    Notes
    -----
    Reads the complete split, with one thread per core.
    """
    shards, counts = dataset.shards(split), dict[str, tuple[int, ...]]()
    progress = progress or SilentProgress()
    progress.start(f"classify {split}", dataset.samples(split), "samples")
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        by_shard = threads.map(partial(_counts, dataset, parts, hot, split), range(len(shards)))
        for shard, counted in zip(shards, by_shard, strict=True):
            counts[shard.path] = counted
            progress.advance(shard.samples)
    progress.finish()
    return counts


def _counts(
    dataset: Dataset, parts: Sequence[RowRange], hot: Counts, split: str, number: int
) -> tuple[int, ...]:
    reader = NeedsReader(dataset, parts)
    with dataset.reader(split, unused=False) as files:
        groups = range(len(dataset.shards(split)[number].row_groups))
        return tuple(
            int(np.count_nonzero(are_hot(reader.of(files.read(number, group)), hot))) for group in groups
        )


Group = tuple[int, int, int]
"""Shard, row group, and number of samples."""
Classified = tuple[ShuffleBuffer, NDArray[np.bool_]]
"""A shuffle buffer, and whether each of its samples is hot."""


class HotLoader(Loader):
    """A `Loader` whose batches have either only hot inputs or no hot inputs; the last batch of an
    epoch may have both.

    Parameters
    ----------
    dataset, split, config
        As for `Loader`. ``config.parallel_readers`` must be 1.
    parts : sequence of RowRange
        Rows of the tables.
    hot : ndarray
        ``[parts]`` int64 number of hot rows of each part, which are its first rows.
    counts : mapping
        Number of hot inputs of each row group, by path of its shard, as `classify` returns it.

    Notes
    -----
    In memory are two shuffle buffers, as in any loader, and at most one batch of each kind from
    earlier buffers.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        config: LoaderConfig,
        parts: Sequence[RowRange],
        hot: Counts,
        counts: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(dataset, split, config)
        if config.parallel_readers > 1:
            raise ConfigError(
                f"train.portions is {config.parallel_readers}, expected 1, because hot.batches "
                "orders the inputs itself"
            )
        self._hot = hot
        self._needs = NeedsReader(dataset, parts)
        self._counts = [counts[shard.path] for shard in dataset.shards(split)]
        self.hot_samples = sum(map(sum, self._counts))

    def kinds(self, epoch: int) -> Kinds:
        """Return whether each batch of an epoch is hot, ``[batches]``."""
        return kinds_of(*self._samples(self._buffers(epoch)), self.config.batch_size)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        kinds, size, buffers = self.kinds(epoch), self.config.batch_size, self._buffers(epoch)
        # For mixed and for hot samples: number of samples in earlier batches, and cumulative number
        # of samples of the buffers.
        done = [int(np.count_nonzero(kinds[:start_batch] == kind)) * size for kind in (False, True)]
        ends = [np.cumsum(samples) for samples in reversed(self._samples(buffers))]
        first = min(int(np.searchsorted(ends[kind], done[kind], side="right")) for kind in range(2))
        skipped = [done[kind] - int(ends[kind][first - 1] if first else 0) for kind in range(2)]
        pending: list[Rows] = [[], []]
        with (
            self.dataset.reader(self.split, unused=False) as files,
            ThreadPoolExecutor(1, thread_name_prefix="stratarec-shuffle") as thread,
        ):
            classified = _read_ahead(
                thread,
                lambda number: self._classified(files, buffers[number], epoch, number),
                range(first, len(buffers)),
            )
            for place, kind in enumerate(kinds[start_batch:].astype(int), start_batch):
                while count(pending[kind]) < size and (item := next(classified, None)) is not None:
                    buffer, hot = item
                    for is_hot in range(2):
                        rows = buffer.order[hot[buffer.order] == bool(is_hot)]
                        dropped = min(skipped[is_hot], len(rows))
                        skipped[is_hot] -= dropped
                        if dropped < len(rows):
                            pending[is_hot].append((buffer, rows[dropped:]))
                remaining = pending[1 - kind] if place == len(kinds) - 1 else []
                yield self._batch(take(pending[kind], size) + remaining)
                pending[kind] = [(buffer, rows) for buffer, rows in pending[kind] if len(rows)]

    def _buffers(self, epoch: int) -> list[list[Group]]:
        """Return the row groups of each shuffle buffer of an epoch."""
        groups, width = self.row_groups(epoch), self.config.shuffle_row_groups
        return [groups[first : first + width] for first in range(0, len(groups), width)]

    def _samples(self, buffers: Sequence[Sequence[Group]]) -> tuple[list[int], list[int]]:
        """Return the number of hot samples and the number of mixed samples of each buffer."""
        hot = [sum(self._counts[shard][group] for shard, group, _ in buffer) for buffer in buffers]
        return hot, [
            sum(size for *_, size in buffer) - count for buffer, count in zip(buffers, hot, strict=True)
        ]

    def _classified(
        self, files: RowGroupReader, groups: Sequence[Group], epoch: int, number: int
    ) -> Classified:
        row_groups = [files.read(shard, group) for shard, group, _ in groups]
        hot = np.concatenate([are_hot(self._needs.of(row_group), self._hot) for row_group in row_groups])
        return ShuffleBuffer.of(row_groups, self.dataset, self.draws(epoch, number), self.config.unit), hot


def _read_ahead(
    thread: Executor, read: Callable[[int], Classified], numbers: range
) -> Iterator[Classified]:
    """Yield the buffers with these numbers; the next is read while the caller uses one."""
    following: Future[Classified] | None = None
    for number in numbers:
        current = (following or thread.submit(read, number)).result()
        following = thread.submit(read, number + 1) if number + 1 in numbers else None
        yield current
