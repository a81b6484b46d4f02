"""xDeepFM (Lian et al. 2018, arXiv 1803.05170): a compressed interaction network with linear and deep parts.

Shapes: B samples, F fields, D width, H_k feature maps of layer k (H_0 = F).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import XDeepFMConfig
from stratarec.models.zoo.fields import Fields, Terms


class CIN(nn.Module):
    """X^k_h = sum over i, j of W^k_hij (X^{k-1}_i * X^0_j); every layer outputs its sums over D (section 3.1)."""

    def __init__(self, fields: int, layers: Sequence[int]) -> None:
        super().__init__()
        sizes = [fields, *layers]
        self.layers = nn.ModuleList(nn.Linear(size * fields, maps, bias=False) for size, maps in pairwise(sizes))
        self.outputs = sum(layers)

    def forward(self, fields: Tensor) -> Tensor:
        """Return ``[B, sum of H_k]`` float32 from ``[B, F, D]``."""
        start = fields.transpose(1, 2)
        maps, sums = start, []
        for layer in self.layers:
            maps = layer((maps.unsqueeze(3) * start.unsqueeze(2)).flatten(2)).to(fields.dtype)
            sums.append(maps.sum(1))
        return torch.cat(sums, dim=1)


class XDeepFMScore(Score):
    """logit = b + sum_i w_i x_i + u · cin([v_1, ..., v_n]) + w · deep([v_1, ..., v_n])."""

    config: ClassVar = XDeepFMConfig
    captured = True

    def __init__(self, config: XDeepFMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True, deviation=config.initial_rows)
        self.cin = CIN(self.fields.count, config.cin_layers)
        self.deep = config.mlp(self.fields.count * config.embedding_dim, config.deep_mlp)
        self.out = Terms(self.cin.outputs + self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        fields = self.fields(dense, vectors, runs)
        inner = fields[..., :-1].contiguous()
        parts = [self.cin(inner), self.deep(inner.flatten(1)).to(fields.dtype), fields[..., -1].sum(1, keepdim=True)]
        return self.logits(torch.cat(parts, dim=1))
