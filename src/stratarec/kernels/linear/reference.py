"""What the kernels of linear layers compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.kernels.runtime.accelerator import beside


def run_linear(
    own: Tensor, common: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
    starts: Tensor, *, relu: bool,
) -> Tensor:  # fmt: skip
    """``[B, H]``: the inputs put together for each sample, then the layer and its ReLU."""
    run = beside(torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff()), own)
    inputs = own.new_zeros(len(own), weight.shape[1])
    for part, places in zip((own, common[run]), columns, strict=True):
        inputs = inputs.index_copy(1, beside(places, own), part[:, : len(places)])
    out = functional.linear(inputs, weight, bias)
    return out.relu() if relu else out
