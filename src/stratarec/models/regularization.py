"""Dropout whose masks can be told again, and batch normalization for the last batch of an epoch, however small.

Shapes: B samples, H width of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.kernels.runtime.accelerator import beside

_STEPS = 1 << 16


class Dropout(nn.Module):
    """Elements are zero with probability `rate` in training, and the others 1 / (1 - rate) times as large.

    Srivastava et al., JMLR 15 (2014). Masks come from a generator of its own, which `seed_dropout` sets at each step:
    with torch's own random numbers they would depend on whatever else drew some. An element is decided by 16 random
    bits, four of them at a draw: torch's Bernoulli numbers take as long as a layer of 512 by 512. So the rate is the
    nearest one of 65,536.

    Parameters
    ----------
    rate : float
    shared : bool
        Whether all along the first dimension have one mask: of members that differ in weights, that takes nothing away.
    """

    def __init__(self, rate: float, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.dropped = min(round(rate * _STEPS), _STEPS - 1)
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        """Of any shape."""
        if not self.training:
            return inputs
        shape = inputs.shape[1:] if self.shared else inputs.shape
        draws = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(
            -(1 << 63), None, generator=self.generator
        )
        bits = draws.view(torch.int16)[: shape.numel()].view(shape)
        # Drawn on the host wherever the layer is: the same masks on every device.
        mask = beside(bits >= self.dropped - _STEPS // 2, inputs).to(inputs.dtype)
        # By the number, not in the mask: bfloat16 has three digits.
        return (inputs * mask).mul_(_STEPS / (_STEPS - self.dropped))


def dropouts(module: nn.Module) -> list[Dropout]:
    """All dropout of a module."""
    return [layer for layer in module.modules() if isinstance(layer, Dropout)]


def seed_dropout(layers: Sequence[Dropout], *key: int) -> None:
    """Make the masks that follow a function of `key`, numbers of at least 0, and of the place among `layers`."""
    if layers:
        for layer, seed in zip(layers, np.random.SeedSequence(key).generate_state(len(layers)), strict=True):
            layer.generator.manual_seed(int(seed))


class BatchNorm(nn.Module):
    """y = (x - mean) / sqrt(variance + 1e-5) * weight + bias, by column, over the batch (Ioffe and Szegedy 2015,
    arXiv 1502.03167).

    Outside training by running statistics, of which each batch takes the place of a tenth. So is a single sample, whose
    variance is 0: it changes no statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, H]`` in the type of `inputs`; statistics are float32."""
        return functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias,
            training=self.training and len(inputs) > 1,
        )  # fmt: skip


def statistics(module: nn.Module) -> list[Tensor]:
    """``[H]`` running means and variances of all batch normalization in a module."""
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    return [each for layer in layers for each in (layer.running_mean, layer.running_var)]
