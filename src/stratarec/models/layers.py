"""Layers that models share, dropout and batch normalization.

Shapes: B samples, H width of a layer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from stratarec.kernels.random import RandomWords
from stratarec.kernels.runtime.accelerator import on_device
from stratarec.kernels.segments import SegmentColumns


class MLP(nn.Sequential):
    """Hidden layers of the given sizes: linear, batch normalization, ReLU, dropout.

    The input may have more columns than the first layer; additional columns must be zeros.

    Parameters
    ----------
    dropout : float
        Share of each hidden layer's outputs that are dropped.
    batch_norm : bool
        Whether hidden layers are normalized.
    last : int
        Size of an additional last layer, with ReLU but without dropout and normalization; by
        default there is none.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        last: int | None = None,
    ) -> None:
        layers: list[nn.Module] = []
        for size in sizes:
            # No bias, because normalization would cancel it, up to rounding in bfloat16.
            layers.append(nn.Linear(inputs, size, bias=not batch_norm))
            if batch_norm:
                layers.append(BatchNorm(size))
            layers.append(nn.ReLU(inplace=True))
            if dropout:
                layers.append(Dropout(dropout))
            inputs = size
        if last is not None:
            layers += [nn.Linear(inputs, last), nn.ReLU(inplace=True)]
            inputs = last
        super().__init__(*layers)
        self.outputs = inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[B, outputs]``."""
        if not len(self):
            return inputs[:, : self.outputs]
        first, *others = self
        assert isinstance(first, nn.Linear)
        hidden = functional.linear(inputs, pad_weight(first.weight, inputs), first.bias)
        for layer in others:
            hidden = layer(hidden)
        return hidden

    def of_segments(
        self, unshared: Tensor, shared: Tensor, columns: tuple[Tensor, Tensor], starts: Tensor
    ) -> Tensor:
        """Return ``[B, outputs]`` for inputs with columns that are the same for all samples of a
        segment.

        As the first layer is linear, the product of the shared columns is computed once per segment
        and added for each sample.

        Parameters
        ----------
        unshared, shared : Tensor
            ``[B, .]`` and ``[R, .]``.
        columns : pair of Tensor
            Column numbers of `unshared` and of `shared` in the input of the first layer, without
            padding.
        starts : Tensor
            ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``.
        """
        first, second, *others = self
        assert isinstance(first, nn.Linear)
        relu = isinstance(second, nn.ReLU)
        hidden = segment_linear(unshared, shared, first.weight, first.bias, columns, starts, relu=relu)
        for layer in others if relu else (second, *others):
            hidden = layer(hidden)
        return hidden


def segment_linear(
    unshared: Tensor,
    shared: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: tuple[Tensor, Tensor],
    starts: Tensor,
    *,
    relu: bool,
) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[B, H]``, where x has C inputs: unshared ones and shared
    ones.

    The result has autocast's type if autocast is on, otherwise it is float32.

    Parameters
    ----------
    unshared, shared : Tensor
        ``[B, .]`` inputs of each sample, and ``[R, .]`` inputs of each segment; further columns,
        not in `columns`, are 0.
    weight, bias : Tensor
        ``[H, C]`` and ``[H]``; None for no bias.
    columns : pair of Tensor
        int64 positions, among the C inputs, of the columns of `unshared` and of the columns of
        `shared`.
    starts : Tensor
        ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``. Gradients are summed
        over a segment's samples in ascending order.
    relu : bool
        Whether to apply ReLU.
    """
    arguments = (unshared, shared, weight, bias, columns, starts, relu)
    out: Tensor = _SegmentLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _SegmentLinear(torch.autograd.Function):
    """A single operation, because autograd would round the sums of bfloat16 once more, and sum the
    bias by segment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        unshared: Tensor,
        shared: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: tuple[Tensor, Tensor],
        starts: Tensor,
        relu: bool,
    ) -> Tensor:
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        inputs = [unshared.to(kind), shared.to(kind)]
        weights = [
            pad_weight(weight.index_select(1, chosen), part).to(kind)
            for chosen, part in zip(columns, inputs, strict=True)
        ]
        segments = functional.linear(inputs[1], weights[1], None if bias is None else bias.to(kind)).float()
        segment = torch.repeat_interleave(
            torch.arange(len(segments)), starts.diff(), output_size=len(unshared)
        )
        out = (inputs[0] @ weights[0].t()).float().add_(segments.index_select(0, segment))
        out = (out.relu_() if relu else out).to(kind)
        ctx.save_for_backward(*inputs, *weights, out, starts)
        ctx.columns = columns
        ctx.shape = weight.shape
        ctx.relu = relu
        ctx.biased = bias is not None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        unshared, shared, unshared_weight, shared_weight, out, starts = ctx.saved_tensors
        samples = gradient.to(out.dtype).contiguous()
        samples = torch.ops.aten.threshold_backward(samples, out, 0) if ctx.relu else samples
        summed = SegmentColumns(out.shape[1], [(0, out.shape[1])], starts).fold(samples.float())
        segments = summed[: len(shared)].to(out.dtype)
        weight = torch.zeros(ctx.shape)
        for columns, part in zip(ctx.columns, (samples.t() @ unshared, segments.t() @ shared), strict=True):
            weight.index_copy_(1, columns, part[:, : len(columns)].float())
        bias = samples.sum(0, dtype=torch.float32) if ctx.biased else None
        return (
            (samples @ unshared_weight).float(),
            (segments @ shared_weight).float(),
            weight,
            bias,
            None,
            None,
            None,
        )


def pad_weight(weight: Tensor, inputs: Tensor) -> Tensor:
    """Append zero columns to the weight until it has as many columns as `inputs`."""
    more = inputs.shape[1] - weight.shape[1]
    return functional.pad(weight, (0, more)) if more else weight


class Cross(nn.Module):
    """Cross layers: x_{l+1} = x_0 * (W x_l + b) + x_l, with W = U V^T if `rank` is not 0."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            if rank
            else nn.Linear(width, width)
            for _ in range(layers)
        )

    def forward(self, start: Tensor) -> Tensor:
        """Return ``[B, width]`` from x_0, ``[B, width]``."""
        crossed = start
        for layer in self.layers:
            crossed = torch.addcmul(crossed, start.to(crossed.dtype), layer(crossed).to(crossed.dtype))
        return crossed


