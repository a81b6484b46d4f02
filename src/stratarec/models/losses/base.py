"""A loss of training: its settings, and a function from logits and labels to losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:  # recipes are read without torch
    from torch import Tensor

    LossFunction: TypeAlias = Callable[
        [Any, Tensor, Tensor, Tensor | None, Literal["none", "mean", "sum"]], Tensor
    ]
    """Takes settings, logits, labels of 0 and 1, weights (None if all are 1), which have equal
    shapes, and a reduction.

    ``none`` returns the weighted losses; ``mean`` divides their sum by their number, not by the sum
    of weights.
    """


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings that all losses have; a loss adds its `kind` and its parameters."""

    kind: str


@dataclass(frozen=True, kw_only=True)
class Loss:
    """An entry of `LOSSES`.

    Parameters
    ----------
    config : type
        Class of the section ``train.loss`` of this loss.
    function : callable
        A `LossFunction`; `by_sample` makes one from a function without weights and reduction.
    log_odds : bool
        Whether the expected loss of a sample is smallest where the logit is the log-odds of a
        positive label. Scores of other losses become probabilities only by a calibration, so a run
        with them always fits one.
    """

    config: type[LossConfig]
    function: LossFunction
    log_odds: bool = False


def by_sample(losses: Callable[[Any, Tensor, Tensor], Tensor]) -> LossFunction:
    """Return a loss from a function of settings, logits and labels that returns the loss of each
    logit.
    """

    @wraps(losses)
    def loss(config: Any, logits: Tensor, label: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        result = losses(config, logits, label)
        result = result if weight is None else result * weight
        return result if reduction == "none" else result.mean() if reduction == "mean" else result.sum()

    return loss
