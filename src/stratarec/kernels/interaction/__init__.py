"""DLRM's interaction (Naumov et al. 2019): the dot products of all pairs of a sample's vectors, as one operation.

Neither the joined vectors nor the full square of products is ever in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.kernels.interaction import cpu
from stratarec.kernels.interaction.reference import dot_interaction as _reference
from stratarec.kernels.memory import RECYCLER
from stratarec.kernels.team import launcher
from stratarec.kernels.threads import use_torch_threads
from stratarec.kernels.vector import blocks


def dot_interaction(dense: Tensor | None, pooled: Tensor) -> Tensor:
    """The dense vector, then the products of all pairs.

    Parameters
    ----------
    dense : Tensor or None
        ``[B, D]``, the bottom MLP's output.
    pooled : Tensor
        ``[B, F, D]`` embeddings, contiguous.

    Returns
    -------
    Tensor
        ``[B, D + V (V - 1) / 2]`` float32 with V = F + 1; without `dense` V = F and no copy in front. Pairs
        (i, j), j < i, lie in the order of the lower triangle, the dense vector being number 0.

    Raises
    ------
    ConfigError
        When widths or batch sizes differ.
    """
    if pooled.ndim != 3 or (dense is not None and dense.shape != (pooled.shape[0], pooled.shape[2])):
        got = None if dense is None else tuple(dense.shape)
        raise ConfigError(
            f"dot_interaction got dense {got} and pooled {tuple(pooled.shape)}, expected [B, D], [B, F, D]"
        )
    if torch.compiler.is_exporting() or pooled.device.type != "cpu":
        return _reference(dense, pooled)
    out: Tensor = _Interaction.apply(dense, pooled)  # type: ignore[no-untyped-call]
    return out


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().view(-1).numpy()


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor | None, pooled: Tensor) -> Tensor:
        batch, features, width = pooled.shape
        first = int(dense is not None)
        vectors = features + first
        columns = first * width + vectors * (vectors - 1) // 2
        flat = _flat(pooled)
        front = flat[:0] if dense is None else _flat(dense)
        out = RECYCLER.empty(batch, columns)
        cpu.kernels(*blocks(width)).forward(
            launcher(), use_torch_threads(), front, flat, first, batch, vectors, width, out.view(-1).numpy(), columns
        )
        ctx.saved = (front, flat, None if dense is None else dense.dtype, pooled.dtype)
        ctx.shape = (first, batch, features, vectors, width, columns)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        front, flat, dense_type, pooled_type = ctx.saved
        first, batch, features, vectors, width, columns = ctx.shape
        dense_out = torch.empty(batch * first, width)
        pooled_out = RECYCLER.empty(batch, features, width)
        cpu.kernels(*blocks(width)).backward(
            launcher(), use_torch_threads(), front, flat, first, batch, vectors, width, _flat(gradient), columns,
            dense_out.view(-1).numpy(), pooled_out.view(-1).numpy(),
        )  # fmt: skip
        return (dense_out.to(dense_type) if first else None), pooled_out.to(pooled_type)
