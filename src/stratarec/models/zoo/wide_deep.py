"""Wide & Deep (Cheng et al. 2016, arXiv 1606.07792): first-order weights and a deep network.

The wide part is linear in the features of the data; crossed features must be columns of the data.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import WideDeepConfig
from stratarec.models.zoo.fields import Fields, Terms


class WideDeepScore(Score):
    """logit = b + sum_i w_i x_i + w · deep([x_1 v_1, ..., x_n v_n])."""

    config: ClassVar = WideDeepConfig

    def __init__(self, config: WideDeepConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        fields = self.fields.parts(dense, vectors, runs)
        deep, first = fields.columns(0, -1).apply(self.deep), fields.columns(-1, None).sum()
        return self.logits(torch.cat([deep.to(first.dtype), first], dim=1))
