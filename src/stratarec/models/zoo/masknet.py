"""MaskNet (Wang et al. 2021, arXiv 2102.07619): masks computed from all features scale the columns.

Shapes: B samples, V columns of all fields, H width of a block.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import MaskNetConfig
from stratarec.models.zoo.fields import Fields


class MaskBlock(nn.Module):
    """relu(LN(W (mask * hidden))), mask = W_2 relu(W_1 V + b_1) + b_2 (sections 3.2 and 3.3)."""

    def __init__(self, inputs: int, hidden: int, config: MaskNetConfig) -> None:
        super().__init__()
        middle = max(int(hidden * config.reduction), 1)
        self.mask = nn.Sequential(nn.Linear(inputs, middle), nn.ReLU(inplace=True), nn.Linear(middle, hidden))
        self.hidden = nn.Linear(hidden, config.block_width, bias=False)
        self.norm = nn.LayerNorm(config.block_width)

    def forward(self, everything: Tensor, hidden: Tensor) -> Tensor:
        """Return ``[B, H]`` from the vectors ``[B, V]`` and the masked input ``[B, .]``."""
        return torch.relu(self.norm(self.hidden(self.mask(everything) * hidden)))


class MaskNetScore(Score):
    """logit = b + w · (last block) if serial, or b + w · deep(all blocks, concatenated) if parallel."""

    config: ClassVar = MaskNetConfig

    def __init__(self, config: MaskNetConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.embedding_dim)
        self.norm = nn.LayerNorm(config.embedding_dim) if config.field_norm else None
        inputs, width = self.fields.count * config.embedding_dim, config.block_width
        self.serial = config.structure == "serial"
        hidden = [inputs, *[width if self.serial else inputs] * (config.blocks - 1)]
        self.blocks = nn.ModuleList(MaskBlock(inputs, size, config) for size in hidden)
        self.deep = None if self.serial else config.mlp(config.blocks * width, config.deep_mlp)
        self.out = nn.Linear(width if self.deep is None else self.deep.outputs, 1)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        fields = self.fields(dense, vectors, runs)
        everything = fields.flatten(1)
        hidden = everything if self.norm is None else self.norm(fields).flatten(1)
        if self.deep is None:
            for block in self.blocks:
                hidden = block(everything, hidden)
        else:
            hidden = self.deep(torch.cat([block(everything, hidden) for block in self.blocks], dim=1))
        return self.logits(hidden)
