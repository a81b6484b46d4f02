"""The loss that training minimizes: the weighted mean of a loss over samples with one or several
labels.

    L = sum_t f_t L_t,    L_t = sum_b w_b m_bt c_bt l_bt / sum_b w_b m_bt

t is a label, and b a sample of the batch in any process. l is the loss of the label's logit
(``train.loss``); w the sample's weight (1 without weights); m is 1 if the label is known, otherwise
0; f is the label's factor (``train.loss_weights``). c is the weight of the sample's class, from r
in ``train.class_weight``:

    c = (1 + r) / 2 for a positive sample, (1 + 1 / r) / 2 for a negative sample

c is 1 on average if r balances the classes. The unit of w does not matter. Weights of 1 give the
same bits as no weights. A label that is not known in any sample of a batch adds nothing. If it is
known in few samples, each of them has more weight. Class weights are not part of the denominator.
Otherwise positive samples would count less in batches with few of them, and the shift that corrects
scores afterwards (`models/base.py`) would differ between batches.

The loss of an ensemble is the mean of the losses of its members.

Shapes: B samples of this process in a batch; T labels; K members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.kernels.runtime.accelerator import on_device
from stratarec.models.losses import LOSSES, CrossEntropyConfig, LossConfig


class Targets(NamedTuple):
    """Labels of a batch and the weights of its losses, on the host or on a device. Their shapes
    depend on B only.

    Parameters
    ----------
    label : Tensor
        ``[B]``, or ``[B, T]`` with 0 for labels that are not known.
    weight : Tensor or None
        Factors of the losses l, ``[B]`` or ``[B, T]``; None if all are 1.
    ratio : Tensor or None
        B divided by the sum of the sample weights; None without weights, and for joined losses.
    joined : Tensor or None
        ``[2, T]`` denominators and factors f of L_t, for several labels; otherwise None.
    """

    label: Tensor
    weight: Tensor | None
    ratio: Tensor | None
    joined: Tensor | None


class Objective:
    """Computes the loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Factor f of each label.
    class_weights : sequence of float
        r of each label; by default 1.
    loss : LossConfig
        Settings of l; by default cross-entropy.
    """

    def __init__(
        self,
        factors: Sequence[float] = (1.0,),
        class_weights: Sequence[float] = (),
        loss: LossConfig | None = None,
    ) -> None:
        loss = loss or CrossEntropyConfig()
        self._factors = tuple(factors)
        self._loss = partial(LOSSES[loss.kind].function, loss)
        self._class_weights = (
            torch.tensor(class_weights) if any(factor != 1 for factor in class_weights) else None
        )

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return L of a batch in one process, from logits ``[B]``, ``[B, T]`` or ``[B, K]``."""
        parts = (None if part is None else on_device(part, logits) for part in self.targets(batch))
        return self.of_targets(logits, Targets(*parts))  # type: ignore[arg-type]

    def targets(self, batch: Batch) -> Targets:
        """Return the targets of a batch on the host."""
        weights, ratio, joined = None, None, None
        if len(self._factors) > 1:
            weights = [_or_infinity(weight) for weight in self.weights(batch)]
            joined = torch.tensor([weights, self._factors], dtype=torch.float32)
        elif batch.weight is not None:
            ratio = torch.tensor(batch.size / _or_infinity(self.weights(batch)[0]), dtype=torch.float32)
        return Targets(*self._labelled(batch), ratio, joined)

    def of_targets(self, logits: Tensor, targets: Targets) -> Tensor:
        """Return the scalar L from logits and targets on one device."""
        if targets.joined is not None:
            denominators, factors = targets.joined
            losses: Tensor = self._sums(logits, targets.label, targets.weight) / denominators * factors
            return losses.sum()
        loss = self._loss(logits, *_of_members(logits, targets.label, targets.weight), "mean")
        if targets.ratio is not None:
            # torch divides by B, so weights that are all equal do not change any bit of the
            # gradient. Dividing the sum of losses by the sum of weights would give (p - y) * (1 /
            # B) instead of (p - y) / B.
            loss = loss * targets.ratio
        return loss if self._factors[0] == 1 else loss * self._factors[0]

    def sums(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the numerators of L_t, ``[T]``: sums over the samples of this process."""
        label, weight = self._labelled(batch)
        return self._sums(
            logits, on_device(label, logits), None if weight is None else on_device(weight, logits)
        )

    def _sums(self, logits: Tensor, label: Tensor, weight: Tensor | None) -> Tensor:
        if len(self._factors) > 1:
            return self._loss(logits, label, weight, "none").sum(0)
        total = self._loss(logits, *_of_members(logits, label, weight), "sum")
        return (total / logits[:1].numel() if logits.dim() > 1 else total).unsqueeze(0)

    def _labelled(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return `label` and `weight` of `Targets`."""
        several = len(self._factors) > 1
        weight = _scale(batch) if several else batch.weight
        if self._class_weights is not None:
            positive, negative = (1 + self._class_weights) / 2, (1 + 1 / self._class_weights) / 2
            by_class = torch.where(batch.label > 0, positive, negative)
            weight = by_class if weight is None else by_class * weight
        return batch.label.nan_to_num() if several else batch.label, weight

    def weights(self, batch: Batch) -> list[float]:
        """Return the denominator of each L_t, for the samples of this process."""
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """Return L from numerators of this process and denominators over all processes."""
        losses = sums / on_device(
            torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype), sums
        )
        return (losses * on_device(torch.tensor(self._factors, dtype=sums.dtype), sums)).sum()


def _of_members(logits: Tensor, label: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return label and weight ``[B, K]`` for logits ``[B, K]`` of ensemble members; for other
    logits, return them.
    """
    if logits.dim() == 1:
        return label, weight
    return label.unsqueeze(1).expand_as(logits), None if weight is None else weight.unsqueeze(1).expand_as(
        logits
    )


def _scale(batch: Batch) -> Tensor:
    """Return the weight of each label of each sample, ``[B, T]``: 0 if the label is not known."""
    is_known = batch.label.isfinite().float()
    return is_known if batch.weight is None else is_known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    # So the loss of a batch with a total weight of 0 is 0.
    return weight or float("inf")
