"""An ensemble in one network: members side by side, each with vectors, weights and a loss of its own.

Deep ensembles are Lakshminarayanan et al. 2017 (arXiv 1612.01474); members that share a batch and one product a layer,
and are better with small data than one network of any width, are TabM (Gorishniy et al. 2024, arXiv 2410.24210).
Numbers are encoded piecewise linearly between quantiles of the training split (Gorishniy et al. 2022, arXiv 2203.05556,
formula 1), so that a number's effect may bend where the data lie, as a tree's may.

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
from stratarec.models.layers import check_sizes
from stratarec.models.regularization import Dropout
from stratarec.models.runs import Runs
from stratarec.models.zoo.fields import Terms

# Of standardised numbers: further out one says no more, as one of a million would decide alone.
_MOST_DEVIATIONS = 8.0
_LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(VectorsConfig):
    """Sizes of an ensemble. A row has the vectors of all members, and a first-order weight for each."""

    kind: Literal["ensemble"] = "ensemble"
    layer_counts: ClassVar[tuple[str, ...]] = ("members",)
    one_label: ClassVar[bool] = True
    embedding_dim: int = 8
    """D, width of a member's vectors."""
    members: int = 8
    """K; a log loss of each is what training makes smaller, and the mean of their logits is the score."""
    member_mlp: tuple[int, ...] = (128, 64)
    """Hidden sizes of each member's network."""
    bins: int = 32
    """Q, pieces of the line that a number's effect is made of, between as many quantiles."""
    dropout: float = 0.1
    initial_rows: float = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("member_mlp", self.member_mlp, least=1)
        for name in ("members", "bins"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}, expected at least 1")
        if self.batch_norm:
            raise ConfigError("model.batch_norm is true, which an ensemble has not: set it to false")

    @property
    def vector_width(self) -> int:
        """Of a row: every member's vector with its first-order weight behind it."""
        return self.members * (self.embedding_dim + 1)


def _plain(members: int) -> int:
    """How many members begin as their first-order weights alone, and bend from there: they are best where there is
    little to learn, the others where effects are sharp, and their mean is near the better ones."""
    return members // 2


class PiecewiseLinear(nn.Module):
    """x -> for each bin the share of it that lies below x: 1s, then a fraction, then 0s."""

    edges: Tensor
    """``[F_dense, Q + 1]`` quantiles, ascending; of a number that has few values some are equal."""

    def __init__(self, dense: int, bins: int) -> None:
        super().__init__()
        self.register_buffer("edges", torch.zeros(dense, bins + 1))

    def forward(self, dense: Tensor) -> Tensor:
        """``[B, F_dense]`` -> ``[B, F_dense, Q]``."""
        # What is as large as float32 allows would have an infinite width.
        edges, dense = self.edges.clamp(-_LARGEST, _LARGEST), dense.clamp(-_LARGEST, _LARGEST)
        low, width = edges[:, :-1], edges.diff(dim=1)
        # A bin without width tells nothing.
        scale = torch.where(width > 0, 1 / width.clamp_min(torch.finfo(width.dtype).tiny), 0.0)
        return ((dense.unsqueeze(2) - low) * scale).clamp(0, 1)


class MemberLinear(nn.Module):
    """A linear layer for each member; first weights normal with variance 2 / inputs (He et al. 2015), and half of that
    before the logit, where those of plain members are 0; no biases at first."""

    def __init__(self, members: int, inputs: int, outputs: int, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def draw(self, generator: torch.Generator) -> None:
        """Set first weights."""
        members, inputs, _ = self.weight.shape
        self.weight.normal_(0, math.sqrt((1 if self.last else 2) / max(inputs, 1)), generator=generator)
        if self.last:
            self.weight[: _plain(members)] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """``[K, B, inputs]`` -> ``[K, B, outputs]``."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class NumberVectors(nn.Module):
    """Of each number a vector a member, a rectified line of its bins, and a first-order weight a member.

    For plain members first weights are the same for all bins of a number: what begins as a line in its rank is bent
    where data ask for it.
    """

    def __init__(self, dense: int, config: EnsembleConfig) -> None:
        super().__init__()
        self.members = config.members
        self.encode = PiecewiseLinear(dense, config.bins)
        self.weight = nn.Parameter(torch.empty(dense, config.bins, config.members * config.embedding_dim))
        self.bias = nn.Parameter(torch.zeros(dense, 1, config.members * config.embedding_dim))
        self.first = nn.Parameter(torch.zeros(dense, config.members))

    def draw(self, generator: torch.Generator) -> None:
        """Set first weights."""
        numbers, bins, width = self.weight.shape
        plain = width // self.members * _plain(self.members)
        self.weight.normal_(0, math.sqrt(1 / bins), generator=generator)
        self.weight[..., :plain] = torch.empty(numbers, 1, plain).normal_(0, 1.5 / bins, generator=generator)

    def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, F_dense]`` -> ``[K, B, F_dense, D]`` and ``[B, K]``."""
        bins = self.encode(dense)
        vectors = torch.baddbmm(self.bias, bins.transpose(0, 1), self.weight).relu()
        first = dense.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS) @ self.first
        return vectors.view(*vectors.shape[:2], self.members, -1).permute(2, 1, 0, 3), first


class EnsembleScore(Score):
    """logit_k = b + sum of member k's first-order weights + mlp_k(all of member k's vectors side by side)."""

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
        """Encode numbers by these ``[F_dense, Q + 1]``."""
        assert self.numbers is not None
        self.numbers.encode.edges.copy_(quantiles)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        """See `Score`; in training the logits ``[B, K]`` of all members."""
        vectors = vectors if runs is None else runs.expand(vectors)
        own = vectors.view(*vectors.shape[:2], self.members, self.width + 1)
        first, fields = own[..., -1].sum(1), own[..., :-1].permute(2, 0, 1, 3)
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
