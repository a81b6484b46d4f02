"""Vectors of runs and windows in torch's own operations, for devices that have no kernels of ours.

None of them waits for the device: places are made on the host. Sums are in ascending order wherever `index_add` is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]


def expand(pooled: Tensor, spans: Spans, run: Tensor) -> Tensor:
    """`pooled` itself, in whose spans sample b has the row ``run[b]``."""
    for first, width in spans:
        part = pooled[:, first : first + width]
        part.copy_(part.index_select(0, run))
    return pooled


def fold(gradient: Tensor, spans: Spans, run: Tensor, runs: int) -> Tensor:
    """``[B, W]``: in the spans of the first `runs` rows the sum over the samples of each run, zeros behind them."""
    out = gradient.clone()
    for first, width in spans:
        part = out[:, first : first + width]
        sums = sum_rows(part, run, runs)
        part.zero_()
        part[:runs].copy_(sums)
    return out


def sum_rows(gradient: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """``[rows, W]``: sums over the samples of each row."""
    return gradient.new_zeros(rows, gradient.shape[1]).index_add(0, inverse, gradient)


def window_places(start: Tensor, length: Tensor, longest: int, values: int) -> Tensor:
    """``[U, longest]`` which row each place of a window is; `values`, one more than there are, behind it."""
    steps = torch.arange(longest)
    return torch.where(steps < length.unsqueeze(1), start.unsqueeze(1) + steps, values)


def gather_windows(rows: Tensor, places: Tensor) -> Tensor:
    """``[U, longest, D]`` with zeros behind each window."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[places]


def scatter_windows(gradient: Tensor, places: Tensor, values: int) -> Tensor:
    """``[values, D]``: sums over the windows that cover each value."""
    return sum_rows(gradient.flatten(0, 1), places.flatten(), values + 1)[:values]
