"""The loss that training minimizes: the weighted cross-entropy of samples with one or several labels.

    L = sum_t f_t L_t,    L_t = sum_b w_b m_bt c_bt l_bt / sum_b w_b m_bt

t is a label, and b a sample of the batch in any process. l is the binary cross-entropy of the label's logit; w the
sample's weight (1 without weights); m is 1 if the label is known, otherwise 0; f is the label's factor
(``train.loss_weights``). c is the weight of the sample's class, from r in ``train.class_weight``:

    c = (1 + r) / 2 for a positive sample, (1 + 1 / r) / 2 for a negative sample

c is 1 on average if r balances the classes. The unit of w does not matter. Weights of 1 give the same bits as no
weights. A label that is not known in any sample of a batch adds nothing. If it is known in few samples, each of them
has more weight. Class weights are not part of the denominator. Otherwise positive samples would count less in batches
with few of them, and the shift that corrects scores afterwards (`models/base.py`) would differ between batches.

The loss of an ensemble is the mean of the losses of its members.

Shapes: B samples of this process in a batch; T labels; K members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.kernels.runtime.accelerator import on_device


class Objective:
    """Computes the loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Factor f of each label.
    class_weights : sequence of float
        r of each label; by default 1.
    """

    def __init__(self, factors: Sequence[float] = (1.0,), class_weights: Sequence[float] = ()) -> None:
        self._factors = tuple(factors)
        self._class_weights = torch.tensor(class_weights) if any(factor != 1 for factor in class_weights) else None

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the scalar L of a batch from logits ``[B]``, ``[B, T]`` or ``[B, K]``, in a single process."""
        if len(self._factors) > 1 or logits.dim() > 1:
            return self.joined(self.sums(logits, batch), self.weights(batch))
        label, weight = on_device(batch.label, logits), self._weighted(batch, logits)
        loss = functional.binary_cross_entropy_with_logits(logits, label, weight=weight)
        if batch.weight is not None:
            # torch divides by B, so weights that are all equal do not change any bit of the gradient. Dividing the sum
            # of losses by the sum of weights would give (p - y) * (1 / B) instead of (p - y) / B.
            loss = loss * (batch.size / _or_infinity(self.weights(batch)[0]))
        return loss * self._factors[0]

    def sums(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the numerators of L_t, ``[T]``: sums over the samples of this process."""
        if len(self._factors) == 1:
            label, weight = on_device(batch.label, logits), self._weighted(batch, logits)
            if logits.dim() == 1:
                loss = functional.binary_cross_entropy_with_logits(logits, label, weight=weight, reduction="sum")
                return loss.unsqueeze(0)
            label = label.unsqueeze(1).expand_as(logits)
            losses = functional.binary_cross_entropy_with_logits(logits, label, reduction="none").mean(1)
            return (losses if weight is None else losses * weight).sum(0, keepdim=True)
        label = on_device(batch.label.nan_to_num(), logits)
        losses = functional.binary_cross_entropy_with_logits(
            logits, label, weight=self._weighted(batch, logits), reduction="none"
        )
        return losses.sum(0)

    def _weighted(self, batch: Batch, logits: Tensor) -> Tensor | None:
        """Return the factors of the losses l, ``[B]`` or ``[B, T]``, on the device of the logits; None if all are 1."""
        weight = batch.weight if len(self._factors) == 1 else _scale(batch)
        if self._class_weights is not None:
            positive, negative = (1 + self._class_weights) / 2, (1 + 1 / self._class_weights) / 2
            by_class = torch.where(batch.label > 0, positive, negative)
            weight = by_class if weight is None else by_class * weight
        return None if weight is None else on_device(weight, logits)

    def weights(self, batch: Batch) -> list[float]:
        """Return the denominator of each L_t, for the samples of this process."""
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the scalar L from the numerators of this process and the denominators over all processes."""
        losses = sums / on_device(torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype), sums)
        return (losses * on_device(torch.tensor(self._factors, dtype=sums.dtype), sums)).sum()


def _scale(batch: Batch) -> Tensor:
    """Return the weight of each label of each sample, ``[B, T]``: 0 if the label is not known."""
    is_known = batch.label.isfinite().float()
    return is_known if batch.weight is None else is_known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    # So the loss of a batch with a total weight of 0 is 0.
    return weight or float("inf")
