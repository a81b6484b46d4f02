"""What the kernels of linear layers compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def run_linear(
    own: Tensor, common: Tensor, weight: Tensor, bias: Tensor | None, columns: tuple[Tensor, Tensor],
    starts: Tensor, *, relu: bool,
) -> Tensor:  # fmt: skip
    """``[B, H]``: the inputs put together for each sample, then the layer and its ReLU."""
    inputs = own.new_zeros(len(own), weight.shape[1])
    inputs = inputs.index_copy(1, columns[0], own[:, : len(columns[0])])
    shared = torch.repeat_interleave(common[:, : len(columns[1])], starts.diff(), dim=0)
    out = functional.linear(inputs.index_copy(1, columns[1], shared), weight, bias)
    return out.relu() if relu else out
