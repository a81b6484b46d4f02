"""Copies of rectangles in plain torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.parts import Parts


def copy_parts(source: Tensor, target: Tensor, parts: Parts) -> None:
    """`parts.copy_parts`, a rectangle at a time."""
    for rows, width, at, at_stride, to, to_stride in parts.tolist():
        found = source.view(-1).as_strided((rows, width), (at_stride, 1), at)
        target.view(-1).as_strided((rows, width), (to_stride, 1), to).copy_(found)


def scatter_parts(source: Tensor, target: Tensor, parts: Parts, picks: NDArray[np.int64]) -> None:
    """`parts.scatter_parts`, a row at a time."""
    done = 0
    for rows, width, at, at_stride, to, to_stride in parts.tolist():
        for row, pick in enumerate(picks[done : done + rows].tolist()):
            first = to + pick * to_stride
            target.view(-1)[first : first + width] = source.view(-1)[at + row * at_stride :][:width]
        done += rows
