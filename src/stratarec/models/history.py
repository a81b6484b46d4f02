"""Unpooled histories of a batch, looked up once for each event; histories that overlap share these rows.

Shapes: B samples, U distinct histories, E their events, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stratarec.batch.jagged import offsets_of
from stratarec.kernels import runs
from stratarec.kernels.attention import Pairs
from stratarec.kernels.runtime.accelerator import beside


@dataclass(frozen=True, kw_only=True)
class HistoryWindows:
    """Which rows of an unpooled feature a history is: ``rows[start[u]:start[u] + length[u]]``.

    Parameters
    ----------
    start, length : Tensor
        ``[U]`` int64.
    inverse : Tensor or None
        ``[B]``, the history of each sample; None where U is B.
    """

    start: Tensor
    length: Tensor
    inverse: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class History:
    """The rows of a batch's histories, those of overlapping ones once.

    Parameters
    ----------
    rows : Tensor
        ``[E, D]``.
    windows : Windows
        Which of them each history is.
    """

    rows: Tensor
    windows: HistoryWindows

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[U, L, D]`` rows, zeros behind each history, and their mask ``[U, L]``."""
        start, length = self.windows.start, self.windows.length
        longest = max(int(length.max()) if len(length) else 0, 1)
        rows: Tensor = _Gather.apply(self.rows, start, length, longest)  # type: ignore[no-untyped-call]
        return rows, beside(torch.arange(longest) < length.unsqueeze(1), rows)

    @cached_property
    def pairs(self) -> Pairs:
        """Every sample with every event of its history."""
        start, length = self.windows.start, self.windows.length
        if self.windows.inverse is not None:
            start, length = start[self.windows.inverse], length[self.windows.inverse]
        return Pairs(first=start, offsets=offsets_of(length))

    def expand(self, vectors: Tensor) -> Tensor:
        """``[B, D]`` from one vector a history ``[U, D]``; gradients are summed in ascending order of samples."""
        if self.windows.inverse is None:
            return vectors
        out: Tensor = _Rows.apply(vectors, self.windows.inverse)  # type: ignore[no-untyped-call]
        return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse, ctx.rows = inverse, values.shape[0]
        return values.index_select(0, beside(inverse, values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return runs.sum_rows(gradient.float(), ctx.inverse, ctx.rows).to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
        ctx.windows, ctx.values = (start, length), rows.shape[0]
        return runs.gather_windows(rows, start, length, longest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start, length = ctx.windows
        return runs.scatter_windows(gradient.float(), start, length, ctx.values), None, None, None
