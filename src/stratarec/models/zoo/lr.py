"""Logistic regression, one weight for every value of every feature (Richardson et al. 2007)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import LRConfig
from stratarec.models.zoo.fields import Fields, Terms


class LRScore(Score):
    """logit = b + sum over dense i of w_i x_i + sum over values of their weights."""

    config: ClassVar = LRConfig

    def __init__(self, config: LRConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, 1, first_order=True)
        self.out = Terms(0, self.fields.count)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        return self.logits(self.fields(dense, vectors, runs).squeeze(2))
