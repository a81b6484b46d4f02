"""Layers that models share, and their initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.errors import ConfigError
from stratarec.kernels.linear import pad_weight, run_linear
from stratarec.models.regularization import BatchNorm, Dropout


def check_sizes(field_name: str, sizes: Sequence[int], *, least: int = 0) -> None:
    """Sizes of layers must be positive, and at least `least` of them."""
    if len(sizes) < least or any(size < 1 for size in sizes):
        count = "at least one positive size" if least else "positive sizes"
        raise ConfigError(f"model.{field_name} is {list(sizes)}, expected {count}")


Initialization = Literal["dlrm", "xavier"]


@runtime_checkable
class Drawn(Protocol):
    """A module that sets its first weights itself."""

    def draw(self, generator: torch.Generator) -> None: ...


def initialize(module: nn.Module, seed: int, kind: Initialization = "dlrm") -> None:
    """Set every linear layer and what is `Drawn`; a function of `seed` and the order of the layers alone.

    Weights are normal with variance 2 / (in + out) (Glorot and Bengio 2010), biases as in DLRM's reference normal with
    variance 1 / out, or 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                layer.weight.normal_(0, math.sqrt(2 / (rows + columns)), generator=generator)
                if layer.bias is not None and kind == "xavier":
                    layer.bias.zero_()
                elif layer.bias is not None:
                    layer.bias.normal_(0, math.sqrt(1 / rows), generator=generator)
            elif isinstance(layer, Drawn):
                layer.draw(generator)


class MLP(nn.Sequential):
    """Hidden layers of the given sizes: linear, batch normalization, ReLU, dropout.

    The input may have more columns than the first layer: they are zeros.

    Parameters
    ----------
    dropout : float
        Share of each hidden layer's outputs that are dropped.
    batch_norm : bool
        Whether hidden layers are normalized.
    last : int
        Size of one more layer, linear and a ReLU alone; by default there is none.
    """

    def __init__(
        self, inputs: int, sizes: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False,
        last: int | None = None,
    ) -> None:  # fmt: skip
        layers: list[nn.Module] = []
        for size in sizes:
            # A normalization takes away what a bias adds, of which bfloat16 would leave rounding.
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
        first, second, *rest = self
        assert isinstance(first, nn.Linear)
        relu = isinstance(second, nn.ReLU)
        hidden = run_linear(own, common, first.weight, first.bias, columns, starts, relu=relu)
        for layer in rest if relu else (second, *rest):
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
