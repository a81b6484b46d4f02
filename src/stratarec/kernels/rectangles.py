"""Copy rectangles between flat arrays, to pack and unpack messages between processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

U = np.uint64
Parts = NDArray[np.int64]
"""``[P, 6]``, per rectangle: rows, width, then for source and target the first element and the step
between rows.
"""


def parts_of(rectangles: Sequence[tuple[int, int, int, int, int, int]]) -> Parts:
    """Return the rectangles as one array, see `Parts`."""
    return np.array(rectangles, dtype=np.int64).reshape(-1, 6)


def swapped(parts: Parts) -> Parts:
    """Return the rectangles `parts` with source and target exchanged."""
    return parts[:, [0, 1, 4, 5, 2, 3]]


def copy_parts(source: Tensor, target: Tensor, parts: Parts) -> None:
    """Copy every rectangle of `source` to its position in `target`.

    Parameters
    ----------
    source, target : Tensor
        float32, contiguous, of any shape.
    parts : ndarray
        Rectangles; they must not overlap in the target. Positions are not checked.
    """
    _copy_parts(source.view(-1).numpy(), target.view(-1).numpy(), parts)


@njit(nogil=True, cache=True)
def _copy_parts(source, target, parts):
    """Copy the rectangles `parts`, ``[P, 6]`` int64, from flat `source` to flat `target`."""
    for p in range(len(parts)):
        rows, width = U(parts[p, 0]), U(parts[p, 1])
        at = U(parts[p, 2])
        at_stride = U(parts[p, 3])
        to = U(parts[p, 4])
        to_stride = U(parts[p, 5])
        if at_stride == width and to_stride == width:
            rows, width = U(1), rows * width
        for r in range(rows):
            for d in range(width):
                target[to + r * to_stride + d] = source[at + r * at_stride + d]


def reference_copy_parts(source: Tensor, target: Tensor, parts: Parts) -> None:
    """Compute `copy_parts` in torch, one rectangle at a time."""
    for rows, width, at, at_stride, to, to_stride in parts.tolist():
        rectangle = source.view(-1).as_strided((rows, width), (at_stride, 1), at)
        target.view(-1).as_strided((rows, width), (to_stride, 1), to).copy_(rectangle)
