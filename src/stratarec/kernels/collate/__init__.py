"""Batches of stored columns: ids side by side as bags, pointers as inverse maps, windows that share their values.

Shapes: B samples, U distinct values, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.collate import cpu, reference

_NO_ROWS, _NO_PLACES = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)


def spread_rows(
    words: NDArray[np.int32], rows: NDArray[Any], *, paired: bool, ids: int, room: int = 0
) -> tuple[NDArray[np.int32], bool]:
    """Some rows, column by column.

    Parameters
    ----------
    words : ndarray
        ``[M, W]`` int32, C-contiguous.
    rows : ndarray
        ``[B]`` integers in [0, M), not checked.
    paired : bool
        Keep the first two columns side by side: they are the halves of a number.
    ids : int
        How many columns at the end are ids.
    room : int
        Words to leave behind them.

    Returns
    -------
    tuple
        ``[W * B + room]`` words, and whether an id is negative: missing.
    """
    width = words.shape[1]
    found = np.empty(width * len(rows) + room, dtype=np.int32)
    return found, bool(cpu.spread_rows(words.reshape(-1), width, rows, paired, ids, found))


def fill_runs(words: NDArray[np.int32], column: int, values: NDArray[np.int32], sizes: NDArray[np.int32]) -> None:
    """Set a column of `words` ``[M, W]``, C-contiguous: ``values[r]`` in the next ``sizes[r]`` rows, M in all."""
    cpu.fill_runs(words.reshape(-1), words.shape[1], column, values, sizes)


def order_runs(starts: NDArray[np.int64], chosen: NDArray[np.int64], size: int) -> NDArray[np.int32]:
    """``[size]`` places of all runs in the order `chosen`; run r is ``starts[r]:starts[r + 1]``, the last to `size`."""
    found = np.empty(size, dtype=np.int32)
    cpu.order_runs(starts, chosen, size, found)
    return found


def scatter_rows(matrix: NDArray[np.float32], rows: NDArray[Any], out: NDArray[np.float32], places: Any) -> None:
    """``out[i, places[j]] = matrix[rows[i], j]`` for C-contiguous matrices; neither rows nor places are checked."""
    cpu.scatter_rows(matrix.reshape(-1), matrix.shape[1], rows, out.reshape(-1), out.shape[1], places)


def number_pointers(pointers: NDArray[np.int32], place: NDArray[np.int32]) -> NDArray[np.int32]:
    """Turn pointers into numbers by first appearance, in place; returns the distinct pointers. Nothing is hashed.

    Parameters
    ----------
    pointers : ndarray
        ``[B]`` in [0, len(place)).
    place : ndarray
        Scratch full of -1, which it is again afterwards.
    """
    used = np.empty(min(len(pointers), len(place)), dtype=np.int32)
    return used[: cpu.number_pointers(pointers, place, used)]


@dataclass(frozen=True, kw_only=True)
class Lists:
    """A list column: row r holds ``values[start[r]:start[r] + length[r]]``; rows may overlap."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    values: NDArray[Any]
    """``[N]`` int32 ids, or float32 weights of ids."""

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
    values, missing = spread_rows(ids, rows, paired=False, ids=ids.shape[1], room=sum(part.ids(rows) for part in lists))
    return end_bags(values, ids.shape[1], missing, lists, rows)


