"""Vectors that the samples of a run share: which they are, and how they become each sample's.

Shapes: B samples, R runs, F features, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratarec.kernels import runs
from stratarec.kernels.runtime.accelerator import beside
from stratarec.models.request import Request


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Which of a batch's vectors are the same for all samples of a run; of those, row r is run r's.

    Parameters
    ----------
    starts : Tensor
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``.
    shared : tuple of bool
        ``[F]``.
    """

    starts: Tensor
    shared: tuple[bool, ...]

    @classmethod
    def of(cls, request: Request, keys: Sequence[str]) -> Runs | None:
        """The runs of the pooled features `keys`; None where none is shared."""
        if request.starts is None:
            return None
        return cls(starts=request.starts, shared=tuple(key in request.shared for key in keys))

    def expand(self, vectors: Tensor) -> Tensor:
        """``[B, F, D]`` of which every vector is its sample's; the memory of `vectors` may be overwritten."""
        width = vectors.shape[2]
        spans = [(place * width, width) for place, shared in enumerate(self.shared) if shared]
        columns = runs.RunColumns(vectors[0].numel(), spans, self.starts)
        out: Tensor = _Expand.apply(vectors.flatten(1), columns)  # type: ignore[no-untyped-call]
        return out.view(vectors.shape)

    def split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors that are each sample's own, ``[B, F_o, D]``, and those of runs, ``[R, F_s, D]``."""
        places = [[place for place, shared in enumerate(self.shared) if shared is of] for of in (False, True)]
        return chosen(vectors, places[0]), chosen(vectors[: self.starts.numel() - 1], places[1])

    def repeat(self, rows: Tensor) -> Tensor:
        """``[B, ...]`` of rows of runs, ``[R, ...]``."""
        lengths = self.starts.diff()
        if rows.device.type == "cpu":
            return rows.repeat_interleave(lengths, dim=0)
        return rows.index_select(0, beside(torch.repeat_interleave(torch.arange(len(lengths)), lengths), rows))

    def beside(self, others: int) -> Runs:
        """The same runs with `others` more vectors behind, which are not shared."""
        return Runs(starts=self.starts, shared=(*self.shared, *[False] * others))


def chosen(vectors: Tensor, places: Sequence[int]) -> Tensor:
    """``[B, n, ...]`` of ``[B, F, ...]``: those at `places`."""
    if vectors.device.type == "cpu":
        return vectors[:, list(places)]
    # A list as an index would go up by a copy that the host waits for.
    return vectors.index_select(1, beside(torch.tensor(places, dtype=torch.int64), vectors))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, spans: runs.RunColumns) -> Tensor:
        ctx.spans = spans
        # Overwritten memory under a new tensor: autograd refuses an output of a function that is changed in place, and
        # the lookup keeps nothing of it for its backward.
        return spans.expand(pooled).data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.spans.fold(gradient.float()), None
