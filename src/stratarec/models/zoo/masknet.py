"""MaskNet (Wang et al. 2021, arXiv 2102.07619): masks computed from all features scale the columns.

Shapes: B samples, V columns of all fields, H width of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.layers import check_sizes
from stratarec.models.request import Runs
from stratarec.models.zoo.fields import Fields


@dataclass(frozen=True, kw_only=True)
class MaskNetConfig(VectorsConfig):
    """Sizes of a MaskNet."""

    kind: Literal["masknet"] = "masknet"
    layer_counts: ClassVar = ("blocks",)
    structure: Literal["serial", "parallel"] = "parallel"
    """``serial``: each block uses the output of the previous block; ``parallel``: all blocks use the vectors, and a
    deep network follows."""
    blocks: int = 3
    """Number of mask blocks."""
    block_width: int = 64
    """H, width of a block."""
    reduction: float = 2.0
    """Width of a mask's hidden layer, divided by the width of the mask."""
    field_norm: bool = True
    """Whether to normalize vectors before they are masked."""
    deep_mlp: tuple[int, ...] = (256, 128)
    """Hidden sizes of the deep network after parallel blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("deep_mlp", self.deep_mlp)
        for name in ("blocks", "block_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.reduction < math.inf:
            raise ConfigError(f"model.reduction is {self.reduction}, expected a finite number of more than 0")


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
