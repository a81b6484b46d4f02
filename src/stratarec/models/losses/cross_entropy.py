"""Binary cross-entropy, the negative log-likelihood of a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stratarec.models.losses.base import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(LossConfig):
    """Negative log-likelihood of the label. Scores are probabilities."""

    kind: Literal["cross_entropy"] = "cross_entropy"


def cross_entropy(
    config: CrossEntropyConfig,
    logits: Tensor,
    label: Tensor,
    weight: Tensor | None,
    reduction: Literal["none", "mean", "sum"],
) -> Tensor:
    """Return -y log(p) - (1 - y) log(1 - p) for labels y and p = sigmoid(logit)."""
    from torch.nn import functional

    # One operation of torch, also for the mean: its gradient is (p - y) / B, while the mean of
    # separate losses would give (p - y) * (1 / B), with other bits.
    return functional.binary_cross_entropy_with_logits(logits, label, weight=weight, reduction=reduction)
