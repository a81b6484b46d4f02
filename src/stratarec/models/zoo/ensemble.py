"""An ensemble in one network: parallel members of several kinds, each with its own vectors, weights
and loss.

Deep ensembles are from Lakshminarayanan et al. 2017 (arXiv 1612.01474). In TabM (Gorishniy et al.
2024, arXiv 2410.24210), members share each batch and one matrix product per layer, and beat single
networks of any width on small data. Numbers are encoded piecewise linearly between quantiles of the
training split (Gorishniy et al. 2022, arXiv 2203.05556, formula 1). So the effect of a number can
change its slope where there are many samples, as in trees. Members differ in their regularization
and in their initial weights. Which member is best depends on the log, so the weights of members are
chosen on the validation split (`training/steps/members.py`).

Shapes: B samples, K networks, M members that are trees, F_dense numbers, F vectors of sparse
features and histories, D width of a member's vector, Q bins of a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stratarec.kernels.members import MOST_DEVIATIONS, Group, Layout, Mask, member_logits
from stratarec.models.base import Score
from stratarec.models.layers import Dropout
from stratarec.models.request import Segments
from stratarec.models.zoo.config import EnsembleConfig, MemberKind
from stratarec.models.zoo.fields import Terms
from stratarec.models.zoo.trees import MEMBERS as TREE_MEMBERS
from stratarec.models.zoo.trees import TreeMembers

_LARGEST = 1e30

_MORE_DROPOUT, _MOST_DROPOUT = 3, 0.5
_FIELD_DROPOUT = 0.2
_NARROWER = 4


# Members that start as first-order models. They are better if there is little to learn; the other
# members are better if effects are sharp.
FIRST_ORDER = slice(1, None, 2)


class PiecewiseLinear(nn.Module):
    """Encoding of a number x: for each bin, the share of the bin that is below x (ones, a fraction,
    then zeros).

    `edges` are ``[F_dense, Q + 1]`` ascending quantiles, some of them equal for numbers with few
    values.
    """

    edges: Tensor

    def __init__(self, dense: int, bins: int) -> None:
        super().__init__()
        self.register_buffer("edges", torch.zeros(dense, bins + 1))

    def fault(self) -> str:
        """Check values, which may come from a file; return the fault, or an empty string."""
        return "quantiles that fall" if bool((self.edges.diff(dim=1) < 0).any()) else ""

    def forward(self, dense: Tensor) -> Tensor:
        """Encode ``[B, F_dense]`` as ``[B, F_dense, Q]``."""
        # Clamped, because differences between the largest float32 numbers are infinite.
        edges, dense = self.edges.clamp(-_LARGEST, _LARGEST), dense.clamp(-_LARGEST, _LARGEST)
        low, width = edges[:, :-1], edges.diff(dim=1)
        # A bin without width carries no information.
        scale = torch.where(width > 0, 1 / width.clamp_min(torch.finfo(width.dtype).tiny), 0.0)
        return ((dense.unsqueeze(2) - low) * scale).clamp(0, 1)


class MemberLinear(nn.Module):
    """A linear layer for each member.

    Initial weights are normal with variance 2 / inputs (He et al. 2015). In the last layer the
    variance is 1 / inputs, and the weights of first-order members are 0. Initial biases are 0.
    Narrow members do not use all hidden outputs: the weights of unused outputs are 0, and have no
    gradient behind the ReLU, so they stay 0.
    """

    def __init__(
        self, kinds: Sequence[MemberKind], inputs: int, outputs: int, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.first = first
        self.last = last
        self.weight = nn.Parameter(torch.empty(len(kinds), inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(len(kinds), 1, outputs))

    def draw(self, generator: torch.Generator) -> None:
        """Set initial weights."""
        for kind, weight in zip(self.kinds, self.weight, strict=True):
            inputs = len(weight) if self.first else _live(kind, len(weight))
            weight.normal_(0, math.sqrt((1 if self.last else 2) / max(inputs, 1)), generator=generator)
            if not self.last:
                weight[:, _live(kind, weight.shape[1]) :] = 0
        if self.last:
            self.weight[FIRST_ORDER] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[K, B, outputs]`` from ``[K, B, inputs]``."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class NumberVectors(nn.Module):
    """For each number and member: a vector, which is a rectified linear map of the number's bins,
    and a first-order weight.

    First-order members start with equal weights for all bins of a number, so its effect is at first
    a straight line.
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
        bins = self.weight.shape[1]
        self.weight.normal_(0, math.sqrt(1 / bins), generator=generator)
        lines = self.weight.view(*self.weight.shape[:2], self.members, -1)[:, :, FIRST_ORDER]
        lines.copy_(torch.empty_like(lines[:, :1]).normal_(0, 1.5 / bins, generator=generator))

    def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors ``[K, B, F_dense, D]`` and first-order terms ``[B, K]`` from numbers ``[B,
        F_dense]``.
        """
        bins = self.encode(dense)
        vectors = torch.baddbmm(self.bias, bins.transpose(0, 1), self.weight).relu()
        first = dense.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS) @ self.first
        return vectors.view(*vectors.shape[:2], self.members, -1).permute(2, 1, 0, 3), first


class MemberMean(Terms):
    """Weighted mean of the members' logits, with a bias for each network.

    Trees have no weight until weights are chosen on the validation split.
    """

    weights: Tensor

    def __init__(self, members: int, trees: int) -> None:
        super().__init__(0, members)
        self.bias = nn.Parameter(torch.zeros(members))
        self.register_buffer("weights", torch.tensor([1 / members] * members + [0.0] * trees))

    def fault(self) -> str:
        """Check values, which may come from a file; return the fault, or an empty string."""
        is_mean = bool((self.weights >= 0).all()) and abs(float(self.weights.sum()) - 1) < 1e-3
        return "" if is_mean else "weights of members that are negative or do not sum to 1"

    def forward(self, columns: Tensor) -> Tensor:
        """Return ``[B, 1]`` from the logits ``[B, K + M]`` of networks, with their biases, and
        trees.
        """
        return (columns * self.weights).sum(1, keepdim=True)


class EnsembleScore(Score):
    """logit_k = b_k + sum of member k's first-order terms + mlp_k(member k's vectors,
    concatenated).
    """

    config: ClassVar = EnsembleConfig
    out: MemberMean

    def __init__(self, config: EnsembleConfig, dense: int, features: int) -> None:
        super().__init__()
        self.members = config.members
        self.bins = config.bins
        self.width = config.embedding_dim
        self.numbers = NumberVectors(dense, config) if dense else None
        sizes = ((dense + features) * config.embedding_dim, *config.member_mlp, 1)
        last = len(config.member_mlp)
        self.layers = nn.ModuleList(
            MemberLinear(config.kinds, *pair, first=place == 0, last=place == last)
            for place, pair in enumerate(pairwise(sizes))
        )
        rates = [_dropout(kind, config.dropout) for kind in config.kinds]
        self.dropouts = nn.ModuleList(Dropout(rates) for _ in config.member_mlp if any(rates))
        self.field_dropped = [member for member, kind in enumerate(config.kinds) if kind == "field_dropout"]
        self.field_dropout = Dropout(_FIELD_DROPOUT)
        self.dense = dense
        groups = [
            Group(first, last, tuple(_live(kind, size) for size in config.member_mlp))
            for kind, first, last in _alike(config.kinds)
        ]
        self._layout = Layout(self.width, groups, self.field_dropped)
        self.trees = TreeMembers(config.trees) if config.trees else None
        self.out = MemberMean(config.members, TREE_MEMBERS if config.trees else 0)
        self.separate = False
        """Whether logits of all members are returned outside training, too."""

    def set_quantiles(self, quantiles: Tensor) -> None:
        """Set the ``[F_dense, Q + 1]`` quantiles that encode numbers."""
        assert self.numbers is not None
        self.numbers.encode.edges.copy_(quantiles)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        """Return logits ``[B]``; in training ``[B, K]`` of all networks, and if `separate` is set
        also those of trees.

        Outside training, `dense` ends with the logits of trees.
        """
        dense, trees = dense[:, : self.dense], dense[:, self.dense :]
        vectors = vectors if segments is None else segments.expand(vectors)
        if self.training and self._is_plain(vectors):
            return self._training_logits(dense, vectors)
        rows = vectors.view(*vectors.shape[:2], self.members, self.width + 1)
        first, fields = rows[..., -1].sum(1), rows[..., :-1].permute(2, 0, 1, 3)
        size, features = len(rows), dense.shape[1] + rows.shape[1]
        masks: dict[int, Tensor] = {}
        if self.training:
            field_masks = self.field_dropout(rows.new_ones(len(self.field_dropped), size, features))
            masks = dict(zip(self.field_dropped, field_masks, strict=True))
        for member, factors in masks.items():
            first[:, member] = (rows[:, :, member, -1] * factors[:, dense.shape[1] :]).sum(1)
        if self.numbers is not None:
            of_numbers, linear = self.numbers(dense)
            fields, first = torch.cat([of_numbers.to(fields.dtype), fields], dim=2), first + linear
        hidden = fields.contiguous().flatten(2)
        for member, factors in masks.items():
            hidden[member].view(size, features, self.width).mul_(factors.unsqueeze(2))
        for place, layer in enumerate(self.layers[:-1]):
            hidden = layer(hidden)
            if len(self.dropouts):
                hidden = self.dropouts[place](hidden)
            # After dropout and in place, with the same bits: fewer passes over memory.
            hidden = hidden.relu_()
        logits: Tensor = (first + self.layers[-1](hidden).squeeze(2).t()).float() + self.out.bias
        if self.training:
            return logits
        logits = torch.cat([logits, trees], dim=1)
        return logits if self.separate else self.out(logits).squeeze(1)

    def _is_plain(self, vectors: Tensor) -> bool:
        """Whether `member_logits` can compute the networks: in float32 on the CPU."""
        kinds, is_cast = {vectors.dtype, self.out.bias.dtype}, torch.is_autocast_enabled("cpu")
        return vectors.device.type == "cpu" and kinds == {torch.float32} and not is_cast

    def _training_logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Compute `forward` in training by a single operation, with the same masks."""
        layers: list[Any] = list(self.layers)
        dropouts: list[Any] = list(self.dropouts)
        size, none, numbers = len(dense), vectors.new_empty(0), self.numbers
        fields = self.field_dropout.bits(len(self.field_dropped), size, self.dense + vectors.shape[1])
        masks = [
            Mask(dropout.bits(size, layer.weight.shape[2]), *dropout.limits)
            for dropout, layer in zip(dropouts, layers, strict=False)
        ]
        edges = none.view(0, 1) if numbers is None else numbers.encode.edges
        of_numbers = (
            (none, none, none) if numbers is None else (numbers.weight, numbers.bias, numbers.first)
        )
        weights = (weight for layer in layers for weight in (layer.weight, layer.bias))
        logits = member_logits(
            self._layout,
            Mask(fields, *self.field_dropout.limits),
            masks,
            edges,
            dense,
            vectors,
            *of_numbers,
            *weights,
        )
        return logits + self.out.bias

    def by_member(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return a view ``[K, ...]`` of a tensor of this score; None for a tensor that members
        share.
        """
        if name == "numbers.first":
            return tensor.t()
        if name in ("numbers.weight", "numbers.bias"):
            return tensor.view(*tensor.shape[:2], self.members, self.width).movedim(2, 0)
        return tensor if name.startswith("layers.") or name == "out.bias" else None


def _dropout(kind: MemberKind, rate: float) -> float:
    if kind == "narrow":
        return 0.0
    return min(_MORE_DROPOUT * rate, max(_MOST_DROPOUT, rate)) if kind == "dropout" else rate


def _alike(kinds: Sequence[MemberKind]) -> list[tuple[MemberKind, int, int]]:
    """Return a kind, first and last member of each group of adjacent members that use equally many
    hidden outputs.
    """
    groups, first = [], 0
    for _, members in groupby(kinds, lambda kind: kind == "narrow"):
        kind, *others = members
        groups.append((kind, first, first + 1 + len(others)))
        first = groups[-1][2]
    return groups


def _live(kind: MemberKind, outputs: int) -> int:
    """Return how many of a hidden layer's outputs a member of this kind uses."""
    return -(-outputs // _NARROWER) if kind == "narrow" else outputs
