"""What one portion of an epoch gives to each batch: rows of its shuffle buffers, of which one is read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratarec.data.portions import Piece
from stratarec.data.shuffling import ShuffleBuffer

Rows: TypeAlias = list[tuple[ShuffleBuffer, NDArray[np.int32]]]


def parts(
    buffers: Sequence[Sequence[Piece]],
    read: Callable[[int], ShuffleBuffer],
    thread: Executor,
    *,
    size: int,
    start: int,
) -> Iterator[Rows]:
    """`size` rows at a time, the last time what is left; parts before number `start` are left out.

    Parameters
    ----------
    buffers : sequence of sequence of Piece
        What each shuffle buffer holds; those wholly before `start` are not read.
    read : callable
        Makes one of them by its number.
    thread : Executor
        Calls `read`.
    """
    ends = np.cumsum([sum(piece.last - piece.first for piece in buffer) for buffer in buffers])
    position = start * size
    first = int(np.searchsorted(ends, position, side="right"))
    ahead: Future[ShuffleBuffer] | None = None
    held: Rows = []
    for number in range(first, len(buffers)):
        buffer = (ahead or thread.submit(read, number)).result()
        ahead = thread.submit(read, number + 1) if number + 1 < len(buffers) else None
        begin = position - (int(ends[number]) - len(buffer.order)) if number == first else 0
        held.append((buffer, buffer.order[begin:]))
        while count(held) >= size:
            yield take(held, size)
        held = [(buffer, rows) for buffer, rows in held if len(rows)]
    if held:
        yield held


def count(held: Rows) -> int:
    """How many rows these are."""
    return sum(len(rows) for _, rows in held)


def between(held: Rows, first: int, last: int) -> Rows:
    """Rows `first` to `last` (not included) of `held`."""
    found, begin = [], 0
    for buffer, rows in held:
        found.append((buffer, rows[max(first - begin, 0) : max(last - begin, 0)]))
        begin += len(rows)
    return [(buffer, rows) for buffer, rows in found if len(rows)]


def take(held: Rows, size: int) -> Rows:
    """Take `size` rows off the front of `held`."""
    taken = []
    for place, (buffer, rows) in enumerate(held):
        found = min(size, len(rows))
        taken.append((buffer, rows[:found]))
        held[place] = (buffer, rows[found:])
        size -= found
    return [(buffer, rows) for buffer, rows in taken if len(rows)]
