"""Batches of stored columns: ids side by side as bags, pointers as inverse maps, windows that share their values.

Shapes: B samples, U distinct values, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.batches import cpu

_NO_ROWS = np.zeros(0, dtype=np.int32)


def gather_column(column: NDArray[Any], rows: NDArray[Any], out: NDArray[Any]) -> None:
    """``out[i] = column[rows[i]]``. Rows are not checked: the caller's are those of the column."""
    cpu.gather_column(column, rows, out)


def scatter_rows(matrix: NDArray[np.float32], rows: NDArray[Any], out: NDArray[np.float32], places: Any) -> None:
    """``out[i, places[j]] = matrix[rows[i], j]`` for C-contiguous matrices; neither rows nor places are checked."""
    cpu.scatter_rows(matrix.reshape(-1), matrix.shape[1], rows, out.reshape(-1), out.shape[1], places)


def number_rows(
    pointers: NDArray[np.int32], rows: NDArray[Any], place: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``pointers[rows]`` as numbers by first appearance, and the distinct pointers; an array look-up each, no hashing.

    Parameters
    ----------
    pointers : ndarray
        In [0, len(place)).
    rows : ndarray
        ``[B]`` places in `pointers`, not checked.
    place : ndarray
        Scratch full of -1, which it is again afterwards.
    """
    inverse, used = np.empty(len(rows), dtype=np.int32), np.empty(min(len(rows), len(place)), dtype=np.int32)
    return inverse, used[: cpu.number_rows(pointers, rows, place, inverse, used)]


@dataclass(frozen=True, kw_only=True)
class Lists:
    """A list column: row r holds ``values[start[r]:start[r] + length[r]]``; rows may overlap."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    values: NDArray[np.int32]

    def ids(self, rows: NDArray[Any]) -> int:
        """How many ids `rows` hold together."""
        return int(cpu.total_length(self.length, rows))


def take_bags(
    ids: NDArray[np.int32], lists: Sequence[Lists], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Bags of some rows: those of each column of `ids`, then those of each of `lists`.

    Parameters
    ----------
    ids : ndarray
        ``[M, W]`` int32, C-contiguous; a negative one is missing, and its bag is empty.
    lists : sequence of Lists
        Of M rows each.
    rows : ndarray
        ``[B]`` integers in [0, M), not checked.

    Returns
    -------
    tuple of ndarray
        ``[N]`` ids and ``[(W + len(lists)) * B + 1]`` offsets; None for those where every bag holds one id.
    """
    width, size = ids.shape[1], len(rows)
    values = np.empty(width * size + sum(part.ids(rows) for part in lists), dtype=np.int32)
    offsets = np.empty((width + len(lists)) * size + 1, dtype=np.int64)
    end = cpu.append_ids(ids.reshape(-1), width, rows, values, offsets, bool(lists))
    if not lists and end == len(values):
        return values, None
    for place, part in enumerate(lists, width):
        end = cpu.append_lists(part.start, part.length, part.values, rows, values, end, offsets, place * size + 1)
    return values[:end], offsets


def join_windows(lists: Lists, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """The windows `rows` with what they overlap in once.

    Returns
    -------
    tuple of ndarray
        Start ``[U]`` and length ``[U]`` of each window; the values that they need, in ascending order of place.
    """
    start, length = lists.start[rows], lists.length[rows]
    order, moved = np.argsort(start), np.empty(len(rows), dtype=np.int64)
    values = np.empty(int(length.sum()), dtype=np.int32)
    needed = cpu.join_windows(start, length, order, lists.values, moved, values)
    return moved, length, values[:needed]


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Bags of some features: bag (f, i) is ``values[start[f * bags + i]:stop[f * bags + i]]``.

    Parameters
    ----------
    values : ndarray
        ``[N]`` int32 or int64.
    start, stop : ndarray
        ``[features * bags]`` int64.
    features, bags : int
        Their numbers.
    rows : ndarray or None
        ``[M]`` integers in [0, bags): which bags of every feature are meant; None for all, in order.
    """

    values: NDArray[Any]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    features: int
    bags: int
    rows: NDArray[Any] | None = None

    @property
    def count(self) -> int:
        """Bags a feature."""
        return self.bags if self.rows is None else len(self.rows)


def join_bags(parts: Sequence[Bags], size: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Features of all parts one after another, each with `size` bags, those behind its own empty.

    Neither rows nor places are checked: they are those of a checked group.

    Returns
    -------
    tuple of ndarray
        ``[N]`` values and ``[F * size + 1]`` int64 offsets.
    """
    offsets = np.empty(sum(part.features for part in parts) * size + 1, dtype=np.int64)
    offsets[0], place, ends = 0, 1, [0]
    for part in parts:
        given = (part.start, part.stop, *_rows(part), part.count, part.features, part.bags)
        ends.append(cpu.join_offsets(*given, size, offsets, place, ends[-1]))
        place += part.features * size
    values = np.empty(ends[-1], dtype=np.result_type(*(part.values for part in parts)))
    for part, first in zip(parts, ends, strict=False):
        given = (part.start, part.stop, *_rows(part), part.count, part.features, part.bags)
        cpu.join_values(part.values, *given, values, first)
    return values, offsets


def _rows(part: Bags) -> tuple[NDArray[Any], bool]:
    return (_NO_ROWS, False) if part.rows is None else (part.rows, True)


def outside(places: NDArray[Any], limit: int) -> int:
    """The first index at which a place is not in [0, limit), or -1."""
    return int(cpu.outside(places, limit))


def outside_windows(start: NDArray[np.int64], length: NDArray[np.int64], limit: int) -> int:
    """The first window ``start[u]:start[u] + length[u]`` that does not lie in [0, limit], or -1."""
    return int(cpu.outside_windows(start, length, limit))
