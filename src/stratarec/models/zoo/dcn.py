"""DCN V2 (Wang et al. 2021, arXiv 2008.13535): explicit crosses of all features, before or parallel
to a deep network.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from stratarec.models.base import Score
from stratarec.models.layers import Cross
from stratarec.models.request import Segments
from stratarec.models.towers import CrossTower
from stratarec.models.zoo.config import DCNv2Config


class DCNv2Score(Score):
    """logit = b + w · [cross(x), deep(x)], or b + w · deep(cross(x)), where x is the concatenation
    of all inputs.
    """

    config: ClassVar = DCNv2Config
    captured = True
    tower = CrossTower

    def __init__(self, config: DCNv2Config, dense: int, features: int, numbers: int = 0) -> None:
        super().__init__()
        width = dense + features * config.embedding_dim + numbers
        self.stacked = config.structure == "stacked"
        self.cross = Cross(width, config.cross_layers, config.low_rank)
        self.deep = config.mlp(width, config.deep_mlp)
        self.out = nn.Linear(self.deep.outputs + (0 if self.stacked else width), 1)

    def forward(
        self,
        dense: Tensor,
        vectors: Tensor,
        segments: Segments | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        vectors = vectors if segments is None else segments.expand(vectors)
        parts = [dense, vectors.flatten(1).to(dense.dtype)]
        start = torch.cat(parts if numbers is None else [*parts, numbers.to(dense.dtype)], dim=1)
        crossed = self.cross(start)
        last = self.deep(crossed if self.stacked else start)
        if not self.stacked:
            last = torch.cat([crossed.to(last.dtype), last], dim=1)
        return self.logits(last)
