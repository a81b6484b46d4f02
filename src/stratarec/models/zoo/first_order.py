"""Models whose logit contains a first-order weight of every feature, as the last column of its row.

- Logistic regression (Richardson et al. 2007) has nothing else.
- A factorization machine (Rendle 2010) adds products of all pairs, in time linear in the features.
- Wide & Deep (Cheng et al. 2016, arXiv 1606.07792) adds a deep network. Its wide part is linear in
  the features of the data; crossed features must be columns of the data.
- DeepFM (Guo et al. 2017, arXiv 1703.04247) adds products and a deep network on the same vectors.

Shapes: B samples, D width of a vector.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.request import Segments
from stratarec.models.zoo.config import DeepFMConfig, FMConfig, LRConfig, WideDeepConfig
from stratarec.models.zoo.fields import Fields, Parts, Terms


class LRScore(Score):
    """logit = b + sum over dense i of w_i x_i + sum over values of their weights."""

    config: ClassVar = LRConfig

    def __init__(self, config: LRConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, 1, first_order=True)
        self.out = Terms(0, self.fields.count)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        return self.logits(self.fields(dense, vectors, segments).squeeze(2))


class FMScore(Score):
    """logit = b + sum_i w_i x_i + sum over i < j of <v_i, v_j> x_i x_j.

    The sum over pairs is half of (square of the sum - sum of squares), so shared vectors are summed
    once per segment.
    """

    config: ClassVar = FMConfig

    def __init__(self, config: FMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(
            dense, features, config.vector_width, first_order=True, deviation=config.initial_rows
        )
        self.out = Terms(0, 1 + config.embedding_dim)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        return self.logits(fm_terms(self.fields.parts(dense, vectors, segments)))


def fm_terms(fields: Parts) -> Tensor:
    """Return the terms of a factorization machine, ``[B, D + 1]``.

    Column d < D is the sum of x_i[d] x_j[d] over all pairs of fields. The last column is the sum of
    first-order terms.
    """
    total = fields.sum()
    pairs = 0.5 * (total[:, :-1].square() - fields.columns(0, -1).square_sum())
    return torch.cat([pairs, total[:, -1:]], dim=1)


class WideDeepScore(Score):
    """logit = b + sum_i w_i x_i + w · deep([x_1 v_1, ..., x_n v_n])."""

    config: ClassVar = WideDeepConfig

    def __init__(self, config: WideDeepConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        fields = self.fields.parts(dense, vectors, segments)
        deep, first = fields.columns(0, -1).apply(self.deep), fields.columns(-1, None).sum()
        return self.logits(torch.cat([deep.to(first.dtype), first], dim=1))


class DeepFMScore(Score):
    """logit = b + sum_i w_i x_i + sum over i < j of <v_i, v_j> x_i x_j + w · deep([x_1 v_1, ...,
    x_n v_n]).
    """

    config: ClassVar = DeepFMConfig
    captured = True

    def __init__(self, config: DeepFMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(
            dense, features, config.vector_width, first_order=True, deviation=config.initial_rows
        )
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.deep.outputs, 1 + config.embedding_dim)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        fields = self.fields.parts(dense, vectors, segments)
        deep, terms = fields.columns(0, -1).apply(self.deep), fm_terms(fields)
        return self.logits(torch.cat([deep.to(terms.dtype), terms], dim=1))
