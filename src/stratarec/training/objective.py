"""What training makes smaller: the cross-entropy of samples, weighted.

Shapes: B samples of a batch, of this process; the figures of all processes add up.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from stratarec.batch import Batch


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of a batch of one process, a scalar: ``sum_b w_b l_b / sum_b w_b`` over its samples.

    l is the binary cross-entropy of a ``[B]`` logit, w the sample's weight, or 1 where samples have none. The unit of
    weights does not matter; weights that are all 1 give the bits of none; weights that are all 0 a loss of 0.
    """
    loss = functional.binary_cross_entropy_with_logits(logits, batch.label, weight=batch.weight)
    # torch divides by B, so that equal weights change no bit of the gradient.
    return loss if batch.weight is None else loss * (batch.size / (total_weight(batch) or float("inf")))


def sum_loss(logits: Tensor, batch: Batch) -> Tensor:
    """``sum_b w_b l_b``, a scalar, to be divided by the `total_weight` of all processes."""
    return functional.binary_cross_entropy_with_logits(logits, batch.label, weight=batch.weight, reduction="sum")


def total_weight(batch: Batch) -> float:
    """``sum_b w_b``; how many samples there are, where they have no weights."""
    return float(batch.size) if batch.weight is None else float(batch.weight.double().sum())
