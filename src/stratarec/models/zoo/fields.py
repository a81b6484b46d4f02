"""What models of many fields share: every feature as a vector, and logits that are sums of terms.

Shapes: B samples, R runs, F_dense numbers, F vectors of sparse features and histories, W width of a vector: D, and one
more where a model has first-order weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.models.layers import MLP
from stratarec.models.runs import Runs

FIRST_ORDER = {"train.embedding.kind": "adagrad"}
"""What suits rows with a first-order weight: its gradients are many times those of the vector before it, and a rate
that all weights of a row share would be one for it alone."""
SHALLOW = {"train.epochs": 5}
"""What suits a model without a network: it does not learn rows by heart in its second pass, and validation ends it."""
MULTIPLIED = 0.05
"""First weights of rows, at most, whose products are added up as they are: those of 40 fields are then within 0.1 of a
logit. From 1 / sqrt(rows), of small tables up to 1, they are many logits that steps must unlearn first."""


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


class NumberVectors(nn.Module):
    """The vectors v_i of numbers."""

    def __init__(self, dense: int, width: int, first_order: bool, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dense))
        self._vectors, self._deviation = width - first_order, deviation or math.sqrt(2 / (dense + width))

    def draw(self, generator: torch.Generator) -> None:
        """Set first weights."""
        self.weight.normal_(0, self._deviation, generator=generator)
        self.weight[self._vectors :] = 0


class Fields(nn.Module):
    """Every feature as a vector: a number x_i as x_i v_i, with a v_i of its own, as FM has it (Rendle 2010).

    Parameters
    ----------
    dense, features, width : int
        F_dense, F and W.
    first_order : bool
        Whether the last of the W columns is a first-order weight. Those of numbers are 0 at first: what a number says
        by chance, a run of few steps does not unlearn.
    deviation : float
        Of the first v_i; 0 for what suits a linear layer (Glorot and Bengio 2010). Where vectors are multiplied with
        one another that is too much.
    """

    def __init__(
        self, dense: int, features: int, width: int, *, first_order: bool = False, deviation: float = 0.0
    ) -> None:
        super().__init__()
        self.numbers = NumberVectors(dense, width, first_order, deviation) if dense else None
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
