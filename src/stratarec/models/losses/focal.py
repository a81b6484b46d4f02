"""Focal loss (Lin et al. 2017, arXiv 1708.02002), which gives samples that are easy to classify
less weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stratarec.config.validate import check_ranges
from stratarec.models.losses.base import LossConfig, by_sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FocalConfig(LossConfig):
    """Cross-entropy times the probability of the other class to the power `gamma`, so that samples
    that are easy to classify count less. Scores are calibrated on the validation split."""

    kind: Literal["focal"] = "focal"
    gamma: float = 2.0
    """Exponent; 0 gives cross-entropy."""

    def __post_init__(self) -> None:
        check_ranges(self, "train.loss.", gamma="[0, inf)")


@by_sample
def focal(config: FocalConfig, logits: Tensor, label: Tensor) -> Tensor:
    """Return -(1 - q)^gamma log(q) for q, the probability of the label that was observed."""
    from torch.nn.functional import logsigmoid

    margin = (2 * label - 1) * logits
    # An exponential of a logarithm: the derivative of a power is infinite where 1 - q is rounded to
    # 0.
    return -(config.gamma * logsigmoid(-margin)).exp() * logsigmoid(margin)
