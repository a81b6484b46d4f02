"""Hot inputs of a split: which inputs are hot, how batches of them are ordered, and the loader of such batches.

``needs[i, p]`` is the number of first rows of table p that contain all lookups of sample i: 0 if the sample looks up no
row, else at least all tail buckets. A sample is hot if no table has fewer hot rows than the sample needs. A bag that
several samples share is examined once.

Whether an input is hot follows from its ids and a hot profile, so it is computed whenever the input is read. Only the
counts of each row group are stored: the length and the order of an epoch follow from them, so training can resume
anywhere in an epoch. Counts are written shard by shard, and an interrupted count resumes.

The loader sorts each shuffle buffer into hot and mixed samples. Samples that fill no batch are kept for the next
buffer: at most one batch of each kind is held in addition to a buffer, and every input is trained once per epoch. The
last batch of each kind may be smaller. If these two fit into one batch, they are merged into the last batch of the
epoch, so an epoch has as many batches as without hot inputs. Within a buffer the two kinds alternate. The rate of
alternation changes only between epochs, because batches are read ahead of evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

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
from stratarec.io.sealed import Count, Hash, Model, digest, read_sealed, write_sealed
from stratarec.kernels.runtime.cores import cores
from stratarec.progress import Progress, SilentProgress

Kinds = NDArray[np.bool_]
"""``[batches]`` which of them are hot."""

LEAST, MOST, FIRST = 1.0, 100.0, 50.0
"""Of the rate: per cent of a kind's batches that are trained before the other's turn."""
_FALLS = 4


def kinds_of(hot: Sequence[int], mixed: Sequence[int], size: int, rate: float | None) -> Kinds:
    """The batches of an epoch whose buffers have so many samples of each kind; what is of both counts as mixed.

    Parameters
    ----------
    rate : float or None
        See `in_turns`; None for `evenly`.
    """
    numbers = [batches_of(samples, size) for samples in (hot, mixed)]
    left = [sum(samples) % size for samples in (hot, mixed)]
    together = min(left) > 0 and sum(left) <= size
    if together:
        for each in numbers:
            each[-1] -= 1
    pairs = zip(*(each.tolist() for each in numbers), strict=True)
    found = [evenly(one, other) if rate is None else in_turns(one, other, rate) for one, other in pairs]
    return np.concatenate([*found, np.zeros(int(together), dtype=bool)])


def batches_of(samples: Sequence[int], size: int) -> NDArray[np.int64]:
    """``[buffers]`` batches of one kind that are filled with each buffer, which has so many samples of it."""
    ends = np.cumsum(samples, dtype=np.int64)
    filled = ends // size
    if len(filled):
        filled[-1] = -(-ends[-1] // size)
    return np.diff(filled, prepend=0)


def evenly(hot: int, mixed: int) -> Kinds:
    """Two kinds of batches, each at equal distances."""
    places = np.concatenate([(np.arange(number) + 0.5) / max(number, 1) for number in (hot, mixed)])
    # Of two at one place the mixed one goes first.
    order = np.lexsort((np.repeat([1, 0], [hot, mixed]), places))
    found: Kinds = (np.arange(hot + mixed) < hot)[order]
    return found


def in_turns(hot: int, mixed: int, rate: float) -> Kinds:
    """`rate` per cent of the hot batches, as many per cent of the mixed ones, and so on."""
    parts: list[Kinds] = []
    done = [0, 0]
    while done != [hot, mixed]:
        for kind, number in enumerate((hot, mixed)):
            turn = min(max(round(number * rate / 100), 1), number - done[kind])
            parts.append(np.full(turn, kind == 0))
            done[kind] += turn
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def rate_after(losses: Sequence[float]) -> float:
    """The published rule: half after a loss that rose, double after four in a row that fell."""
    rate, falls = FIRST, 0
    for before, now in pairwise(losses):
        falls = falls + 1 if now < before else 0
        if now > before:
            rate = max(rate / 2, LEAST)
        elif falls == _FALLS:
            rate, falls = min(2 * rate, MOST), 0
    return rate


def validation_losses(evaluations: Sequence[Mapping[str, Any]], until: int) -> list[float]:
    """Of the evaluations up to step `until`."""
    made = [entry for entry in evaluations if entry["step"] <= until and not entry.get("closing")]
    return [float(entry["log_loss"]) for entry in made if entry["log_loss"] is not None]


class NeedsReader:
    """Reads what the samples of a data set need.

    Parameters
    ----------
    dataset : Dataset
    parts : sequence of Part
        Of its tables.
    """

    def __init__(self, dataset: Dataset, parts: Sequence[RowRange]) -> None:
        self._parts, self._windows = parts, dataset.windows
        self._tables = {feature.name: feature.vocabulary for feature in dataset.schema.sparse}
        self._groups = {name: group for group, names in dataset.groups.items() for name in names}

    def of(self, row_group: RowGroup) -> Needs:
        """``[samples, parts]`` of a row group, in the order of storage."""
        found = np.zeros((row_group.samples.num_rows, len(self._parts)), dtype=np.int32)
        for feature, table in self._tables.items():
            for place, needed in self._feature(row_group, feature, table):
                np.maximum(found[:, place], needed, out=found[:, place])
        return found

    def _feature(self, row_group: RowGroup, feature: str, table: str) -> Iterator[tuple[int, Needs]]:
        """What the samples need of each part of a feature's table."""
        holder = feature if feature in self._windows else self._groups.get(feature)
        values, start, length = _bags(row_group, feature, holder)
        pointers = None if holder is None else row_group.pointers(holder)
        for place, part in enumerate(self._parts):
            if part.table == table:
                needed = bag_needs(values, start, length, part)
                yield place, needed if pointers is None else needed[pointers]


