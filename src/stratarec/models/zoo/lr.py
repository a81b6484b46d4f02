"""Logistic regression, one weight for every value of every feature (Richardson et al. 2007)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.request import Runs
from stratarec.models.zoo.fields import SHALLOW, Fields, Terms


@dataclass(frozen=True, kw_only=True)
class LRConfig(VectorsConfig):
    """Settings of a logistic regression, whose tables have one weight per value."""

    kind: Literal["lr"] = "lr"
    # High learning rates, because there is no network: with the usual rates, weights hardly leave 0.
    default_overrides: ClassVar = {**SHALLOW, "train.dense.learning_rate": 0.02, "train.embedding.learning_rate": 0.1}
    embedding_dim: int = 1
    """Must be 1, the width of a weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim != 1:
            raise ConfigError(
                f"model.embedding_dim is {self.embedding_dim}, expected 1: model.kind lr has one weight per value"
            )


class LRScore(Score):
    """logit = b + sum over dense i of w_i x_i + sum over values of their weights."""

    config: ClassVar = LRConfig

    def __init__(self, config: LRConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, 1, first_order=True)
        self.out = Terms(0, self.fields.count)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        return self.logits(self.fields(dense, vectors, runs).squeeze(2))