def end_bags(
    values: NDArray[np.int32], width: int, missing: bool, lists: Sequence[Lists], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """What `take_bags` gives, from the ids of `width` columns that lie in `values`, with room for the lists."""
    if not missing and not lists:
        return values, None
    size = len(rows)
    offsets = np.empty((width + len(lists)) * size + 1, dtype=np.int64)
    end = cpu.end_bags(values, width * size, missing, offsets)
    for place, part in enumerate(lists, width):
        end = cpu.append_lists(part.start, part.length, part.values, rows, values, end, offsets, place * size + 1)
    return values[:end], offsets


def take_weights(lists: Sequence[Lists | None], rows: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """``[N]`` the weight of each id of the bags that `end_bags` made of `rows`; 1 where there is none.

    Parameters
    ----------
    lists : sequence of Lists or None
        Of each list column, which are the last of the bags.
    offsets : ndarray
        What `end_bags` gave.
    """
    found = np.ones(int(offsets[-1]), dtype=np.float32)
    first = len(offsets) - 1 - len(lists) * len(rows)
    for place, part in enumerate(lists):
        begin = first + place * len(rows)
        if part is not None:
            # The ends of bags are written again as they are: weights lie as their ids do.
            cpu.append_lists(part.start, part.length, part.values, rows, found, offsets[begin], offsets, begin + 1)
    return found


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
class FeatureBags:
    """Bags of some features: bag (f, i) is ``values[start[f * bags + i]:stop[f * bags + i]]``.

    Parameters
    ----------
    values : ndarray
        ``[N]`` int32 or int64.
    features, bags : int
        Their numbers.
    start, stop : ndarray or None
        ``[features * bags]`` int64; None where every bag holds one value.
    rows : ndarray or None
        ``[M]`` integers in [0, bags): which bags of every feature are meant; None for all, in order.
    """

    values: NDArray[Any]
    features: int
    bags: int
    start: NDArray[np.int64] | None = None
    stop: NDArray[np.int64] | None = None
    rows: NDArray[Any] | None = None

    @property
    def count(self) -> int:
        """Bags a feature."""
        return self.bags if self.rows is None else len(self.rows)

    @property
    def ids(self) -> int:
        """Ids in all of them."""
        return self.features * self.count if self.start is None else int(cpu.count_ids(self.places))

    @property
    def places(self) -> cpu.BagPlaces:
        """All but the values, as kernels take them."""
        single = self.start is None or self.stop is None
        start = _NO_PLACES if self.start is None else self.start
        stop = _NO_PLACES if self.stop is None else self.stop
        rows, chosen = (_NO_ROWS, False) if self.rows is None else (self.rows, True)
        return cpu.BagPlaces(start, stop, single, rows, chosen, self.features, self.bags)


def join_bags(parts: Sequence[FeatureBags], size: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Features of all parts one after another, each with `size` bags, those behind its own empty.

    Neither rows nor places are checked: they are those of a checked group.

    Returns
    -------
    tuple of ndarray
        ``[N]`` values and ``[F * size + 1]`` int64 offsets.
    """
    values = np.empty(sum(part.ids for part in parts), dtype=np.result_type(*(part.values for part in parts)))
    offsets = np.empty(sum(part.features for part in parts) * size + 1, dtype=np.int64)
    offsets[0], place, end = 0, 1, 0
    for part in parts:
        end = cpu.join_bags(part.values, part.places, size, offsets, place, values, end)
        place += part.features * size
    return values, offsets


def outside(places: NDArray[Any] | Tensor, limit: int) -> int:
    """The first index at which a place is not in [0, limit), or -1."""
    if not isinstance(places, Tensor):
        return int(cpu.outside(places, limit))
    return outside(places.numpy(), limit) if places.is_cpu else reference.outside(places, limit)


def outside_windows(start: NDArray[Any] | Tensor, length: NDArray[Any] | Tensor, limit: int) -> int:
    """The first window ``start[u]:start[u] + length[u]`` that does not lie in [0, limit], or -1."""
    if not isinstance(start, Tensor) or not isinstance(length, Tensor):
        return int(cpu.outside_windows(start, length, limit))
    if start.is_cpu:
        return outside_windows(start.numpy(), length.numpy(), limit)
    return reference.outside_windows(start, length, limit)


def least_and_total(sizes: NDArray[Any]) -> tuple[int, int]:
    """The least of some integers, 1 where there is none, and their sum."""
    least, total = cpu.least_and_total(sizes)
    return int(least), int(total)