def bag_needs(
    values: NDArray[np.int32], start: NDArray[np.int64] | None, length: NDArray[np.int64] | None, part: RowRange
) -> Needs:
    """What each bag ``values[start[i]:start[i] + length[i]]`` needs of a part; bags may overlap.

    Parameters
    ----------
    start, length : ndarray or None
        None where every value is a bag of its own, and none if it is negative.
    """
    each: Needs = np.where(values >= 0, np.maximum(values + np.int32(1), np.int32(part.tail)), np.int32(0))
    if start is None or length is None:
        return each
    # Every other piece is the one from the end of a bag to the next: it is left out again. The zero is for bags that
    # end where the values do.
    bounds = np.stack([start, start + length], axis=1).ravel()
    found = np.maximum.reduceat(np.append(each, np.int32(0)), bounds)[::2] if len(bounds) else each[:0]
    return np.where(length > 0, found, np.int32(0))


def are_hot(needs: Needs, hot: Counts) -> NDArray[np.bool_]:
    """``[N]`` which samples need none but the first ``hot[p]`` rows of each part."""
    found: NDArray[np.bool_] = np.all(needs <= hot.astype(np.int32), axis=1)
    return found


def _bags(
    row_group: RowGroup, feature: str, holder: str | None
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Values, starts and lengths of a feature's distinct bags; of a feature of one id the values alone."""
    if holder == feature and feature in row_group.tables:
        windows, values = row_group.tables[feature], row_group.tables[events(feature)]["id"].to_numpy()
        return values, *(windows[name].to_numpy().astype(np.int64) for name in ("start", "length"))
    column = (row_group.samples if holder is None else row_group.tables[holder])[feature]
    if not pa.types.is_list(column.type):
        return column.to_numpy(), None, None
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    offsets = whole.offsets.to_numpy().astype(np.int64)
    return whole.values.to_numpy(), offsets[:-1], np.diff(offsets)


class Classification(Model):
    """Hot inputs of a split."""

    format: Literal[1] = 1
    key: Hash
    """Of the data set, the split and the hot rows that these counts are of."""
    shards: dict[str, tuple[Count, ...]]
    """Path of a shard -> hot inputs of each of its row groups."""

    @property
    def inputs(self) -> int:
        """Hot inputs."""
        return sum(sum(counts) for counts in self.shards.values())


def classify(
    dataset: Dataset,
    parts: Sequence[RowRange],
    hot: Counts,
    split: str,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Classification:
    """Count the hot inputs of a split.

    Parameters
    ----------
    hot : ndarray
        ``[parts]`` first rows of each part that are hot.
    path : Path
        Where counts are kept; those of the same data set, split and hot rows that stand there are gone on from.

    Notes
    -----
    Reads the whole split, as many shards at a time as there are cores.
    """
    rows = [[part.table, int(number)] for part, number in zip(parts, hot, strict=True)]
    key = digest({"data": dataset.fingerprint, "split": split, "hot": rows})
    found = _begun(path, key)
    shards = dataset.shards(split)
    left = [number for number, shard in enumerate(shards) if shard.path not in found]
    told = progress or SilentProgress()
    known = sum(shard.samples for shard in shards if shard.path in found)
    told.start(f"classify {split}", dataset.samples(split), "samples", known)
    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-hot") as threads:
        done = {threads.submit(_counts, dataset, parts, hot, split, number): shards[number] for number in left}
        for future in as_completed(done):
            shard = done[future]
            found[shard.path] = future.result()
            told.advance(shard.samples)
            if path is not None:
                write_sealed(path, Classification(key=key, shards=found).to_dict())
    told.finish()
    return Classification(key=key, shards={shard.path: found[shard.path] for shard in shards})


def beside(dataset: Dataset, split: str) -> Path:
    """Where the counts of a data set's split are kept: by ``profile --classify``, and by runs that count."""
    place = dataset.path.resolve()
    return place.with_name(f"{place.name}-profile.hot-{split}.json")


def _begun(path: Path | None, key: str) -> dict[str, tuple[int, ...]]:
    if path is None or not path.exists():
        return {}
    kept = read_sealed(path, Classification, "remove it", ConfigError)
    return dict(kept.shards) if kept.key == key else {}


def _counts(dataset: Dataset, parts: Sequence[RowRange], hot: Counts, split: str, number: int) -> tuple[int, ...]:
    reader = NeedsReader(dataset, parts)
    with dataset.reader(split, unused=False) as files:
        groups = range(len(dataset.shards(split)[number].row_groups))
        return tuple(int(np.count_nonzero(are_hot(reader.of(files.read(number, group)), hot))) for group in groups)


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