_STEPS = 1 << 16


class Dropout(nn.Module):
    """Dropout with reproducible masks (Srivastava et al., JMLR 15, 2014).

    In training each element is set to zero with probability `rate`, and the others are scaled by 1
    / (1 - rate). Masks are a function of a key, which `seed_dropout` sets at each step, and of the
    number of masks since then. One word of 64 random bits decides four elements: torch's Bernoulli
    numbers would take as long as a layer of 512 by 512. So the rate is rounded to a multiple of 1 /
    65,536.

    Parameters
    ----------
    rate : float or sequence of float
        A sequence has one rate for each entry of the first dimension, such as for each member of an
        ensemble; all entries use the same random numbers.
    """

    def __init__(self, rate: float | Sequence[float]) -> None:
        super().__init__()
        rates = [rate] if isinstance(rate, int | float) else list(rate)
        self.shared = not isinstance(rate, int | float)
        self.dropped = [min(round(share * _STEPS), _STEPS - 1) for share in rates]
        self.words = RandomWords()

    def bits(self, *shape: int) -> Tensor:
        """Return int16 random bits on the host; elements whose bits are below the limit are
        dropped.
        """
        count = math.prod(shape)
        words = self.words.draw(-(-count // 4))
        return torch.from_numpy(words.view(np.int16)[:count]).view(shape)

    @property
    def limits(self) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Limit of the bits, and the factor of elements that are not dropped, for each rate."""
        dropped = np.array(self.dropped)
        return (dropped - _STEPS // 2).astype(np.int16), (_STEPS / (_STEPS - dropped)).astype(np.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        if not self.training:
            return inputs
        # Drawn on the host, so that masks are the same on every device.
        bits = self.bits(*(inputs.shape[1:] if self.shared else inputs.shape))
        limit, scale = (torch.from_numpy(values).view(-1, *[1] * bits.dim()) for values in self.limits)
        if self.shared:
            return (inputs * on_device((bits >= limit) * scale, inputs)).to(inputs.dtype)
        mask = on_device(bits >= int(limit), inputs).to(inputs.dtype)
        # The scale is a separate factor: in a bfloat16 mask it would have only three digits.
        return (inputs * mask).mul_(float(scale))


def dropouts(module: nn.Module) -> list[Dropout]:
    """Return all dropout layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, Dropout)]


def seed_dropout(layers: Sequence[Dropout], *key: int) -> None:
    """Seed the next mask of each layer from `key` (non-negative integers) and the layer's position
    in `layers`.
    """
    for place, layer in enumerate(layers):
        layer.words.key = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key) + 1}Q", *key, place))


class BatchNorm(nn.Module):
    """Batch normalization by column (Ioffe and Szegedy 2015, arXiv 1502.03167).

    y = (x - mean) / sqrt(variance + 1e-5) * weight + bias. In training, mean and variance are
    computed from the batch, and the running statistics move by a tenth of the difference towards
    them. Outside training, and for a batch of one sample, the running statistics are used.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def fault(self) -> str:
        """Check values, which may come from a file; return the fault, or an empty string."""
        return "a negative variance" if bool((self.running_var < 0).any()) else ""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[B, H]`` in the type of `inputs`; statistics are float32."""
        return functional.batch_norm(
            inputs,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training and len(inputs) > 1,
        )


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances ``[H]`` of all batch normalization layers in a
    module.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    return [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
