"""Batches cut from windows.

Pointers make a deduplicated batch without hashing: an array as long as the group's table numbers the pointers that a
batch uses, and windows that overlap are joined by sorting their starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.data.window import Columns, Table, Window
from stratarec.jagged import Batch, InverseJagged, JaggedWindows, KeyedJagged
from stratarec.kernels.batches import gather_column, join_windows, number_rows, scatter_rows, take_bags


def assemble(held: Sequence[tuple[Window, NDArray[np.int64]]], dataset: Dataset) -> Batch:
    """A batch of the given rows of one or several windows."""
    parts = [_cut(window, rows, dataset) for window, rows in held]
    return parts[0] if len(parts) == 1 else Batch.concatenate(parts)


def _cut(window: Window, rows: NDArray[np.int64], dataset: Dataset) -> Batch:
    groups = [_group(window.groups[name], rows) for name in dataset.groups if window.groups[name].columns.sparse]
    return Batch(
        label=torch.from_numpy(_gathered(window.label, rows)),
        dense=torch.from_numpy(_dense(window, rows, len(dataset.schema.dense))),
        sparse=_bags(window.samples, rows),
        groups=(*groups, *(_history(name, window.windows[name], rows) for name in dataset.windows)),
        group=None if window.user is None else torch.from_numpy(_gathered(window.user, rows)),
    )


def _gathered(column: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    found = np.empty(len(rows), dtype=column.dtype)
    gather_column(column, rows, found)
    return found


def _dense(window: Window, rows: NDArray[np.int64], features: int) -> NDArray[np.float32]:
    """``[B, features]``, those of groups too."""
    found = np.empty((len(rows), features), dtype=np.float32)
    if len(window.samples.dense_places):
        scatter_rows(window.samples.dense, rows, found, window.samples.dense_places)
    for table in window.groups.values():
        if len(table.columns.dense_places):
            scatter_rows(table.columns.dense, _gathered(table.pointers, rows), found, table.columns.dense_places)
    return found


def _bags(columns: Columns, rows: NDArray[Any]) -> KeyedJagged:
    """All sparse features of some rows."""
    values, offsets = take_bags(columns.ids, columns.lists, rows)
    return KeyedJagged(
        keys=columns.sparse,
        values=torch.from_numpy(values),
        offsets=None if offsets is None else torch.from_numpy(offsets),
        batch_size=len(rows),
    )


def _group(table: Table, rows: NDArray[np.int64]) -> InverseJagged:
    inverse, used = number_rows(table.pointers, rows, table.place)
    return InverseJagged(unique=_bags(table.columns, used), inverse=torch.from_numpy(inverse))


def _history(name: str, table: Table, rows: NDArray[np.int64]) -> InverseJagged:
    inverse, used = number_rows(table.pointers, rows, table.place)
    start, length, values = (torch.from_numpy(part) for part in join_windows(table.columns.lists[0], used))
    unique = JaggedWindows(key=name, values=values, start=start, length=length)
    return InverseJagged(unique=unique, inverse=torch.from_numpy(inverse))
