"""What models of many fields share: every feature as a vector, and logits that are sums of terms.

Shapes: B samples, R runs, F_dense numbers, F vectors of sparse features and histories, W width of a vector: D, and one
more where a model has first-order weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.models.layers import MLP
from stratarec.models.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Fields of which some are the same for all samples of a run: what is linear in them is computed once a run."""

    own: Tensor
    """``[B, F_own, W]``, numbers first."""
    common: Tensor | None
    """``[R, F_common, W]``, where there are runs."""
    runs: Runs | None
    numbers: int
    """F_dense."""

    def columns(self, first: int, last: int | None) -> Parts:
        """Some columns of every vector."""
        common = None if self.common is None else self.common[..., first:last]
        return replace(self, own=self.own[..., first:last], common=common)

    def sum(self) -> Tensor:
        """``[B, W]`` sum over fields."""
        return self._joined(self.own.sum(1), None if self.common is None else self.common.sum(1))

    def square_sum(self) -> Tensor:
        """``[B, W]`` sum of squares over fields."""
        return self._joined(self.own.square().sum(1), None if self.common is None else self.common.square().sum(1))

    def _joined(self, own: Tensor, common: Tensor | None) -> Tensor:
        return own if common is None or self.runs is None else own + self.runs.repeat(common)

    def under(self, mlp: MLP) -> Tensor:
        """``[B, .]``: `mlp` of all fields side by side."""
        if self.common is None or self.runs is None:
            return mlp(self.own.flatten(1))  # type: ignore[no-any-return]
        shared = torch.tensor([*[False] * self.numbers, *self.runs.shared]).repeat_interleave(self.own.shape[2])
        places = (~shared).nonzero().squeeze(1), shared.nonzero().squeeze(1)
        return mlp.of_runs(self.own.flatten(1), self.common.flatten(1), places, self.runs.starts)


class Fields(nn.Module):
    """Every feature as a vector: a number x_i as x_i v_i, with a v_i of its own, as FM has it (Rendle 2010)."""

    def __init__(self, dense: int, features: int, width: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(dense, width, bias=False) if dense else None
        self.count = dense + features

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """``[B, F_dense + F, W]``, the numbers first; every vector its sample's own."""
        return self._beside(dense, vectors if runs is None else runs.expand(vectors))

    def parts(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Parts:
        """The same, of which what samples share is there once a run."""
        own, common = (vectors, None) if runs is None else runs.split(vectors)
        return Parts(own=self._beside(dense, own), common=common, runs=runs, numbers=dense.shape[1])

    def _beside(self, dense: Tensor, vectors: Tensor) -> Tensor:
        if self.numbers is None:
            return vectors
        return torch.cat([dense.unsqueeze(2) * self.numbers.weight.t(), vectors], dim=1)


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
