"""The loss that training minimizes: weighted cross-entropy of samples with one label or several.

    L = sum_t f_t L_t,    L_t = sum_b w_b m_bt c_bt l_bt / sum_b w_b m_bt

over the samples b of a batch in all processes: l is the binary cross-entropy of a label's logit, w the sample's weight
(1 without weights), m 1 if the label is known and 0 otherwise, f the label's factor, ``train.loss_weights``, and c the
weight of its class, by ``train.class_weight`` r,

    c = (1 + r) / 2 of a positive sample, (1 + 1 / r) / 2 of a negative one,

which is 1 on average if r balances the classes. The unit of w does not matter, weights of 1 give the same bits as no
weights, and a label that is not known in a batch adds nothing. If few samples of a batch have a known label, each of
them has more weight. Class weights are not part of the denominator: otherwise positives would count less in batches
that have few of them, and the shift that corrects scores afterwards (`models/base.py`) would differ between batches.

With one label L may be a loss of slates instead, ``train.loss``: the mean over clicks, with weight w, in slates that
also have a sample without a click. With scores z, for a click b in slate s

    softmax   log sum_{j in s} e^z_j - z_b                      McFadden 1974; ListNet, Cao et al. 2007
    pairwise  mean_{j in s, no click} log(1 + e^(z_j - z_b))    RankNet, Burges et al. 2005

Adding a number to all scores of a slate changes nothing: they have no level.

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
"""Logits ``[B]``, and on the host labels ``[B]`` and slate sizes ``[S]`` -> loss ``[B]`` of each sample if it is a
click."""


def softmax(logits: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    slate = on_device(torch.repeat_interleave(sizes), logits)
    most = logits.new_full((len(sizes),), -torch.inf).scatter_reduce(0, slate, logits.detach(), "amax")
    total = logits.new_zeros(len(sizes)).index_add(0, slate, (logits - most[slate]).exp())
    return (total.log() + most)[slate] - logits


def pairwise(logits: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
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
"""Losses of slates by the name in a recipe."""


class Objective:
    """Loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Factor of each label.
    kind : str
        ``log_loss``, or one of `SLATE_LOSSES`.
    class_weights : sequence of float
        r of each label, for the log loss; by default 1.
    """

    def __init__(
        self, factors: Sequence[float] = (1.0,), kind: str = "log_loss", class_weights: Sequence[float] = ()
    ) -> None:
        self._factors, self._slate_loss = tuple(factors), SLATE_LOSSES.get(kind)
        self._class_weights = torch.tensor(class_weights) if any(factor != 1 for factor in class_weights) else None

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return L, a scalar, of the batch of a single process from logits ``[B]``, ``[B, T]`` or ``[B, K]``."""
        if len(self._factors) > 1 or self._slate_loss or logits.dim() > 1:
            return self.joined(self.sums(logits, batch), self.weights(batch))
        label, weight = on_device(batch.label, logits), self._weighted(batch, logits)
        loss = functional.binary_cross_entropy_with_logits(logits, label, weight=weight)
        if batch.weight is not None:
            # torch divides by B, so equal weights do not change the gradient's bits. A sum over the sum of weights
            # would give (p - y) * (1 / B), which differs from (p - y) / B.
            loss = loss * (batch.size / _or_infinity(self.weights(batch)[0]))
        return loss * self._factors[0]

    def sums(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the numerators of L_t, ``[T]`` sums over the samples of this process."""
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
        """Return the factors of the losses, ``[B]`` or ``[B, T]``, on the device of the logits; None for 1."""
        weight = batch.weight if len(self._factors) == 1 else _scale(batch)
        if self._class_weights is not None:
            positive, negative = (1 + self._class_weights) / 2, (1 + 1 / self._class_weights) / 2
            by_class = torch.where(batch.label > 0, positive, negative)
            weight = by_class if weight is None else by_class * weight
        return None if weight is None else on_device(weight, logits)

    def weights(self, batch: Batch) -> list[float]:
        """Return the denominators of L_t for the samples of this process."""
        if self._slate_loss:
            return [float(_clicks(batch).double().sum())]
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """Return L, a scalar, from numerators of this process and denominators of all processes."""
        losses = sums / on_device(torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype), sums)
        return (losses * on_device(torch.tensor(self._factors, dtype=sums.dtype), sums)).sum()


def _clicks(batch: Batch) -> Tensor:
    """Return the weight ``[B]`` of each click in a slate that also has samples without a click; 0 for other samples."""
    assert batch.slates is not None
    slate = torch.repeat_interleave(batch.slates)
    missed = torch.zeros(len(batch.slates)).index_add(0, slate, 1 - batch.label)
    clicks = batch.label * (missed > 0)[slate]
    return clicks if batch.weight is None else clicks * batch.weight


def _scale(batch: Batch) -> Tensor:
    """Return the weight ``[B, T]`` of each label, 0 if it is not known."""
    is_known = batch.label.isfinite().float()
    return is_known if batch.weight is None else is_known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    # The loss of a batch without weight is 0.
    return weight or float("inf")
