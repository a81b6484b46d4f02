"""Deep interest network (Zhou et al. 2018, arXiv 1706.06978): histories are weighted by the candidate.

The attention is `history.TargetAttention`, followed by a deep network on all vectors. Its activations are ReLU; the
paper also has an adaptive one (Dice).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor, nn

from stratarec.models.base import Score, VectorsConfig
from stratarec.models.history import HistoryConfig
from stratarec.models.layers import check_sizes
from stratarec.models.request import Runs
from stratarec.models.zoo.fields import Fields


@dataclass(frozen=True, kw_only=True)
class DINConfig(VectorsConfig):
    """Sizes of a deep interest network."""

    kind: Literal["din"] = "din"
    history: HistoryConfig = field(default_factory=partial(HistoryConfig, pooling="target_attention"))
    """Pooling of histories and sequences, by default target attention."""
    deep_mlp: tuple[int, ...] = (200, 80)
    """Hidden sizes of the deep network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("deep_mlp", self.deep_mlp, least=1)


class DINScore(Score):
    """logit = b + w · deep([v_1, ..., v_n])."""

    config: ClassVar = DINConfig

    def __init__(self, config: DINConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.embedding_dim)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = nn.Linear(self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        return self.logits(self.fields.parts(dense, vectors, runs).apply(self.deep))
