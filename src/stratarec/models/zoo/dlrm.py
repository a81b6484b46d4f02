"""DLRM (Naumov et al. 2019, arXiv 1906.00091): a bottom MLP, dot products of pairs of vectors, and
a top MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.kernels.interaction import dot_interaction, segment_interaction, split_columns
from stratarec.models.base import Score
from stratarec.models.request import Segments, chosen
from stratarec.models.towers import DotTower
from stratarec.models.zoo.config import DLRMConfig


class DLRMScore(Score):
    """logit = b + w · top(bottom(dense), interactions of all vectors); products of shared vectors
    are computed once.
    """

    config: ClassVar = DLRMConfig
    captured = True
    tower = DotTower

    def __init__(self, config: DLRMConfig, dense: int, features: int, numbers: int = 0) -> None:
        super().__init__()
        width = config.embedding_dim
        self.dot = config.interaction == "dot"
        self.bottom = config.mlp(dense, config.bottom_mlp, last=width) if dense else None
        count = features + (dense > 0)
        if count < (2 if self.dot else 1) and not numbers:
            raise ConfigError(
                "model.kind dlrm needs at least two vectors to interact; the data has too few features"
            )
        interactions = (width if dense else 0) + count * (count - 1) // 2 if self.dot else count * width
        self.top = config.mlp(numbers + interactions, config.top_mlp)
        self.out = nn.Linear(self.top.outputs, 1)

    def forward(
        self,
        dense: Tensor,
        vectors: Tensor,
        segments: Segments | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        front = None if self.bottom is None else self.bottom(dense)
        if segments is None or numbers is not None or not len(self.top):
            vectors = vectors if segments is None else segments.expand(vectors)
            crossed = dot_interaction(front, vectors) if self.dot else _joined(front, vectors)
            top = self.top(crossed if numbers is None else torch.cat([numbers, crossed], dim=1))
        else:
            of_segments, split = (
                (segment_interaction, split_columns) if self.dot else (_segment_joined, _split_joined)
            )
            columns = split(segments.shared, dense=front is not None, width=vectors.shape[2])
            inputs = of_segments(front, vectors, segments.shared, segments.starts)
            top = self.top.of_segments(*inputs, columns, segments.starts)
        return self.logits(top)


def _joined(dense: Tensor | None, vectors: Tensor) -> Tensor:
    """Return the inputs of `dot_interaction`, concatenated to ``[B, .]``."""
    flat = vectors.flatten(1)
    return flat if dense is None else torch.cat([dense.to(flat.dtype), flat], dim=1)


def _segment_joined(
    dense: Tensor | None, vectors: Tensor, shared: Sequence[bool], starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the columns of `_joined` as two tensors, per sample and per segment, like
    `segment_interaction`.
    """
    per_sample, per_segment = (
        [i for i, flag in enumerate(shared) if flag == value] for value in (False, True)
    )
    return _joined(dense, chosen(vectors, per_sample)), chosen(
        vectors[: len(starts) - 1], per_segment
    ).flatten(1)


def _split_joined(shared: Sequence[bool], *, dense: bool, width: int) -> tuple[Tensor, Tensor]:
    """Return, for each output of `_segment_joined`, the positions of its columns in the output of
    `_joined`.
    """
    of_segment = torch.tensor([*[False] * dense, *shared]).repeat_interleave(width)
    return (~of_segment).nonzero().squeeze(1), of_segment.nonzero().squeeze(1)
