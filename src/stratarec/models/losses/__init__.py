"""Losses of training. Each is a module with its settings and its function, and an entry of
`LOSSES`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from stratarec.config.choices import Sections
from stratarec.models.losses.base import Loss, LossConfig, by_sample
from stratarec.models.losses.cross_entropy import CrossEntropyConfig, cross_entropy
from stratarec.models.losses.focal import FocalConfig, focal
from stratarec.models.losses.hinge import HingeConfig, hinge
from stratarec.registry import Registry

__all__ = ["LOSSES", "AnyLossConfig", "CrossEntropyConfig", "Loss", "LossConfig", "by_sample"]

LOSSES = Registry(
    "loss",
    {
        "cross_entropy": Loss(config=CrossEntropyConfig, function=cross_entropy, log_odds=True),
        "focal": Loss(config=FocalConfig, function=focal),
        "hinge": Loss(config=HingeConfig, function=hinge),
    },
)

AnyLossConfig: TypeAlias = Annotated[
    LossConfig, Sections(lambda: {name: loss.config for name, loss in LOSSES.items()})
]
"""The section ``train.loss``."""
