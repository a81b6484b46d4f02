"""Hinge loss of support vector machines (Cortes and Vapnik 1995): logits are margins, not
log-odds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stratarec.models.losses.base import LossConfig, by_sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HingeConfig(LossConfig):
    """Distance of a sample from the margin of its class, 0 beyond it. Scores are calibrated on the
    validation split.
    """

    kind: Literal["hinge"] = "hinge"


@by_sample
def hinge(config: HingeConfig, logits: Tensor, label: Tensor) -> Tensor:
    """Return max(0, 1 - s x) for logits x and s = 1 or -1, the sign of the label."""
    return (1 - (2 * label - 1) * logits).relu()
