"""Batches cut from shuffle buffers.

Pointers make a deduplicated batch without hashing: an array as long as the group's table numbers the pointers that a
batch uses, and windows that overlap are joined by sorting their starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedWindows, KeyedJagged
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.shuffle_buffer import GroupValues, ShuffleBuffer
from stratarec.kernels.collate import (
    end_bags,
    join_windows,
    number_pointers,
    scatter_rows,
    spread_rows,
    take_bags,
    take_weights,
)


def assemble(held: Sequence[tuple[ShuffleBuffer, NDArray[np.int32]]], dataset: Dataset) -> Batch:
    """A batch of the given rows of one or several shuffle buffers."""
    parts = [_cut(buffer, rows, dataset) for buffer, rows in held]
    return parts[0] if len(parts) == 1 else Batch.concatenate(parts)


def empty(dataset: Dataset) -> Batch:
    """A batch of no samples, without groups."""
    keys, labels = tuple(feature.name for feature in dataset.schema.sparse), len(dataset.schema.label_columns)
    return Batch(
        label=torch.empty((0, labels) if labels > 1 else 0),
        dense=torch.empty(0, len(dataset.schema.dense)),
        sparse=_keyed(
            keys,
            np.empty(0, dtype=np.int32),
            np.zeros(1, dtype=np.int64),
            0,
            np.empty(0, dtype=np.float32) if dataset.schema.weighted else None,
        ),
        weight=torch.empty(0) if dataset.schema.weight else None,
    )


def _cut(buffer: ShuffleBuffer, rows: NDArray[np.int32], dataset: Dataset) -> Batch:
    samples, size = buffer.samples, len(rows)
    singles, room = len(samples.sparse) - len(samples.lists), sum(part.ids(rows) for part in samples.lists)
    words, missing = spread_rows(samples.ids, rows, paired=buffer.users, ids=singles, room=room)
    labels, weighted = len(dataset.schema.label_columns), bool(dataset.schema.weight)
    front, marks = 2 * buffer.users * size, labels + weighted
    columns = words[front : front + (marks + len(buffer.tables)) * size].reshape(-1, size)
    tables = dict(zip(buffer.tables, columns[marks:], strict=True))
    values = words[front + columns.size :]
    dense = _dense(buffer, rows, tables, len(dataset.schema.dense))
    ids, offsets = end_bags(values, singles, missing, samples.lists, rows)
    weights = take_weights(samples.weights, rows, offsets) if samples.weights and offsets is not None else None
    # From here on pointers are numbers of the batch's own.
    shared = [name for name in dataset.groups if buffer.tables[name].columns.sparse]
    groups = [_group(buffer.tables[name], tables[name]) for name in shared]
    return Batch(
        label=_label(columns[:labels]),
        dense=dense,
        sparse=_in_order(_keyed(samples.sparse, ids, offsets, size, weights), dataset),
        groups=(*groups, *(_history(name, buffer.tables[name], tables[name]) for name in dataset.windows)),
        user=torch.from_numpy(words[:front].view(np.int64)) if buffer.users else None,
        weight=torch.from_numpy(columns[labels].view(np.float32)) if weighted else None,
        slates=None if buffer.slates is None else torch.from_numpy(_run_lengths(buffer.slates[rows])),
    )


def _run_lengths(numbers: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many neighbours have one number."""
    return np.diff(np.flatnonzero(np.diff(numbers, prepend=-1)), append=len(numbers))


def _label(columns: NDArray[np.int32]) -> Tensor:
    """``[B]``, or ``[B, T]`` of several labels."""
    bits = columns[0] if len(columns) == 1 else np.ascontiguousarray(columns.T)
    return torch.from_numpy(bits.view(np.float32))


def _dense(
    buffer: ShuffleBuffer, rows: NDArray[np.int32], pointers: Mapping[str, NDArray[np.int32]], features: int
) -> Tensor:
    """``[B, features]``, those of groups too."""
    # Memory of torch, which begins at multiples of 64 bytes: by where NumPy's begins, a product of MKL may be summed in
    # another order (Intel, "Getting Reproducible Results with Intel MKL", 2011).
    found = torch.empty(len(rows), features)
    values = found.numpy()
    tables = ((buffer.tables[name].columns, chosen) for name, chosen in pointers.items())
    for columns, chosen in ((buffer.samples, rows), *tables):
        if len(columns.dense_places):
            scatter_rows(columns.dense, chosen, values, columns.dense_places)
    return found


def _keyed(
    keys: tuple[str, ...],
    values: NDArray[np.int32],
    offsets: NDArray[np.int64] | None,
    size: int,
    weights: NDArray[np.float32] | None = None,
) -> KeyedJagged:
    return KeyedJagged(
        keys=keys,
        values=torch.from_numpy(values),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        batch_size=size,
        weights=None if weights is None else torch.from_numpy(weights),
    )


def _in_order(features: KeyedJagged, dataset: Dataset) -> KeyedJagged:
    """The features in the schema's order: they are cut with lists behind features of one id."""
    order = tuple(feature.name for feature in dataset.schema.sparse if feature.name in features.keys)
    return features if features.keys == order else features.select(order)


def _group(table: GroupValues, pointers: NDArray[np.int32]) -> InverseJagged:
    """The group of samples that have these pointers, which are overwritten."""
    used = number_pointers(pointers, table.place)
    unique = _keyed(table.columns.sparse, *take_bags(table.columns.ids, table.columns.lists, used), len(used))
    return InverseJagged(unique=unique, inverse=torch.from_numpy(pointers))


def _history(name: str, table: GroupValues, pointers: NDArray[np.int32]) -> InverseJagged:
    used = number_pointers(pointers, table.place)
    start, length, values = (torch.from_numpy(part) for part in join_windows(table.columns.lists[0], used))
    unique = JaggedWindows(key=name, values=values, start=start, length=length)
    return InverseJagged(unique=unique, inverse=torch.from_numpy(pointers))
