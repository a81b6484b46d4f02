"""Layers that models share, dropout and batch normalization.

Shapes: B samples, H width of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.kernels.linear import pad_weight, run_linear
from stratarec.kernels.runtime.accelerator import on_device


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
        Size of an additional last layer, with ReLU but without dropout and normalization; by default there is none.
    """

    def __init__(
        self, inputs: int, sizes: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False,
        last: int | None = None,
    ) -> None:  # fmt: skip
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

    def of_runs(self, unshared: Tensor, shared: Tensor, columns: tuple[Tensor, Tensor], starts: Tensor) -> Tensor:
        """Return ``[B, outputs]`` for inputs with columns that are the same for all samples of a run.

        As the first layer is linear, the product of the shared columns is computed once per run and added for each
        sample.

        Parameters
        ----------
        unshared, shared : Tensor
            ``[B, .]`` and ``[R, .]``.
        columns : pair of Tensor
            Column numbers of `unshared` and of `shared` in the input of the first layer, without padding.
        starts : Tensor
            ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``.
        """
        first, second, *others = self
        assert isinstance(first, nn.Linear)
        relu = isinstance(second, nn.ReLU)
        hidden = run_linear(unshared, shared, first.weight, first.bias, columns, starts, relu=relu)
        for layer in others if relu else (second, *others):
            hidden = layer(hidden)
        return hidden


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

    In training each element is set to zero with probability `rate`, and the others are scaled by 1 / (1 - rate). Masks
    are drawn from a separate generator, which `seed_dropout` seeds at each step, because torch's global generator
    depends on other draws. One draw of 64 random bits decides four elements: torch's Bernoulli numbers would take as
    long as a layer of 512 by 512. So the rate is rounded to a multiple of 1 / 65,536.

    Parameters
    ----------
    rate : float or sequence of float
        A sequence has one rate for each entry of the first dimension, such as for each member of an ensemble; all
        entries use the same random numbers.
    """

    def __init__(self, rate: float | Sequence[float]) -> None:
        super().__init__()
        rates = [rate] if isinstance(rate, int | float) else list(rate)
        self.shared = not isinstance(rate, int | float)
        dropped = [min(round(share * _STEPS), _STEPS - 1) for share in rates]
        self.dropped = list(dict.fromkeys(dropped))
        # Position in `dropped` of each entry's rate. It is on the host, also if the model is built on the meta device.
        self._places = torch.tensor([self.dropped.index(share) for share in dropped], device="cpu")
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        if not self.training:
            return inputs
        shape = inputs.shape[1:] if self.shared else inputs.shape
        draws = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(
            -(1 << 63), None, generator=self.generator
        )
        bits = draws.view(torch.int16)[: shape.numel()].view(shape)
        # Drawn on the host, so that masks are the same on every device.
        if self.shared:
            factors = [(bits >= each - _STEPS // 2) * (_STEPS / (_STEPS - each)) for each in self.dropped]
            return (inputs * on_device(torch.stack(factors)[self._places], inputs)).to(inputs.dtype)
        (dropped,) = self.dropped
        mask = on_device(bits >= dropped - _STEPS // 2, inputs).to(inputs.dtype)
        # The scale is a separate factor: in a bfloat16 mask it would have only three digits.
        return (inputs * mask).mul_(_STEPS / (_STEPS - dropped))


def dropouts(module: nn.Module) -> list[Dropout]:
    """Return all dropout layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, Dropout)]


def seed_dropout(layers: Sequence[Dropout], *key: int) -> None:
    """Seed the next mask of each layer from `key` (non-negative integers) and the layer's position in `layers`."""
    if layers:
        for layer, seed in zip(layers, np.random.SeedSequence(key).generate_state(len(layers)), strict=True):
            layer.generator.manual_seed(int(seed))


class BatchNorm(nn.Module):
    """Batch normalization by column (Ioffe and Szegedy 2015, arXiv 1502.03167).

    y = (x - mean) / sqrt(variance + 1e-5) * weight + bias. In training, mean and variance are computed from the batch,
    and the running statistics move by a tenth of the difference towards them. Outside training, and for a batch of one
    sample, the running statistics are used.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def fault(self) -> str:
        """Check values, which may come from a file; return the fault, or an empty string."""
        return "a negative variance" if bool((self.running_var < 0).any()) else ""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[B, H]`` in the type of `inputs`; statistics are float32."""
        return functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias,
            training=self.training and len(inputs) > 1,
        )  # fmt: skip


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances ``[H]`` of all batch normalization layers in a module."""
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    return [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
