"""AutoInt (Song et al. 2019, arXiv 1810.11921): several layers of self-attention over fields.

Shapes: B samples, F fields, D width, A width of all attention heads together.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import AutoIntConfig
from stratarec.models.zoo.fields import Fields


class Interacting(nn.Module):
    """e_m' = relu([head_1, ...] + R e_m), with head = sum over k of softmax_k(<Q e_m, K e_k>) V e_k (section 4.4)."""

    def __init__(self, width: int, config: AutoIntConfig) -> None:
        super().__init__()
        size = config.attention_dim
        self.heads = config.attention_heads
        self.scale = (size // self.heads) ** -0.5 if config.scaled else 1.0
        self.project = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(3))
        self.residual = nn.Linear(width, size, bias=False)
        self.norm = nn.LayerNorm(size) if config.layer_norm else None

    def forward(self, fields: Tensor) -> Tensor:
        """Return ``[B, F, A]`` from ``[B, F, .]``."""
        query, key, value = (self._by_head(project(fields)) for project in self.project)
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
        joined = mixed.transpose(1, 2).flatten(2) + self.residual(fields)
        return torch.relu(joined if self.norm is None else self.norm(joined))

    def _by_head(self, fields: Tensor) -> Tensor:
        return fields.view(*fields.shape[:2], self.heads, -1).transpose(1, 2)


class AutoIntScore(Score):
    """logit = b + w · [outputs of the last attention layer, deep(fields)]."""

    config: ClassVar = AutoIntConfig
    captured = True

    def __init__(self, config: AutoIntConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.embedding_dim)
        widths = [config.embedding_dim, *[config.attention_dim] * (config.attention_layers - 1)]
        self.attention = nn.Sequential(*(Interacting(width, config) for width in widths))
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp) if config.deep_mlp else None
        deep_outputs = 0 if self.deep is None else self.deep.outputs
        self.out = nn.Linear(self.fields.count * config.attention_dim + deep_outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        fields = self.fields(dense, vectors, runs)
        last = self.attention(fields).flatten(1)
        if self.deep is not None:
            last = torch.cat([last, self.deep(fields.flatten(1)).to(last.dtype)], dim=1)
        return self.logits(last)
