"""DeepFM (Guo et al. 2017, arXiv 1703.04247): a factorization machine and a deep network on the same vectors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import DeepFMConfig
from stratarec.models.zoo.fields import Fields, Terms
from stratarec.models.zoo.fm import fm_terms


class DeepFMScore(Score):
    """logit = b + sum_i w_i x_i + sum over i < j of <v_i, v_j> x_i x_j + w · deep([x_1 v_1, ..., x_n v_n])."""

    config: ClassVar = DeepFMConfig
    captured = True

    def __init__(self, config: DeepFMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True, deviation=config.initial_rows)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.deep.outputs, 1 + config.embedding_dim)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        fields = self.fields.parts(dense, vectors, runs)
        deep, terms = fields.columns(0, -1).apply(self.deep), fm_terms(fields)
        return self.logits(torch.cat([deep.to(terms.dtype), terms], dim=1))
