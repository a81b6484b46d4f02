"""Registry of the optimizers of a network: torch's, and those of other packages. It is read without
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from stratarec.registry import Registry


class DenseOptimizer(NamedTuple):
    """An entry of `DENSE_OPTIMIZERS`."""

    load: Callable[[], Any]
    """Returns the class, whose constructor takes weights, `lr` and `weight_decay`."""
    fused: Literal["everywhere", "cpu", "nowhere"] = "nowhere"
    """Devices on which the class is built with ``fused=True``."""
    skips: bool = False
    """Whether the fused form leaves all weights unchanged if the device has set `found_inf`. A step
    of other classes waits for its loss."""


def _of_torch(name: str) -> Callable[[], Any]:
    def load() -> Any:
        import torch

        return getattr(torch.optim, name)

    return load


DENSE_OPTIMIZERS = Registry(
    "optimizer of the network",
    {
        "adam": DenseOptimizer(_of_torch("Adam"), "everywhere", skips=True),
        "adamw": DenseOptimizer(_of_torch("AdamW"), "everywhere", skips=True),
        # Fused Adagrad supports few devices.
        "adagrad": DenseOptimizer(_of_torch("Adagrad"), "cpu"),
        "sgd": DenseOptimizer(_of_torch("SGD"), "everywhere", skips=True),
    },
)
