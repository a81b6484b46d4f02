"""What becomes of a model's logits, and the precision in which a network runs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def autocast(precision: str) -> torch.autocast:
    """The context in which the network runs."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[B]`` probabilities of a click."""
    with np.errstate(over="ignore"):  # a logit of -800 is a probability of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
