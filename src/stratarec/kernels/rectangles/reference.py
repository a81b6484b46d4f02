"""Copies of rectangles in plain torch."""

from __future__ import annotations

from torch import Tensor

from stratarec.kernels.rectangles import Parts


def copy_parts(source: Tensor, target: Tensor, parts: Parts) -> None:
    """`parts.copy_parts`, a rectangle at a time."""
    for rows, width, at, at_stride, to, to_stride in parts.tolist():
        found = source.view(-1).as_strided((rows, width), (at_stride, 1), at)
        target.view(-1).as_strided((rows, width), (to_stride, 1), to).copy_(found)
