"""Where floats lie in a message between ranks, and where in the arrays of whoever packs or unpacks it.

An owner answers a batch by rows; the same places, read the other way, are where gradients come back to. So one
`MessageLayout` on each side describes both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stratarec.distributed.wire import Span, Wire
from stratarec.kernels.rectangles import Parts, copy_parts, parts_of, swapped


class Rectangle(NamedTuple):
    """Floats of an array and where they lie in the message; the order of fields is that of `kernels.parts.Parts`."""

    rows: int
    width: int
    first: int
    """In the array, and `stride` from one row to the next."""
    stride: int
    at: int
    """In the message, whose rows lie one after another."""
    at_stride: int


class MessageLayout:
    """One rank's side of an exchange of floats, made once a batch.

    `begin` opens the part of the next rank, `add` appends to it; arrays are known by their numbers.

    Parameters
    ----------
    arrays : int
        How many there are.
    """

    def __init__(self, arrays: int) -> None:
        self._rectangles: list[list[Rectangle]] = [[] for _ in range(arrays)]
        self._spans: list[list[Span]] = []
        self._parts: list[Parts] | None = None
        self.floats = 0

    def begin(self) -> None:
        """What is added from now on is for, or from, the next rank."""
        self._spans.append([])

    def add(self, array: int, rows: int, width: int, first: int, stride: int) -> None:
        """A rectangle of an array whose first float is `first`, `stride` floats from one row to the next."""
        # Empty ones would be copies of nothing, one for each rank and stream.
        if rows:
            self._rectangles[array].append(Rectangle(rows, width, first, stride, self.floats, width))
            self._spans[-1].append(Span(rows, width))
            self.floats += rows * width

    def sizes(self, wire: Wire) -> list[int]:
        """Bytes for, or from, each rank."""
        return [wire.bytes_of(spans) for spans in self._spans]

    @property
    def spans(self) -> list[Span]:
        """All rows in the order of the message."""
        return [span for spans in self._spans for span in spans]

    def pack(self, arrays: Sequence[Tensor]) -> Tensor:
        """Flat float32 message from the arrays."""
        # Not zeroed: rectangles cover it.
        message = torch.empty(self.floats)
        for array, parts in zip(arrays, self._copies(), strict=True):
            copy_parts(array, message, parts)
        return message

    def unpack(self, message: Tensor, arrays: Sequence[Tensor]) -> None:
        """Fill the arrays from a message."""
        for array, parts in zip(arrays, self._copies(), strict=True):
            copy_parts(message, array, swapped(parts))

    def _copies(self) -> list[Parts]:
        if self._parts is None:
            self._parts = [parts_of(rectangles) for rectangles in self._rectangles]
        return self._parts
