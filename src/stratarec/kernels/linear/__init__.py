"""A linear layer, with its ReLU or without, where samples of a run share some of the inputs.

The layer is linear, so the share of the common inputs is computed once a run and added to the samples'. One operation,
so that autograd neither keeps nor copies what lies between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stratarec.kernels.linear import cpu
from stratarec.kernels.linear.reference import run_linear as _reference
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size
from stratarec.kernels.simd.vector import LANES


def run_linear(
    own: Tensor, common: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
    starts: Tensor, *, relu: bool,
) -> Tensor:  # fmt: skip
    """``[B, H]``: ``x @ weight.T + bias``; in the type of autocast where that is on, else in float32.

    Parameters
    ----------
    own, common : Tensor
        ``[B, .]`` inputs of each sample, and ``[R, .]`` of each run; columns behind those of `columns` are zeros.
    weight, bias : Tensor
        ``[H, C]`` and ``[H]``, or None for no bias.
    columns : pair of Tensor
        int64: which of the C inputs `own` and `common` are.
    starts : Tensor
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``. Gradients are summed over a run's samples in
        ascending order.
    relu : bool
        Whether what is below 0 becomes 0.
    """
    if own.device.type != "cpu":
        return _reference(own, common, weight, bias, columns, starts, relu=relu)
    out: Tensor = _RunLinear.apply(own, common, weight, bias, columns, starts, relu)  # type: ignore[no-untyped-call]
    return out


# As three operations, layer, sum and ReLU, a shared first layer lost more than it gained in bfloat16: 45 ms a step
# against 33, 11 of them conversions of [8192, 256] from and to float32. As one it took 27.6 where the plain side took
# 31.1.
class _RunLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, common: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
        starts: Tensor, relu: bool,
    ) -> Tensor:  # fmt: skip
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        inputs = [own.to(kind), common.to(kind)]
        weights = [
            pad_weight(weight.index_select(1, chosen), part).to(kind)
            for chosen, part in zip(columns, inputs, strict=True)
        ]
        out = inputs[0] @ weights[0].t()
        shared = weights[1].t()
        runs = (inputs[1] @ shared if bias is None else torch.addmm(bias.to(kind), inputs[1], shared)).float()
        threads = team_threads()
        _kernels(out, relu).forward(team_of(threads), _runs(out, starts, threads), _flat(out), _flat(runs))
        ctx.save_for_backward(*inputs, *weights, out, starts)
        ctx.columns, ctx.shape, ctx.relu, ctx.biased = columns, weight.shape, relu, bias is not None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, common, own_weight, common_weight, out, starts = ctx.saved_tensors
        samples, runs = torch.empty_like(out), torch.empty(len(starts) - 1, out.shape[1])
        gradient = gradient.to(out.dtype).contiguous()
        threads = team_threads()
        _kernels(out, ctx.relu).backward(
            team_of(threads), _runs(out, starts, threads), _flat(gradient), _flat(out), _flat(samples), _flat(runs),
        )  # fmt: skip
        runs = runs.to(out.dtype)
        weight = torch.zeros(ctx.shape)
        for columns, part in zip(ctx.columns, (samples.t() @ own, runs.t() @ common), strict=True):
            weight.index_copy_(1, columns, part[:, : len(columns)].float())
        bias = samples.sum(0, dtype=torch.float32) if ctx.biased else None
        return (samples @ own_weight).float(), (runs @ common_weight).float(), weight, bias, None, None, None


def pad_weight(weight: Tensor, inputs: Tensor) -> Tensor:
    """The weight with zeros for the columns by which `inputs` is wider."""
    more = inputs.shape[1] - weight.shape[1]
    return functional.pad(weight, (0, more)) if more else weight


def _kernels(tensor: Tensor, relu: bool) -> Any:
    return cpu.kernels(1 if tensor.shape[1] % LANES else LANES, int(relu))


def _runs(out: Tensor, starts: Tensor, threads: int) -> tuple[Any, ...]:
    """`cpu.RunTiles`."""
    return starts.numpy(), out.shape[1], tile_size(len(starts) - 1, threads)


def _flat(tensor: Tensor) -> NDArray[Any]:
    """The memory of a contiguous tensor, bfloat16 as the bits that it is."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = flat.numpy()
    return array
