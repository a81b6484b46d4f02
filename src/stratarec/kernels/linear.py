"""Linear layer, optionally with ReLU; some inputs are shared by all samples of a run.

The layer is linear, so the product of the shared inputs is computed once a run and added to the product of each
sample's other inputs. This is a single operation, so autograd neither stores nor copies intermediate results.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import literally, njit
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size
from stratarec.kernels.simd.vector import LANES, add, load, passed, store


def run_linear(
    unshared: Tensor, shared: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
    starts: Tensor, *, relu: bool,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight.T + bias``, ``[B, H]``, where x has C inputs: unshared ones and shared ones.

    The result has autocast's type if autocast is on, otherwise it is float32.

    Parameters
    ----------
    unshared, shared : Tensor
        ``[B, .]`` inputs of each sample, and ``[R, .]`` inputs of each run; further columns, not in `columns`, are 0.
    weight, bias : Tensor
        ``[H, C]`` and ``[H]``; None for no bias.
    columns : pair of Tensor
        int64 positions, among the C inputs, of the columns of `unshared` and of the columns of `shared`.
    starts : Tensor
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``. Gradients are summed over a run's samples in
        ascending order.
    relu : bool
        Whether to apply ReLU.
    """
    out: Tensor = _RunLinear.apply(unshared, shared, weight, bias, columns, starts, relu)
    return out


# Step times in bfloat16: as three operations (layer, sum and ReLU), a first layer with shared inputs took 45 ms and a
# layer without runs 33 ms. Conversions of [8192, 256] from and to float32 took 11 of the 45 ms. As a single operation,
# the layer with shared inputs took 27.6 ms, and the layer without runs 31.1 ms.
class _RunLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, unshared: Tensor, shared: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
        starts: Tensor, relu: bool,
    ) -> Tensor:  # fmt: skip
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        inputs = [unshared.to(kind), shared.to(kind)]
        weights = [
            pad_weight(weight.index_select(1, chosen), part).to(kind)
            for chosen, part in zip(columns, inputs, strict=True)
        ]
        out = inputs[0] @ weights[0].t()
        runs = inputs[1] @ weights[1].t() if bias is None else torch.addmm(bias.to(kind), inputs[1], weights[1].t())
        runs = runs.float()
        threads = team_threads()
        _kernels(out, relu).forward(team_of(threads), _runs(out, starts, threads), _flat(out), _flat(runs))
        ctx.save_for_backward(*inputs, *weights, out, starts)
        ctx.columns, ctx.shape, ctx.relu, ctx.biased = columns, weight.shape, relu, bias is not None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        unshared, shared, unshared_weight, shared_weight, out, starts = ctx.saved_tensors
        samples, runs = torch.empty_like(out), torch.empty(len(starts) - 1, out.shape[1])
        gradient = gradient.to(out.dtype).contiguous()
        threads = team_threads()
        _kernels(out, ctx.relu).backward(
            team_of(threads), _runs(out, starts, threads), _flat(gradient), _flat(out), _flat(samples), _flat(runs),
        )  # fmt: skip
        runs = runs.to(out.dtype)
        weight = torch.zeros(ctx.shape)
        for columns, part in zip(ctx.columns, (samples.t() @ unshared, runs.t() @ shared), strict=True):
            weight.index_copy_(1, columns, part[:, : len(columns)].float())
        bias = samples.sum(0, dtype=torch.float32) if ctx.biased else None
        return (samples @ unshared_weight).float(), (runs @ shared_weight).float(), weight, bias, None, None, None


def pad_weight(weight: Tensor, inputs: Tensor) -> Tensor:
    """Append zero columns to the weight until it has as many columns as `inputs`."""
    more = inputs.shape[1] - weight.shape[1]
    return functional.pad(weight, (0, more)) if more else weight


def _kernels(tensor: Tensor, relu: bool) -> Any:
    return kernels(1 if tensor.shape[1] % LANES else LANES, int(relu))


def _runs(out: Tensor, starts: Tensor, threads: int) -> tuple[Any, ...]:
    """Return the fields of `RunTiles`."""
    return starts.numpy(), out.shape[1], tile_size(len(starts) - 1, threads)


def _flat(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous tensor as an array; bfloat16 as uint16 bits."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = flat.numpy()
    return array


U = np.uint64


class RunTiles(NamedTuple):
    """Starts of runs, floats of a sample, and number of runs that a thread processes at a time."""

    start: NDArray[np.int64]
    width: int
    tile: int


@njit(**BODY)
def forward_tiles(member, lanes, relu, counter, runs, samples, shared):
    """Add shared[r] to samples[b] for each sample b of run r; if `relu` is 1, apply ReLU."""
    literally(lanes)
    literally(relu)
    W, start, tile, count = U(runs.width), runs.start, runs.tile, len(runs.start) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(start[run]), U(start[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    sums = add(load(samples, b * W + d, lanes), load(shared, U(run) * W + d, lanes))
                    store(samples, b * W + d, passed(sums, sums) if relu else sums)


@njit(**BODY)
def backward_tiles(member, lanes, relu, counter, runs, gradient, out, samples, shared):
    """Set samples[b] to gradient[b], except that it is 0 wherever `relu` is 1 and out[b] <= 0.

    shared[r] is set to the sum of samples[b] over the run's samples in ascending order.
    """
    literally(lanes)
    literally(relu)
    W, start, tile, count = U(runs.width), runs.start, runs.tile, len(runs.start) - 1
    while True:
        low = take(counter) * tile
        if low >= count:
            break
        for run in range(low, min(low + tile, count)):
            for b in range(U(start[run]), U(start[run + 1])):
                for d in range(U(0), W, U(lanes)):
                    part = load(gradient, b * W + d, lanes)
                    part = passed(part, load(out, b * W + d, lanes)) if relu else part
                    store(samples, b * W + d, part)
                    # The first sample sets the sum: the output needs no zeros, and a sum of -0.0 keeps its sign.
                    place = U(run) * W + d
                    store(shared, place, part if b == U(start[run]) else add(load(shared, place, lanes), part))


@cache
def kernels(lanes: int, relu: int) -> SimpleNamespace:
    """Return both passes for blocks of `lanes` floats. Each is compiled once per type and cached on disk."""

    @njit(nogil=True, cache=True)
    def forward(team, runs, samples, shared):
        run_team(team, forward_tiles, (lanes, relu, np.zeros(1, np.int64), RunTiles(*runs), samples, shared))

    @njit(nogil=True, cache=True)
    def backward(team, runs, gradient, out, samples, shared):
        args = (lanes, relu, np.zeros(1, np.int64), RunTiles(*runs), gradient, out, samples, shared)
        run_team(team, backward_tiles, args)

    return SimpleNamespace(forward=forward, backward=backward)


def reference_run_linear(
    unshared: Tensor, shared: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
    starts: Tensor, *, relu: bool,
) -> Tensor:  # fmt: skip
    """Compute `run_linear` by concatenating the inputs of each sample."""
    run = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff())
    inputs = unshared.new_zeros(len(unshared), weight.shape[1])
    for part, places in zip((unshared, shared[run]), columns, strict=True):
        inputs = inputs.index_copy(1, places, part[:, : len(places)])
    out = functional.linear(inputs, weight, bias)
    return out.relu() if relu else out
