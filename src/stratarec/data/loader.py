"""Batches of a split, in an order that (seed, epoch) fixes, read ahead by threads.

Shuffling is in blocks: the row groups of all shards are permuted, `window_row_groups` of them at a time are held in
memory, and samples are permuted inside that window. Memory holds two windows and the batches that are ready.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError, DatasetError
from stratarec.jagged import Batch, KeyedJagged

_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made."""

    batch_size: int = 4096
    """Samples a batch; the last one of an epoch may be smaller."""
    shuffle: bool = True
    """Permute row groups, and samples within a window; else the order of storage."""
    window_row_groups: int = 8
    """Row groups (65,536 samples each) that are shuffled together; bounds memory."""
    prefetch_batches: int = 8
    """Batches made ahead of the consumer."""
    seed: int = 0
    """Fixes every epoch's order."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "window_row_groups", "prefetch_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"loader.{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """A list column: row r holds ``values[offsets[r]:offsets[r + 1]]``."""

    offsets: NDArray[np.int64]
    values: NDArray[np.int32]

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Lengths and values of the chosen rows."""
        start = self.offsets[rows]
        lengths = self.offsets[rows + 1] - start
        ends = lengths.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        places = np.arange(total) + np.repeat(start - (ends - lengths), lengths)
        return lengths, self.values[places]


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Columns of some row groups, and the order in which to hand their rows out."""

    label: NDArray[np.float32]
    dense: list[NDArray[np.float32]]
    sparse: list[NDArray[np.int32] | _Lists]
    group: NDArray[np.int64] | None
    order: NDArray[np.int64]


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

    Notes
    -----
    Threads only, never fork. An iterator that is closed or dropped stops its threads; what goes wrong in a thread is
    raised in the consumer.
    """

    def __init__(self, dataset: Dataset, split: str, config: LoaderConfig) -> None:
        self.dataset, self.split, self.config = dataset, split, config
        self.samples = dataset.samples(split)
        if not self.samples:
            raise DatasetError(f"{dataset.path}: the split {split!r} has no samples; check data.split in the recipe")

    def __len__(self) -> int:
        """Batches an epoch."""
        return (self.samples + self.config.batch_size - 1) // self.config.batch_size

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_batch` on: a function of (seed, epoch, start_batch) alone.

        Windows that lie wholly before `start_batch` are not read.
        """
        windows = self._windows(epoch)
        return _run_ahead(lambda: self._batches(windows, epoch, start_batch), self.config.prefetch_batches)

    def _windows(self, epoch: int) -> list[list[tuple[int, int, int]]]:
        """(shard, row group, samples) of each window in order."""
        groups = [
            (number, group, size)
            for number, shard in enumerate(self.dataset.shards(self.split))
            for group, size in enumerate(shard.row_groups)
        ]
        if self.config.shuffle:
            order = np.random.default_rng([self.config.seed, epoch, 0]).permutation(len(groups))
            groups = [groups[place] for place in order]
        width = self.config.window_row_groups
        return [groups[first : first + width] for first in range(0, len(groups), width)]

    def _batches(self, windows: list[list[tuple[int, int, int]]], epoch: int, start_batch: int) -> Iterator[Batch]:
        size = self.config.batch_size
        ends = np.cumsum([sum(samples for _, _, samples in window) for window in windows])
        position = start_batch * size
        first = int(np.searchsorted(ends, position, side="right"))
        with ThreadPoolExecutor(1, thread_name_prefix="stratarec-window") as reader:
            ahead: Future[_Window] | None = None
            held: list[tuple[_Window, NDArray[np.int64]]] = []
            for number in range(first, len(windows)):
                window = (ahead or reader.submit(self._read, windows[number], epoch, number)).result()
                more = number + 1 < len(windows)
                ahead = reader.submit(self._read, windows[number + 1], epoch, number + 1) if more else None
                begin = position - (int(ends[number]) - len(window.order)) if number == first else 0
                held.append((window, window.order[begin:]))
                while sum(len(rows) for _, rows in held) >= size:
                    yield self._assemble(_cut(held, size))
                held = [(window, rows) for window, rows in held if len(rows)]
            if held:
                yield self._assemble(held)

    def _read(self, window: list[tuple[int, int, int]], epoch: int, number: int) -> _Window:
        schema = self.dataset.schema
        table = pa.concat_tables([self.dataset.read_row_group(self.split, shard, group) for shard, group, _ in window])
        rows = table.num_rows
        draws = np.random.default_rng([self.config.seed, epoch, 1, number])
        return _Window(
            label=_column(table, "label").astype(np.float32),
            dense=[_column(table, feature.name) for feature in schema.dense],
            sparse=[_sparse_column(table, feature.name) for feature in schema.sparse],
            group=_column(table, "__group") if "__group" in table.column_names else None,
            order=draws.permutation(rows) if self.config.shuffle else np.arange(rows),
        )

    def _assemble(self, parts: list[tuple[_Window, NDArray[np.int64]]]) -> Batch:
        schema = self.dataset.schema
        size = sum(len(rows) for _, rows in parts)
        dense = np.empty((size, len(schema.dense)), dtype=np.float32)
        for f in range(len(schema.dense)):
            dense[:, f] = np.concatenate([window.dense[f].take(rows) for window, rows in parts])
        label = np.concatenate([window.label.take(rows) for window, rows in parts])
        groups = [window.group.take(rows) for window, rows in parts if window.group is not None]
        return Batch(
            label=torch.from_numpy(label),
            dense=torch.from_numpy(dense),
            sparse=_assemble_sparse(parts, schema, size),
            group=torch.from_numpy(np.concatenate(groups)) if groups else None,
        )


def _cut(held: list[tuple[_Window, NDArray[np.int64]]], size: int) -> list[tuple[_Window, NDArray[np.int64]]]:
    """Take `size` rows off the front of `held`."""
    taken = []
    for place, (window, rows) in enumerate(held):
        count = min(size, len(rows))
        taken.append((window, rows[:count]))
        held[place] = (window, rows[count:])
        size -= count
    return [(window, rows) for window, rows in taken if len(rows)]


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    array: NDArray[Any] = table[name].to_numpy()
    return array


def _sparse_column(table: pa.Table, name: str) -> NDArray[np.int32] | _Lists:
    column = table[name]
    if not pa.types.is_list(column.type):
        ids: NDArray[np.int32] = column.to_numpy()
        return ids
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # an empty column stays chunked
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    return _Lists(offsets=whole.offsets.to_numpy().astype(np.int64), values=whole.values.to_numpy())


def _assemble_sparse(parts: list[tuple[_Window, NDArray[np.int64]]], schema: Schema, size: int) -> KeyedJagged:
    lengths: list[NDArray[Any]] = []
    values: list[NDArray[np.int32]] = []
    plain = True
    for f in range(len(schema.sparse)):
        for window, rows in parts:
            column = window.sparse[f]
            if isinstance(column, _Lists):
                count, ids = column.take(rows)
                plain = False
            else:
                ids = column.take(rows)
                known = ids >= 0
                count = known.astype(np.int64)
                if not known.all():
                    plain, ids = False, ids[known]
            lengths.append(count)
            values.append(ids)
    flat = np.concatenate(values) if values else np.zeros(0, dtype=np.int32)
    offsets = None
    if not plain:
        offsets = np.zeros(size * len(schema.sparse) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return KeyedJagged(
        keys=tuple(feature.name for feature in schema.sparse),
        values=torch.from_numpy(flat),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        batch_size=size,
    )


def _run_ahead(make: Callable[[], Iterator[Batch]], depth: int) -> Iterator[Batch]:
    """Run an iterator in a thread of its own, at most `depth` items ahead."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for batch in make():
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="stratarec-loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
