"""An ensemble in one network: parallel members, each with its own vectors, weights and loss.

Deep ensembles are from Lakshminarayanan et al. 2017 (arXiv 1612.01474). Members that share a batch and one product a
layer, and beat single networks of any width on small data, are from TabM (Gorishniy et al. 2024, arXiv 2410.24210).
Numbers are encoded piecewise linearly between quantiles of the training split (Gorishniy et al. 2022, arXiv 2203.05556,
formula 1), so that a number's effect may bend where the data are, as in trees.

Shapes: B samples, K members, F_dense numbers, F vectors of sparse features and histories, D width of a member's vector,
Q bins of a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.layers import Dropout, check_sizes
from stratarec.models.request import Runs
from stratarec.models.zoo.fields import Terms

# Limit of standardised numbers, as a single extreme number would otherwise decide the score.
_MOST_DEVIATIONS = 8.0
_LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(VectorsConfig):
    """Sizes of an ensemble. A row holds a vector and a first-order weight for each member."""

    kind: Literal["ensemble"] = "ensemble"
    layer_counts: ClassVar[tuple[str, ...]] = ("members",)
    one_label: ClassVar[bool] = True
    embedding_dim: int = 8
    """D, width of a member's vectors."""
    members: int = 8
    """K; training minimizes the log loss of each member, and the score is the mean of their logits."""
    member_mlp: tuple[int, ...] = (128, 64)
    """Hidden sizes of each member's network."""
    bins: int = 32
    """Q, pieces of a number's piecewise linear effect, between quantiles."""
    dropout: float = 0.1
    initial_rows: float = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("member_mlp", self.member_mlp, least=1)
        for name in ("members", "bins"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}, expected at least 1")
        if self.batch_norm:
            raise ConfigError("ensemble does not support model.batch_norm; set it to false")

    @property
    def vector_width(self) -> int:
        """Width of a row: every member's vector, followed by its first-order weight."""
        return self.members * (self.embedding_dim + 1)


def _first_order_members(members: int) -> int:
    """Return the number of members that start as first-order models.

    They are better where there is little to learn, the others where effects are sharp; the mean is close to the better.
    """
    return members // 2


class PiecewiseLinear(nn.Module):
    """Encoding of x by the share of each bin below x: ones, a fraction, then zeros.

    `edges` are ``[F_dense, Q + 1]`` ascending quantiles, some of them equal for numbers with few values.
    """

    edges: Tensor

    def __init__(self, dense: int, bins: int) -> None:
        super().__init__()
        self.register_buffer("edges", torch.zeros(dense, bins + 1))

    def forward(self, dense: Tensor) -> Tensor:
        """Encode ``[B, F_dense]`` as ``[B, F_dense, Q]``."""
        # Clamped, as differences of the largest float32 are infinite.
        edges, dense = self.edges.clamp(-_LARGEST, _LARGEST), dense.clamp(-_LARGEST, _LARGEST)
        low, width = edges[:, :-1], edges.diff(dim=1)
        # A bin without width carries no information.
        scale = torch.where(width > 0, 1 / width.clamp_min(torch.finfo(width.dtype).tiny), 0.0)
        return ((dense.unsqueeze(2) - low) * scale).clamp(0, 1)


class MemberLinear(nn.Module):
    """A linear layer for each member.

    Initial weights are normal with variance 2 / inputs (He et al. 2015), and half of that in the last layer, where
    those of first-order members are 0; initial biases are 0.
    """

    def __init__(self, members: int, inputs: int, outputs: int, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def draw(self, generator: torch.Generator) -> None:
        """Set initial weights."""
        members, inputs, _ = self.weight.shape
        self.weight.normal_(0, math.sqrt((1 if self.last else 2) / max(inputs, 1)), generator=generator)
        if self.last:
            self.weight[: _first_order_members(members)] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[K, B, outputs]`` of ``[K, B, inputs]``."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class NumberVectors(nn.Module):
    """For each number and member a vector, which is a rectified linear map of its bins, and a first-order weight.

    First-order members start with equal weights for all bins of a number, a line that training may bend.
    """

    def __init__(self, dense: int, config: EnsembleConfig) -> None:
        super().__init__()
        self.members = config.members
        self.encode = PiecewiseLinear(dense, config.bins)
        self.weight = nn.Parameter(torch.empty(dense, config.bins, config.members * config.embedding_dim))
        self.bias = nn.Parameter(torch.zeros(dense, 1, config.members * config.embedding_dim))
        self.first = nn.Parameter(torch.zeros(dense, config.members))

    def draw(self, generator: torch.Generator) -> None:
        """Set initial weights."""
        numbers, bins, width = self.weight.shape
        plain = width // self.members * _first_order_members(self.members)
        self.weight.normal_(0, math.sqrt(1 / bins), generator=generator)
        self.weight[..., :plain] = torch.empty(numbers, 1, plain).normal_(0, 1.5 / bins, generator=generator)

    def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[K, B, F_dense, D]`` vectors and ``[B, K]`` first-order terms of ``[B, F_dense]``."""
        bins = self.encode(dense)
        vectors = torch.baddbmm(self.bias, bins.transpose(0, 1), self.weight).relu()
        first = dense.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS) @ self.first
        return vectors.view(*vectors.shape[:2], self.members, -1).permute(2, 1, 0, 3), first


class EnsembleScore(Score):
    """logit_k = b + sum of member k's first-order weights + mlp_k(member k's vectors side by side)."""

    config: ClassVar = EnsembleConfig

    def __init__(self, config: EnsembleConfig, dense: int, features: int) -> None:
        super().__init__()
        self.members, self.bins, self.width = config.members, config.bins, config.embedding_dim
        self.numbers = NumberVectors(dense, config) if dense else None
        sizes = ((dense + features) * config.embedding_dim, *config.member_mlp, 1)
        last = len(config.member_mlp)
        self.layers = nn.ModuleList(
            MemberLinear(config.members, *pair, last=place == last) for place, pair in enumerate(pairwise(sizes))
        )
        self.dropouts = nn.ModuleList(Dropout(config.dropout, shared=True) for _ in config.member_mlp if config.dropout)
        self.out = Terms(0, 1)

    def set_quantiles(self, quantiles: Tensor) -> None:
        """Set the ``[F_dense, Q + 1]`` quantiles that encode numbers."""
        assert self.numbers is not None
        self.numbers.encode.edges.copy_(quantiles)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """Return logits ``[B]``, or in training ``[B, K]`` of all members."""
        vectors = vectors if runs is None else runs.expand(vectors)
        rows = vectors.view(*vectors.shape[:2], self.members, self.width + 1)
        first, fields = rows[..., -1].sum(1), rows[..., :-1].permute(2, 0, 1, 3)
        if self.numbers is not None:
            of_numbers, linear = self.numbers(dense)
            fields, first = torch.cat([of_numbers.to(fields.dtype), fields], dim=2), first + linear
        hidden = fields.flatten(2)
        for place, layer in enumerate(self.layers[:-1]):
            hidden = layer(hidden).relu()
            if len(self.dropouts):
                hidden = self.dropouts[place](hidden)
        logits = (first + self.layers[-1](hidden).squeeze(2).t()).float()
        if self.training:
            members: Tensor = logits + self.out.bias
            return members
        scores: Tensor = self.out(logits.mean(1, keepdim=True))
        return scores.squeeze(1)
