"""What training makes smaller: the cross-entropy of samples, weighted, of one label or of several.

    L = sum_t f_t L_t,    L_t = sum_b w_b m_bt c_bt l_bt / sum_b w_b m_bt

over the samples b of a batch, those of all processes together: l is the binary cross-entropy of a label's logit, w the
sample's weight (1 where samples have none), m 1 where the label is known and else 0, f the label's factor,
``train.loss_weights``, and c the weight of its class, ``train.class_weight`` r,

    c = (1 + r) / 2 of a positive sample, (1 + 1 / r) / 2 of a negative one,

which is 1 on average where r balances the classes. The unit of w does not matter, weights that are all 1 give the bits
of none, and a label that nothing is known of adds nothing. A batch that knows a label of few samples gives each of them
more weight. Weights of classes are in no denominator: of a batch with few positives by chance these would count less
than of others, and the shift that puts scores right afterwards (`models/base.py`) would be another one in each batch.

Of one label L may be of slates instead, ``train.loss``: the mean of a loss over the clicks of slates that have a sample
without a click, too; clicks weigh w. With scores z, of a click b in slate s

    softmax   log sum_{j in s} e^z_j - z_b                      McFadden 1974; ListNet, Cao et al. 2007
    pairwise  mean_{j in s, no click} log(1 + e^(z_j - z_b))    RankNet, Burges et al. 2005

A number added to all scores of a slate changes nothing: they have no level.

An ensemble's loss is the mean of its members' losses.

Shapes: B samples of a batch, of this process; T labels; S slates; K members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import offsets_of, slice_places
from stratarec.kernels.runtime.accelerator import on_device

SlateLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits ``[B]``, and on the host labels ``[B]`` and sizes of slates ``[S]`` -> the loss of each sample, were it a
click, ``[B]``."""


def softmax(logits: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    """See above."""
    slate = on_device(torch.repeat_interleave(sizes), logits)
    most = logits.new_full((len(sizes),), -torch.inf).scatter_reduce(0, slate, logits.detach(), "amax")
    total = logits.new_zeros(len(sizes)).index_add(0, slate, (logits - most[slate]).exp())
    return (total.log() + most)[slate] - logits


def pairwise(logits: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    """See above."""
    slate, clicks = torch.repeat_interleave(sizes), label.nonzero().squeeze(1)
    mine = sizes[slate[clicks]]
    others, _ = slice_places(offsets_of(sizes)[slate[clicks]], mine)
    click = torch.repeat_interleave(clicks, mine)
    click, others = click[label[others] == 0], others[label[others] == 0]
    counts = on_device(torch.bincount(click, minlength=len(logits)).clamp(1), logits)
    click, others = on_device(click, logits), on_device(others, logits)
    losses = functional.softplus(logits[others] - logits[click])
    return torch.zeros_like(logits).index_add(0, click, losses) / counts


SLATE_LOSSES: Mapping[str, SlateLoss] = {"softmax": softmax, "pairwise": pairwise}
"""Those that a recipe may name beside the log loss."""


class Objective:
    """The loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Of each label.
    kind : str
        ``log_loss``, or one of `SLATE_LOSSES`.
    class_weights : sequence of float
        r of each label, of the log loss; by default 1.
    """

    def __init__(
        self, factors: Sequence[float] = (1.0,), kind: str = "log_loss", class_weights: Sequence[float] = ()
    ) -> None:
        self._factors, self._slate_loss = tuple(factors), SLATE_LOSSES.get(kind)
        self._class_weights = torch.tensor(class_weights) if any(each != 1 for each in class_weights) else None

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """L of the batch of one process, a scalar, from its logits ``[B]``, ``[B, T]`` or ``[B, K]``."""
        if len(self._factors) > 1 or self._slate_loss or logits.dim() > 1:
            return self.joined(self.sums(logits, batch), self.weights(batch))
        label, weight = on_device(batch.label, logits), self._weighted(batch, logits)
        loss = functional.binary_cross_entropy_with_logits(logits, label, weight=weight)
        if batch.weight is not None:
            # torch divides by B, so that equal weights change no bit of the gradient: a sum over the sum of weights
            # gives (p - y) * (1 / B), which is not (p - y) / B.
            loss = loss * (batch.size / _or_infinity(self.weights(batch)[0]))
        return loss * self._factors[0]

    def sums(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[T]`` sums over this process's samples, the numerators of L_t."""
        if self._slate_loss:
            assert batch.slates is not None
            members = logits.unbind(1) if logits.dim() > 1 else (logits,)
            losses = sum(self._slate_loss(member, batch.label, batch.slates) for member in members) / len(members)
            return (on_device(_clicks(batch), logits) * losses).sum().unsqueeze(0)
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
        """What each loss is multiplied by, ``[B]`` or ``[B, T]``, where the logits are; None for 1."""
        weight = batch.weight if len(self._factors) == 1 else _scale(batch)
        if self._class_weights is not None:
            positive, negative = (1 + self._class_weights) / 2, (1 + 1 / self._class_weights) / 2
            each = torch.where(batch.label > 0, positive, negative)
            weight = each if weight is None else each * weight
        return None if weight is None else on_device(weight, logits)

    def weights(self, batch: Batch) -> list[float]:
        """The denominators of L_t, of this process's samples."""
        if self._slate_loss:
            return [float(_clicks(batch).double().sum())]
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """L, a scalar: numerators of this process over denominators of all."""
        losses = sums / on_device(torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype), sums)
        return (losses * on_device(torch.tensor(self._factors, dtype=sums.dtype), sums)).sum()


def _clicks(batch: Batch) -> Tensor:
    """``[B]`` weight of each click of a slate that has other samples, too; 0 of all else."""
    assert batch.slates is not None
    slate = torch.repeat_interleave(batch.slates)
    missed = torch.zeros(len(batch.slates)).index_add(0, slate, 1 - batch.label)
    found = batch.label * (missed > 0)[slate]
    return found if batch.weight is None else found * batch.weight


def _scale(batch: Batch) -> Tensor:
    """``[B, T]`` weight of each sample's label, 0 where it is not known."""
    known = batch.label.isfinite().float()
    return known if batch.weight is None else known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    """What a sum of no weight is divided by."""
    return weight or float("inf")
