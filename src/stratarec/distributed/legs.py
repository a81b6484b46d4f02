"""Where floats lie in a message between ranks, and where in the arrays of whoever packs or unpacks it.

An owner answers a batch by rows; the same places, read the other way, are where gradients come back to. So one `Leg` on
each side describes both directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.distributed.wire import Span, Wire
from stratarec.kernels.parts import Parts, copy_parts, parts_of, scatter_parts, swapped

Rectangle = tuple[int, int, int, int, int, int]
Picks = NDArray[np.int64]


class Leg:
    """One rank's side of an exchange of floats, made once a batch.

    `begin` opens the part of the next rank, `add` appends to it; arrays are known by their numbers.

    Parameters
    ----------
    arrays : int
        How many there are.
    """

    def __init__(self, arrays: int) -> None:
        self._rectangles: list[list[Rectangle]] = [[] for _ in range(arrays)]
        self._order: list[list[int]] = []
        self._spans: list[list[Span]] = []
        self._parts: list[Parts] | None = None
        self._picks: list[list[Picks]] = [[] for _ in range(arrays)]
        self.floats = 0

    def begin(self) -> None:
        """What is added from now on is for, or from, the next rank."""
        self._spans.append([])
        self._order.append([])

    def add(self, array: int, rows: int, width: int, first: int, stride: int, picks: Picks | None = None) -> None:
        """A rectangle of an array whose first float is `first`, `stride` floats from one row to the next.

        Parameters
        ----------
        picks : ndarray or None
            ``[rows]`` which rows from `first` on, where they are not neighbours; such a leg can only `unpack`.
        """
        if rows:
            self._rectangles[array].append((rows, width, first, stride, self.floats, width))
            self._order[-1].append(array)
            self._spans[-1].append((rows, width))
            self.floats += rows * width
            if picks is not None:
                self._picks[array].append(picks)

    def sizes(self, wire: Wire) -> list[int]:
        """Bytes for, or from, each rank."""
        return [wire.bytes_of(spans) for spans in self._spans]

    @property
    def spans(self) -> list[Span]:
        """All rows in the order of the message."""
        return [span for spans in self._spans for span in spans]

    @property
    def rows(self) -> list[int]:
        """How many are for, or from, each rank."""
        return [sum(rows for rows, _ in spans) for spans in self._spans]

    def picked(self, wanted: NDArray[np.bool_]) -> Leg:
        """Of the rows of this leg, in the order of its message, those that are `wanted`; in the same arrays."""
        places, done, counts = np.flatnonzero(wanted), [0] * len(self._rectangles), [0, *self._counts()]
        begins = np.cumsum(counts)
        cuts = np.searchsorted(places, begins).tolist()
        found, number = Leg(len(self._rectangles)), 0
        for order in self._order:
            found.begin()
            for array in order:
                _, width, first, stride, _, _ = self._rectangles[array][done[array]]
                picks = places[cuts[number] : cuts[number + 1]] - begins[number]
                found.add(array, len(picks), width, first, stride, picks)
                done[array], number = done[array] + 1, number + 1
        return found

    def _counts(self) -> list[int]:
        return [rows for rows, _ in self.spans]

    def pack(self, arrays: Sequence[Tensor]) -> Tensor:
        """Flat float32 message from the arrays."""
        message = torch.empty(self.floats)
        for array, parts in zip(arrays, self._copies(), strict=True):
            copy_parts(array, message, parts)
        return message

    def unpack(self, message: Tensor, arrays: Sequence[Tensor]) -> None:
        """Fill the arrays from a message."""
        for array, parts, picks in zip(arrays, self._copies(), self._picks, strict=True):
            if picks:
                scatter_parts(message, array, swapped(parts), np.concatenate(picks))
            else:
                copy_parts(message, array, swapped(parts))

    def _copies(self) -> list[Parts]:
        if self._parts is None:
            self._parts = [parts_of(rectangles) for rectangles in self._rectangles]
        return self._parts
