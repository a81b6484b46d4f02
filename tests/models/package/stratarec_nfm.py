"""Neural factorization machine (He and Chua 2017, arXiv 1708.05027)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stratarec.models import Fields, Score, Segments, Terms, VectorsConfig


@dataclass(frozen=True, kw_only=True)
class NFMConfig(VectorsConfig):
    """Recipe fields of an nfm, in addition to those of every model."""

    kind: Literal["nfm"] = "nfm"
    first_order: ClassVar[bool] = True
    default_overrides: ClassVar[dict[str, str]] = {"train.embedding.kind": "adagrad"}
    initial_rows: float = 0.05
    deep_mlp: tuple[int, ...] = (64,)
    """Hidden sizes."""


class NFMScore(Score):
    """logit = b + sum_i w_i x_i + w · deep(1/2 ((sum_i v_i x_i)^2 - sum_i (v_i x_i)^2))."""

    config: ClassVar = NFMConfig

    def __init__(self, config: NFMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True)
        self.deep = config.mlp(config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, segments: Segments | None = None) -> Tensor:
        fields = self.fields.parts(dense, vectors, segments)
        total, squares = fields.sum(), fields.square_sum()
        pairs = 0.5 * (total[:, :-1].square() - squares[:, :-1])
        return self.logits(torch.cat([self.deep(pairs).float(), total[:, -1:]], dim=1))
