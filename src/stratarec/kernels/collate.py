"""Build batches from stored columns: gather rows, number pointers, join windows and bags.

The kernels run on one thread, the thread of the loader. Row numbers, pointers and windows come from
files whose content was checked.

Shapes: B samples, U distinct values, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.simd.prefetch import prefetch

if TYPE_CHECKING:
    from torch import Tensor

_NO_ROWS, _NO_PLACES = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)


def spread_rows(
    words: NDArray[np.int32], rows: NDArray[Any], *, paired: bool, ids: int, room: int = 0
) -> tuple[NDArray[np.int32], bool]:
    """Gather rows and return them column by column.

    Parameters
    ----------
    words : ndarray
        ``[M, W]`` int32, C-contiguous.
    rows : ndarray
        ``[B]`` integers in [0, M), not checked.
    paired : bool
        Whether the first two columns are the halves of a 64-bit number, which stay side by side.
    ids : int
        Number of id columns, which are the last columns.
    room : int
        Number of unused words to append to the result.

    Returns
    -------
    tuple
        ``[W * B + room]`` words, and whether any id is missing (negative).
    """
    width = words.shape[1]
    out = np.empty(width * len(rows) + room, dtype=np.int32)
    return out, bool(_spread_rows(words.reshape(-1), width, rows, paired, ids, out))


def fill_segments(
    words: NDArray[np.int32], column: int, values: NDArray[np.int32], sizes: NDArray[np.int32]
) -> None:
    """Set column number `column` of C-contiguous `words` ``[M, W]``.

    The first ``sizes[0]`` rows get ``values[0]``, the next ``sizes[1]`` rows ``values[1]``, and so
    on for all M rows.
    """
    _fill_segments(words.reshape(-1), words.shape[1], column, values, sizes)


def order_segments(starts: NDArray[np.int64], chosen: NDArray[np.int64], size: int) -> NDArray[np.int32]:
    """Return the positions of all segments, concatenated in the order `chosen`.

    Segment r has the positions ``starts[r]:starts[r + 1]``, and the last segment ends at `size`.
    """
    places = np.empty(size, dtype=np.int32)
    _order_segments(starts, chosen, size, places)
    return places


def scatter_rows(
    matrix: NDArray[np.float32], rows: NDArray[Any], out: NDArray[np.float32], places: Any
) -> None:
    """Set ``out[i, places[j]] = matrix[rows[i], j]``, C-contiguous, without checking indices."""
    _scatter_rows(matrix.reshape(-1), matrix.shape[1], rows, out.reshape(-1), out.shape[1], places)


def number_pointers(pointers: NDArray[np.int32], place: NDArray[np.int32]) -> NDArray[np.int32]:
    """Replace pointers in place by numbers in the order of their first appearance; return the
    distinct pointers.

    Parameters
    ----------
    pointers : ndarray
        ``[B]`` row numbers in [0, len(place)).
    place : ndarray
        Scratch that is filled with -1 before and after the call.
    """
    used = np.empty(min(len(pointers), len(place)), dtype=np.int32)
    return used[: _number_pointers(pointers, place, used)]


@dataclass(frozen=True, kw_only=True)
class Lists:
    """List column: row r has the values ``values[start[r]:start[r] + length[r]]``; rows may
    overlap.

    `values` are ``[N]`` int32 ids, or float32 weights of ids.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    values: NDArray[Any]

    def ids(self, rows: NDArray[Any]) -> int:
        """Return the total number of ids in `rows`."""
        return int(_total_length(self.length, rows))


