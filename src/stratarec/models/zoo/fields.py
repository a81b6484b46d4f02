"""Common parts of models in which every feature is a vector (a field), and the logit is a sum of
terms.

Shapes: B samples, R segments, F_dense numbers, F vectors of sparse features and histories, W width
of a vector, which is D, or D + 1 in models with first-order weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.models.layers import MLP
from stratarec.models.request import Segments


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Fields, some of which are shared by the samples of a segment.

    Linear functions of shared fields are computed once per segment.

    Parameters
    ----------
    unshared : Tensor
        ``[B, F_u, W]``, vectors of numbers first.
    shared : Tensor or None
        ``[R, F_s, W]``; None if there are no segments.
    segments : Segments or None
        Segments of the B samples; None if nothing is shared.
    numbers : int
        F_dense.
    """

    unshared: Tensor
    shared: Tensor | None
    segments: Segments | None
    numbers: int

    def columns(self, first: int, last: int | None) -> Parts:
        """Return the columns ``first:last`` of every vector."""
        shared = None if self.shared is None else self.shared[..., first:last]
        return replace(self, unshared=self.unshared[..., first:last], shared=shared)

    def sum(self) -> Tensor:
        """Return the sum ``[B, W]`` over fields."""
        return self._joined(self.unshared.sum(1), None if self.shared is None else self.shared.sum(1))

    def square_sum(self) -> Tensor:
        """Return the sum ``[B, W]`` over fields of the squared columns."""
        shared = None if self.shared is None else self.shared.square().sum(1)
        return self._joined(self.unshared.square().sum(1), shared)

    def _joined(self, unshared: Tensor, shared: Tensor | None) -> Tensor:
        return (
            unshared if shared is None or self.segments is None else unshared + self.segments.repeat(shared)
        )

    def apply(self, mlp: MLP) -> Tensor:
        """Apply `mlp` to all fields, concatenated; return ``[B, outputs]``."""
        if self.shared is None or self.segments is None:
            return mlp(self.unshared.flatten(1))  # type: ignore[no-any-return]
        flags = torch.tensor([*[False] * self.numbers, *self.segments.shared]).repeat_interleave(
            self.unshared.shape[2]
        )
        places = (~flags).nonzero().squeeze(1), flags.nonzero().squeeze(1)
        return mlp.of_segments(
            self.unshared.flatten(1), self.shared.flatten(1), places, self.segments.starts
        )


class NumberVectors(nn.Module):
    """The vectors v_i of dense features."""

    def __init__(self, dense: int, width: int, first_order: bool, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dense))
        self._vectors = width - first_order
        self._deviation = deviation or math.sqrt(2 / (dense + width))

    def draw(self, generator: torch.Generator) -> None:
        """Set initial weights."""
        self.weight.normal_(0, self._deviation, generator=generator)
        self.weight[self._vectors :] = 0


class Fields(nn.Module):
    """Vectors of all features. The vector of a number x_i is x_i v_i with a learned v_i, as in FM
    (Rendle 2010).

    Parameters
    ----------
    dense, features, width : int
        F_dense, F and W.
    first_order : bool
        Whether the last of the W columns is a first-order weight. First-order weights of numbers
        start at 0, because a few steps would not unlearn random ones.
    deviation : float
        Standard deviation of the initial v_i. 0 means the deviation of a linear layer (Glorot and
        Bengio 2010), which is too large if vectors are multiplied with each other.
    """

    def __init__(
        self, dense: int, features: int, width: int, *, first_order: bool = False, deviation: float = 0.0
    ) -> None:
        super().__init__()
        self.numbers = NumberVectors(dense, width, first_order, deviation) if dense else None
        self.count = dense + features

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        """Return the vectors ``[B, F_dense + F, W]`` of each sample, vectors of numbers first."""
        return self._with_numbers(dense, vectors if segments is None else segments.expand(vectors))

    def parts(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Parts:
        """Return the same vectors as `Parts`, in which shared vectors appear once per segment."""
        unshared, shared = (vectors, None) if segments is None else segments.split(vectors)
        unshared = self._with_numbers(dense, unshared)
        return Parts(unshared=unshared, shared=shared, segments=segments, numbers=dense.shape[1])

    def _with_numbers(self, dense: Tensor, vectors: Tensor) -> Tensor:
        if self.numbers is None:
            return vectors
        return torch.cat([dense.unsqueeze(2) * self.numbers.weight.t(), vectors], dim=1)


class Terms(nn.Module):
    """Last layer of models whose logit is a sum: b + w · (first columns) + the sum of the other
    columns.

    With several labels, heads that use all columns replace it.
    """

    def __init__(self, inputs: int, terms: int) -> None:
        super().__init__()
        self.in_features = inputs + terms
        self.inputs = inputs
        self.linear = nn.Linear(inputs, 1, bias=False) if inputs else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, columns: Tensor) -> Tensor:
        """Return logits ``[B, 1]`` from ``[B, inputs + terms]``."""
        logits = columns[:, self.inputs :].sum(1, keepdim=True) + self.bias
        if self.linear is None:
            return logits
        return logits + functional.linear(columns[:, : self.inputs], self.linear.weight)
