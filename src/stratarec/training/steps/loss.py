"""What training makes smaller: the cross-entropy of samples, weighted, of one label or of several.

    L = sum_t f_t L_t,    L_t = sum_b w_b m_bt l_bt / sum_b w_b m_bt

over the samples b of a batch, those of all processes together: l is the binary cross-entropy of a label's logit, w the
sample's weight (1 where samples have none), m 1 where the label is known and else 0, f the label's factor,
``train.loss_weights``. The unit of weights does not matter, weights that are all 1 give the bits of none, and a label
that nothing is known of adds nothing. A batch that knows a label of few samples gives each of them more weight.

An ensemble's l_bt is the mean of its members' cross-entropies.

Shapes: B samples of a batch, of this process; T labels; K members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.batch.batch import Batch


class Objective:
    """The loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Of each label.
    """

    def __init__(self, factors: Sequence[float] = (1.0,)) -> None:
        self._factors = tuple(factors)

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """L of the batch of one process, a scalar, from its logits ``[B]``, ``[B, T]`` or ``[B, K]``."""
        if len(self._factors) > 1 or logits.dim() > 1:
            return self.joined(self.sums(logits, batch), self.weights(batch))
        loss = functional.binary_cross_entropy_with_logits(logits, batch.label, weight=batch.weight)
        if batch.weight is not None:
            # torch divides by B, so that equal weights change no bit of the gradient: a sum over the sum of weights
            # gives (p - y) * (1 / B), which is not (p - y) / B.
            loss = loss * (batch.size / _or_infinity(self.weights(batch)[0]))
        return loss * self._factors[0]

    def sums(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[T]`` sums over this process's samples, the numerators of L_t."""
        if len(self._factors) == 1 and logits.dim() > 1:
            losses = functional.binary_cross_entropy_with_logits(
                logits, batch.label.unsqueeze(1).expand_as(logits), reduction="none"
            ).mean(1)
            return (losses if batch.weight is None else losses * batch.weight).sum(0, keepdim=True)
        if len(self._factors) == 1:
            loss = functional.binary_cross_entropy_with_logits(
                logits, batch.label, weight=batch.weight, reduction="sum"
            )  # fmt: skip
            return loss.unsqueeze(0)
        label = batch.label.nan_to_num()
        losses = functional.binary_cross_entropy_with_logits(logits, label, weight=_scale(batch), reduction="none")
        return losses.sum(0)

    def weights(self, batch: Batch) -> list[float]:
        """The denominators of L_t, of this process's samples."""
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """L, a scalar: numerators of this process over denominators of all."""
        losses = sums / torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype)
        return (losses * torch.tensor(self._factors, dtype=sums.dtype)).sum()


def _scale(batch: Batch) -> Tensor:
    """``[B, T]`` weight of each sample's label, 0 where it is not known."""
    known = batch.label.isfinite().float()
    return known if batch.weight is None else known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    """What a sum of no weight is divided by."""
    return weight or float("inf")
