"""DCN V2 (Wang et al. 2021, arXiv 2008.13535): explicit crosses of all features, before or parallel to a deep
network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.layers import Cross, check_sizes
from stratarec.models.request import Runs


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(VectorsConfig):
    """Sizes of a DCN V2."""

    kind: Literal["dcnv2"] = "dcnv2"
    layer_counts: ClassVar = ("cross_layers",)
    structure: Literal["stacked", "parallel"] = "parallel"
    """``stacked``: the deep network follows the crosses; ``parallel``: both use the input and are joined at the end."""
    cross_layers: int = 3
    """Number of cross layers; n layers give crosses of up to n + 1 features."""
    low_rank: int = 0
    """Rank of the cross matrices, U V^T; 0 for full matrices."""
    deep_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the deep network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("deep_mlp", self.deep_mlp)
        if self.cross_layers < 1:
            raise ConfigError(f"model.cross_layers is {self.cross_layers}, expected at least 1")
        if self.low_rank < 0:
            raise ConfigError(f"model.low_rank is {self.low_rank}, expected 0 or more")


class DCNv2Score(Score):
    """logit = b + w · [cross(x), deep(x)], or b + w · deep(cross(x)), where x is the concatenation of all inputs."""

    config: ClassVar = DCNv2Config

    def __init__(self, config: DCNv2Config, dense: int, features: int, numbers: int = 0) -> None:
        super().__init__()
        width = dense + features * config.embedding_dim + numbers
        self.stacked = config.structure == "stacked"
        self.cross = Cross(width, config.cross_layers, config.low_rank)
        self.deep = config.mlp(width, config.deep_mlp)
        self.out = nn.Linear(self.deep.outputs + (0 if self.stacked else width), 1)

    def forward(
        self, dense: Tensor, vectors: Tensor, runs: Runs | None = None, numbers: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        vectors = vectors if runs is None else runs.expand(vectors)
        parts = [dense, vectors.flatten(1).to(dense.dtype)]
        start = torch.cat(parts if numbers is None else [*parts, numbers.to(dense.dtype)], dim=1)
        crossed = self.cross(start)
        last = self.deep(crossed if self.stacked else start)
        if not self.stacked:
            last = torch.cat([crossed.to(last.dtype), last], dim=1)
        return self.logits(last)
