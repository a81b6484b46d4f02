"""DLRM (Naumov et al. 2019, arXiv 1906.00091): bottom MLP, pairwise dots, top MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.kernels.interaction import dot_interaction, run_interaction, split_columns
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.layers import check_sizes
from stratarec.models.runs import Runs


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(VectorsConfig):
    """Sizes of a DLRM."""

    kind: Literal["dlrm"] = "dlrm"
    bottom_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes over the dense features; a last layer of `embedding_dim` follows."""
    top_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes over the interactions; a last layer of 1 follows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("bottom_mlp", self.bottom_mlp)
        check_sizes("top_mlp", self.top_mlp)


class DLRMScore(Score):
    """Dense ``[B, F_dense]`` and vectors ``[B, F, D]`` -> ``[B]``; products of a run's vectors are computed once."""

    config: ClassVar = DLRMConfig

    def __init__(self, config: DLRMConfig, dense: int, features: int, numbers: int = 0) -> None:
        super().__init__()
        width = config.embedding_dim
        self.bottom = config.mlp(dense, config.bottom_mlp, last=width) if dense else None
        count = features + (dense > 0)
        if count < 2 and not numbers:
            raise ConfigError("a dlrm needs at least two vectors to interact; this data has too few features")
        self.top = config.mlp(numbers + (width if dense else 0) + count * (count - 1) // 2, config.top_mlp)
        self.out = nn.Linear(self.top.outputs, 1)

    def forward(
        self, dense: Tensor, vectors: Tensor, runs: Runs | None = None, numbers: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        front = None if self.bottom is None else self.bottom(dense)
        if runs is None or numbers is not None or not len(self.top):
            crossed = dot_interaction(front, vectors if runs is None else runs.expand(vectors))
            top = self.top(crossed if numbers is None else torch.cat([numbers, crossed], dim=1))
        else:
            columns = split_columns(runs.shared, dense=front is not None, width=vectors.shape[2])
            top = self.top.of_runs(*run_interaction(front, vectors, runs.shared, runs.starts), columns, runs.starts)
        logits: Tensor = self.out(top)
        return logits.squeeze(-1)
