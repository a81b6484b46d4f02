"""What models of many fields share: every feature as a vector, and logits that are sums of terms.

Shapes: B samples, F_dense numbers, F vectors of sparse features and histories, W width of a vector: D, and one more
where a model has first-order weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.models.runs import Runs


class Fields(nn.Module):
    """Every feature as a vector: a number x_i as x_i v_i, with a v_i of its own, as FM has it (Rendle 2010)."""

    def __init__(self, dense: int, features: int, width: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(dense, width, bias=False) if dense else None
        self.count = dense + features

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """``[B, F_dense + F, W]``, the numbers first."""
        vectors = vectors if runs is None else runs.expand(vectors)
        return vectors if self.numbers is None else torch.cat([self.scaled(dense), vectors], dim=1)

    def sums(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> tuple[Tensor, Tensor]:
        """``[B, W]`` sum of all vectors, and of their squares; of those that samples share once a run."""
        own, common = (vectors, None) if runs is None else runs.split(vectors)
        parts = [own] if self.numbers is None else [own, self.scaled(dense)]
        total = torch.stack([part.sum(1) for part in parts]).sum(0)
        squares = torch.stack([part.square().sum(1) for part in parts]).sum(0)
        if runs is None or common is None:
            return total, squares
        return total + runs.repeat(common.sum(1)), squares + runs.repeat(common.square().sum(1))

    def scaled(self, dense: Tensor) -> Tensor:
        """``[B, F_dense, W]``."""
        assert self.numbers is not None
        return dense.unsqueeze(2) * self.numbers.weight.t()


class Terms(nn.Module):
    """A logit that is a sum: b + w · x of the first columns, plus the others as they are.

    Models that their papers write as a sum of parts have it in the place of a last linear layer; where there are
    several labels, heads take all columns instead.
    """

    def __init__(self, inputs: int, terms: int) -> None:
        super().__init__()
        self.in_features, self.inputs = inputs + terms, inputs
        self.linear = nn.Linear(inputs, 1, bias=False) if inputs else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, columns: Tensor) -> Tensor:
        """``[B, inputs + terms]`` -> ``[B, 1]``."""
        logits = columns[:, self.inputs :].sum(1, keepdim=True) + self.bias
        if self.linear is None:
            return logits
        return logits + functional.linear(columns[:, : self.inputs], self.linear.weight)
