"""Layers that models share, and their initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.errors import ConfigError
from stratarec.kernels.linear import linear_relu, pad_weight


def check_sizes(field_name: str, sizes: Sequence[int], *, least: int = 0) -> None:
    """Sizes of layers must be positive, and at least `least` of them."""
    if len(sizes) < least or any(size < 1 for size in sizes):
        count = "at least one positive size" if least else "positive sizes"
        raise ConfigError(f"model.{field_name} is {list(sizes)}, expected {count}")


def initialize(module: nn.Module, seed: int) -> None:
    """Set every linear layer as DLRM's reference does; a function of `seed` and the order of the layers alone.

    Weights are normal with variance 2 / (in + out), biases normal with variance 1 / out.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                layer.weight.normal_(0, math.sqrt(2 / (rows + columns)), generator=generator)
                if layer.bias is not None:
                    layer.bias.normal_(0, math.sqrt(1 / rows), generator=generator)


class MLP(nn.Sequential):
    """Linear layers of the given sizes, each followed by a ReLU.

    The input may have more columns than the first layer: they are zeros.
    """

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [nn.Linear(inputs, size), nn.ReLU(inplace=True)]
            inputs = size
        super().__init__(*layers)
        self.outputs = inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, outputs]``."""
        if not len(self):
            return inputs[:, : self.outputs]
        first, *rest = self
        assert isinstance(first, nn.Linear)
        hidden = functional.linear(inputs, pad_weight(first.weight, inputs), first.bias)
        for layer in rest:
            hidden = layer(hidden)
        return hidden

    def of_runs(self, own: Tensor, common: Tensor, columns: tuple[Tensor, Tensor], starts: Tensor) -> Tensor:
        """``[B, outputs]`` of inputs some columns of which are the same for all samples of a run.

        The first layer is linear: the product of the common columns is computed once a run and then added.

        Parameters
        ----------
        own, common : Tensor
            ``[B, .]`` and ``[R, .]``.
        columns : pair of Tensor
            Which columns of the input they are, those behind left out.
        starts : Tensor
            ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``.
        """
        first, _, *rest = self
        assert isinstance(first, nn.Linear)
        hidden = linear_relu(own, common, first.weight, first.bias, columns, starts)
        for layer in rest:
            hidden = layer(hidden)
        return hidden


class Cross(nn.Module):
    """x_{l+1} = x_0 * (W x_l + b) + x_l, with W = U V^T where a rank is given."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            if rank
            else nn.Linear(width, width)
            for _ in range(layers)
        )

    def forward(self, start: Tensor) -> Tensor:
        """``[B, width]`` -> ``[B, width]``."""
        crossed = start
        for layer in self.layers:
            crossed = torch.addcmul(crossed, start.to(crossed.dtype), layer(crossed).to(crossed.dtype))
        return crossed
