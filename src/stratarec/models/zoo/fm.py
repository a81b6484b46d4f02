"""Factorization machine (Rendle 2010): first-order weights and products of all pairs, in time linear in the features.

Shapes: B samples, D width of a vector; the first-order weight is one more column of a row.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratarec.models.base import Score
from stratarec.models.request import Runs
from stratarec.models.zoo.config import FMConfig
from stratarec.models.zoo.fields import Fields, Parts, Terms


class FMScore(Score):
    """logit = b + sum_i w_i x_i + sum over i < j of <v_i, v_j> x_i x_j.

    The sum over pairs is half of (square of the sum - sum of squares), so shared vectors are summed once per run.
    """

    config: ClassVar = FMConfig

    def __init__(self, config: FMConfig, dense: int, features: int) -> None:
        super().__init__()
        self.fields = Fields(dense, features, config.vector_width, first_order=True, deviation=config.initial_rows)
        self.out = Terms(0, 1 + config.embedding_dim)

    def forward(self, dense: Tensor, vectors: Tensor, runs: Runs | None = None) -> Tensor:
        return self.logits(fm_terms(self.fields.parts(dense, vectors, runs)))


def fm_terms(fields: Parts) -> Tensor:
    """Return ``[B, D + 1]``: for each dimension the sum over pairs, and then the sum of the first-order terms."""
    total = fields.sum()
    pairs = 0.5 * (total[:, :-1].square() - fields.columns(0, -1).square_sum())
    return torch.cat([pairs, total[:, -1:]], dim=1)