def take_bags(
    ids: NDArray[np.int32], lists: Sequence[Lists], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Return the bags of some rows, first the bags of each column of `ids`, then the bags of each
    of `lists`.

    Parameters
    ----------
    ids : ndarray
        ``[M, W]`` int32, C-contiguous; a negative id is missing, and its bag is empty.
    lists : sequence of Lists
        Columns of M rows each.
    rows : ndarray
        ``[B]`` integers in [0, M), not checked.

    Returns
    -------
    tuple of ndarray
        ``[N]`` ids, and ``[(W + len(lists)) * B + 1]`` offsets or None if every bag holds one id.
    """
    values, missing = spread_rows(
        ids, rows, paired=False, ids=ids.shape[1], room=sum(part.ids(rows) for part in lists)
    )
    return end_bags(values, ids.shape[1], missing, lists, rows)


def end_bags(
    values: NDArray[np.int32], width: int, missing: bool, lists: Sequence[Lists], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
    """Add the ids of lists to the gathered ids of single columns, and return the bags in the form
    of `take_bags`.

    Parameters
    ----------
    values : ndarray
        ``[width * B + room]`` int32: the ids of the columns, then room for the ids of all lists.
    width : int
        Number of columns of single ids.
    missing : bool
        Whether any of these ids is negative, so that its bag is empty.
    lists, rows : sequence of Lists, ndarray
        Columns with lists, and the B rows to take from them, as in `take_bags`.
    """
    if not missing and not lists:
        return values, None
    size = len(rows)
    offsets = np.empty((width + len(lists)) * size + 1, dtype=np.int64)
    end = _end_bags(values, width * size, missing, offsets)
    for place, part in enumerate(lists, width):
        end = _append_lists(
            part.start, part.length, part.values, rows, values, end, offsets, place * size + 1
        )
    return values[:end], offsets


def take_weights(
    lists: Sequence[Lists | None], rows: NDArray[Any], offsets: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the weight of each id of the bags that `end_bags` built, ``[N]`` float32; ids without
    a weight have 1.

    Parameters
    ----------
    lists : sequence of Lists or None
        Weights of each list column, or None for a column without weights. Bags of list columns
        follow all others.
    rows : ndarray
        ``[B]`` rows from which the bags were built.
    offsets : ndarray
        Offsets from `end_bags`.
    """
    weights = np.ones(int(offsets[-1]), dtype=np.float32)
    first = len(offsets) - 1 - len(lists) * len(rows)
    for place, part in enumerate(lists):
        begin = first + place * len(rows)
        if part is not None:
            # This writes offsets again, with the same values, because weights have the layout of
            # their ids.
            _append_lists(
                part.start, part.length, part.values, rows, weights, offsets[begin], offsets, begin + 1
            )
    return weights


def join_windows(
    lists: Lists, rows: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Copy the windows in some rows of a list column; values where windows overlap are copied once.

    Parameters
    ----------
    lists : Lists
        The column.
    rows : ndarray
        ``[U]`` integers, not checked.

    Returns
    -------
    tuple of ndarray
        Start ``[U]`` and length ``[U]`` of each window in the copied values, and these values in
        the order of the column.
    """
    start, length = lists.start[rows], lists.length[rows]
    order, moved = np.argsort(start), np.empty(len(rows), dtype=np.int64)
    values = np.empty(int(length.sum()), dtype=np.int32)
    needed = _join_windows(start, length, order, lists.values, moved, values)
    return moved, length, values[:needed]


@dataclass(frozen=True, kw_only=True)
class FeatureBags:
    """Bags of some features; bag i of feature f is ``values[start[f * bags + i]:stop[f * bags +
    i]]``.

    Parameters
    ----------
    values : ndarray
        ``[N]`` int32 or int64.
    features, bags : int
        Number of features, and number of bags of each feature.
    start, stop : ndarray or None
        ``[features * bags]`` int64; None if every bag holds one value.
    rows : ndarray or None
        ``[M]`` numbers of the bags to use of every feature, in [0, bags); None for all bags, in
        order.
    """

    values: NDArray[Any]
    features: int
    bags: int
    start: NDArray[np.int64] | None = None
    stop: NDArray[np.int64] | None = None
    rows: NDArray[Any] | None = None

    @property
    def count(self) -> int:
        """Number of bags to use of each feature."""
        return self.bags if self.rows is None else len(self.rows)

    @property
    def ids(self) -> int:
        """Number of ids in the selected bags of all features."""
        return self.features * self.count if self.start is None else int(_count_ids(self.places))

    @property
    def places(self) -> BagPlaces:
        """Fields of `BagPlaces`: everything except the values."""
        single = self.start is None or self.stop is None
        start = _NO_PLACES if self.start is None else self.start
        stop = _NO_PLACES if self.stop is None else self.stop
        rows, chosen = (_NO_ROWS, False) if self.rows is None else (self.rows, True)
        return BagPlaces(start, stop, single, rows, chosen, self.features, self.bags)


def join_bags(parts: Sequence[FeatureBags], size: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenate the features of all parts; each feature is padded with empty bags to `size` bags.

    Rows and positions are not checked, because they come from a checked group.

    Returns
    -------
    tuple of ndarray
        ``[N]`` values and ``[F * size + 1]`` int64 offsets.
    """
    values = np.empty(
        sum(part.ids for part in parts), dtype=np.result_type(*(part.values for part in parts))
    )
    offsets = np.empty(sum(part.features for part in parts) * size + 1, dtype=np.int64)
    offsets[0], place, end = 0, 1, 0
    for part in parts:
        end = _join_bags(part.values, part.places, size, offsets, place, values, end)
        place += part.features * size
    return values, offsets


def outside(places: NDArray[Any] | Tensor, limit: int) -> int:
    """Return the first index i for which ``places[i]`` is outside [0, limit), or -1."""
    if isinstance(places, np.ndarray):
        return int(_outside(places, limit))
    return outside(places.numpy(), limit) if places.is_cpu else reference_outside(places, limit)


def outside_windows(start: NDArray[Any] | Tensor, length: NDArray[Any] | Tensor, limit: int) -> int:
    """Return the first u for which the window ``start[u]:start[u] + length[u]`` is not within [0,
    limit], or -1.
    """
    if isinstance(start, np.ndarray) or isinstance(length, np.ndarray):
        return int(_outside_windows(start, length, limit))
    if start.is_cpu:
        return outside_windows(start.numpy(), length.numpy(), limit)
    return reference_outside_windows(start, length, limit)


def least_and_total(sizes: NDArray[Any]) -> tuple[int, int]:
    """Return the minimum (1 if `sizes` is empty) and the sum of integers `sizes`."""
    least, total = _least_and_total(sizes)
    return int(least), int(total)


U = np.uint64
# Number of rows by which prefetching a list precedes copying it.
AHEAD = 8


@njit(nogil=True, cache=True)
def _spread_rows(words, width, rows, paired, ids, out):
    """Write the columns of `rows` one after another; if `paired`, the first two columns stay side
    by side.

    Returns whether a number in one of the last `ids` columns is negative.
    """
    count, W, least = U(len(rows)), U(width), np.int32(0)
    front, last = U(2 if paired else 0), max(U(len(rows)), U(1)) - U(1)
    for i in range(count):
        prefetch(words, U(rows[min(i + U(2 * AHEAD), last)]) * W)
        # Sample by sample, because the words of a sample share a cache line. A gather, a copy and a
        # strided store took 2.36 ms for a batch of 8,192; one pass takes 1.48.
        source = U(rows[i]) * W
        for j in range(front):
            out[U(2) * i + j] = words[source + j]
        for j in range(front, W):
            out[j * count + i] = words[source + j]
        for j in range(W - U(ids), W):
            least = min(least, words[source + j])
    return least < 0


@njit(nogil=True, cache=True)
def _fill_segments(words, width, column, values, sizes):
    """Set a column of words to values[0] in the first sizes[0] rows, to values[1] in the next
    sizes[1], and so on.
    """
    at = U(column)
    for segment in range(len(sizes)):
        for _ in range(sizes[segment]):
            words[at] = values[segment]
            at += U(width)


@njit(nogil=True, cache=True)
def _end_bags(values, count, missing, offsets):
    """Write the offsets of `count` bags of one id each; if some ids are `missing` (negative), make
    their bags empty.

    Returns the number of ids that remain.
    """
    offsets[0] = 0
    if not missing:
        for bag in range(U(count)):
            offsets[bag + U(1)] = bag + U(1)
        return count
    end = U(0)
    for bag in range(U(count)):
        one = values[bag]
        # Without a branch: words after the last id are overwritten or cut off.
        values[end] = one
        end += U(one >= 0)
        offsets[bag + U(1)] = end
    return np.int64(end)


@njit(nogil=True, cache=True)
def _order_segments(starts, chosen, size, out):
    """Write the positions of the segments `chosen`; segment r ends where the next one begins."""
    at, last = U(0), len(starts) - 1
    for segment in chosen:
        for place in range(starts[segment], starts[segment + 1] if segment < last else size):
            out[at] = place
            at += U(1)


@njit(nogil=True, cache=True)
def _number_pointers(pointers, place, used):
    """Replace pointers by numbers in the order of first appearance; set used[number] to the
    pointer. Return the count.

    `place` is filled with -1 before and after the call.
    """
    count, number, last = 0, np.int32(-1), np.int32(-1)
    for i in range(len(pointers)):
        p = pointers[i]
        # Neighbouring samples often have the same pointer.
        if p != last:
            last, number = p, place[U(p)]
            if number < 0:
                number = np.int32(count)
                place[U(p)] = number
                used[count] = p
                count += 1
        pointers[i] = number
    for i in range(count):
        place[U(used[i])] = -1
    return count


@njit(nogil=True, cache=True)
def _scatter_rows(matrix, width, rows, out, stride, places):
    """Set out[i * stride + places[j]] = matrix[rows[i] * width + j]."""
    for i in range(len(rows)):
        source, target = U(rows[i]) * U(width), U(i) * U(stride)
        for j in range(U(width)):
            out[target + U(places[j])] = matrix[source + j]


@njit(nogil=True, cache=True)
def _append_lists(start, length, source, rows, values, at, offsets, place):
    """Append list rows as bags: their ids to `values` from `at` on, the end of each bag to
    `offsets` from `place` on.

    Returns the end of the last bag.
    """
    end, last = U(at), U(max(len(rows) - 1, 0))
    for i in range(len(rows)):
        far = U(rows[min(U(i) + U(2 * AHEAD), last)])
        prefetch(start, far)
        prefetch(length, far)
        prefetch(source, U(start[U(rows[min(U(i) + U(AHEAD), last)])]))
        row = U(rows[i])
        begin = U(start[row])
        for one in range(begin, begin + U(length[row])):
            values[end] = source[one]
            end += U(1)
        offsets[U(place) + U(i)] = end
    return np.int64(end)


@njit(nogil=True, cache=True)
def _total_length(length, rows):
    """Return the sum of length[rows]."""
    total = 0
    for i in range(len(rows)):
        total += length[U(rows[i])]
    return total


@njit(nogil=True, cache=True)
def _join_windows(start, length, order, values, moved, out):
    """Copy the values of all windows to `out` in ascending order; values where windows overlap are
    copied once.

    `order` sorts `start`. ``moved[u]`` is the start of window u in `out`. Returns the number of
    values.
    """
    stop, total = -1, 0
    for u in order:
        if length[u] == 0:
            moved[u] = 0
            continue
        begin = max(start[u], stop)
        end = max(start[u] + length[u], stop)
        # The start of the window may be among values that an earlier window has copied.
        moved[u] = total - (begin - start[u])
        for place in range(U(begin), U(end)):
            out[U(total)] = values[place]
            total += 1
        stop = end
    return total


class BagPlaces(NamedTuple):
    """Positions of bags: bag i of feature f has number ``f * bags + i``, or ``f * bags + rows[i]``
    if `chosen`.

    A bag is ``values[start:stop]``. If bags are `single`, bag number n is ``values[n]``, and
    `start` and `stop` are empty.
    """

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    single: bool
    rows: NDArray[Any]
    chosen: bool
    features: int
    bags: int


@njit(nogil=True, cache=True)
def _count_ids(places):
    """Return the number of ids in the bags that `join_bags` copies."""
    start, stop, _, rows, chosen, features, bags = places
    total, count = 0, len(rows) if chosen else bags
    for f in range(features):
        for i in range(count):
            bag = U(f * bags + (rows[i] if chosen else i))
            total += stop[bag] - start[bag]
    return total


@njit(nogil=True, cache=True)
def _join_bags(values, places, size, offsets, place, out, at):
    """Append bags to `out` from `at` on and their ends to `offsets` from `place` on; pad each
    feature to `size` bags.

    Returns the end of the last bag.
    """
    start, stop, single, rows, chosen, features, bags = places
    p, end, count = U(place), U(at), len(rows) if chosen else bags
    for f in range(features):
        for i in range(count):
            bag = U(f * bags + (rows[i] if chosen else i))
            first, last = (bag, bag + U(1)) if single else (U(start[bag]), U(stop[bag]))
            for one in range(first, last):
                out[end] = values[one]
                end += U(1)
            offsets[p] = end
            p += U(1)
        for _ in range(count, size):
            offsets[p] = end
            p += U(1)
    return np.int64(end)


# The next functions keep the interpreter lock: they take less time than releasing and taking it
# again.


@njit(cache=True)
def _outside(places, limit):
    """Return the first i for which places[i] is outside [0, limit), or -1."""
    for i in range(len(places)):
        if U(places[i]) >= U(limit):
            return i
    return -1


@njit(cache=True)
def _outside_windows(start, length, limit):
    """Return the first window that is not within [0, limit], or -1."""
    for u in range(len(start)):
        if start[u] < 0 or length[u] < 0 or length[u] > limit or start[u] > limit - length[u]:
            return u
    return -1


@njit(cache=True)
def _least_and_total(sizes):
    """Return the minimum (1 if there are no numbers) and the sum of `sizes`."""
    least, total = np.int64(sizes[0] if len(sizes) else 1), np.int64(0)
    for i in range(len(sizes)):
        least = min(least, np.int64(sizes[i]))
        total += sizes[i]
    return least, total


def reference_number_pointers(pointers: list[int]) -> tuple[list[int], list[int]]:
    """Return the number of each pointer in order of first appearance, and the distinct pointers."""
    used = list(dict.fromkeys(pointers))
    return [used.index(pointer) for pointer in pointers], used


def reference_covered(windows: list[tuple[int, int]]) -> list[int]:
    """Return the positions that at least one window (start, length) covers, ascending."""
    return sorted({place for start, length in windows for place in range(start, start + length)})


def reference_join_bags(parts: list[list[list[list[int]]]], size: int) -> list[list[int]]:
    """Concatenate bags ``parts[p][f]``; each feature is padded with empty bags to `size`."""
    return [bag for part in parts for bags in part for bag in bags + [[]] * (size - len(bags))]


def reference_outside(places: Tensor, limit: int) -> int:
    """Return the first index i for which ``places[i]`` is outside [0, limit), or -1."""
    return _first((places < 0) | (places >= limit))


def reference_outside_windows(start: Tensor, length: Tensor, limit: int) -> int:
    """Return the first window that is not within [0, limit], or -1."""
    # Do not add start and length: the sum could overflow.
    return _first((start < 0) | (length < 0) | (length > limit) | (start > limit - length))


def _first(wrong: Tensor) -> int:
    return int(wrong.int().argmax()) if wrong.any() else -1
