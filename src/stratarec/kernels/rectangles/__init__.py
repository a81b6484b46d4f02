"""Copy rectangles between flat arrays: what is packed for other processes, and unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.rectangles import cpu

Parts = NDArray[np.int64]
"""``[P, 6]``: rows, width, and of both arrays the first element and the elements from one row to the next."""


def parts_of(rectangles: Sequence[tuple[int, int, int, int, int, int]]) -> Parts:
    """From tuples."""
    return np.array(rectangles, dtype=np.int64).reshape(-1, 6)


def swapped(parts: Parts) -> Parts:
    """The same rectangles for copies the other way."""
    return parts[:, [0, 1, 4, 5, 2, 3]]


def copy_parts(source: Tensor, target: Tensor, parts: Parts) -> None:
    """Copy every rectangle of `source` to its place in `target`.

    Parameters
    ----------
    source, target : Tensor
        float32, contiguous, of any shape.
    parts : ndarray
        Rectangles of the target do not overlap; places are not checked.
    """
    cpu.copy_parts(source.view(-1).numpy(), target.view(-1).numpy(), parts)
