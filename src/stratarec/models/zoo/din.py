"""Deep interest network (Zhou et al. 2018, arXiv 1706.06978): histories are weighted by the
candidate.

The attention is `history.TargetAttention`, followed by a deep network on all vectors. Its
activations are ReLU; the paper also has an adaptive one (Dice).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from stratarec.models.base import Score
from stratarec.models.request import Segments
from stratarec.models.zoo.config import DINConfig
from stratarec.models.zoo.fields import Fields


class DINScore(Score):
    """logit = b + w · deep([v_1, ..., v_n])."""

    config: ClassVar = DINConfig
    captured = True

    def __init__(self, config: DINConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.embedding_dim)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = nn.Linear(self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        return self.logits(self.fields.parts(dense, vectors, segments).apply(self.deep))
