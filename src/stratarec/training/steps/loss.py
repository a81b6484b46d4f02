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

With one label, L can be a loss of slates instead (``train.loss``). It is the mean over clicks, weighted by w, in slates
that also have a sample without a click. The loss of a click b in slate s, with scores z, is

    softmax   log sum_{j in s} e^z_j - z_b                      McFadden 1974; ListNet, Cao et al. 2007
    pairwise  mean_{j in s, no click} log(1 + e^(z_j - z_b))    RankNet, Burges et al. 2005

Adding a number to all scores of a slate does not change this loss, so it does not determine the level of scores.

The loss of an ensemble is the mean of the losses of its members.

Shapes: B samples of this process in a batch; T labels; S slates; K members.
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
"""Function from logits ``[B]``, labels ``[B]`` and slate sizes ``[S]`` (both on the host) to losses ``[B]``. Each
sample gets the loss that it has if it is a click."""


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
"""Losses of slates, by their name in a recipe."""


class Objective:
    """Computes the loss of a batch.

    Parameters
    ----------
    factors : sequence of float
        Factor f of each label.
    kind : str
        ``log_loss``, or a name in `SLATE_LOSSES`.
    class_weights : sequence of float
        r of each label, used only with the log loss; by default 1.
    """

    def __init__(
        self, factors: Sequence[float] = (1.0,), kind: str = "log_loss", class_weights: Sequence[float] = ()
    ) -> None:
        self._factors, self._slate_loss = tuple(factors), SLATE_LOSSES.get(kind)
        self._class_weights = torch.tensor(class_weights) if any(factor != 1 for factor in class_weights) else None

    def mean(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the scalar L of a batch from logits ``[B]``, ``[B, T]`` or ``[B, K]``, in a single process."""
        if len(self._factors) > 1 or self._slate_loss or logits.dim() > 1:
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
        """Return the factors of the losses l, ``[B]`` or ``[B, T]``, on the device of the logits; None if all are 1."""
        weight = batch.weight if len(self._factors) == 1 else _scale(batch)
        if self._class_weights is not None:
            positive, negative = (1 + self._class_weights) / 2, (1 + 1 / self._class_weights) / 2
            by_class = torch.where(batch.label > 0, positive, negative)
            weight = by_class if weight is None else by_class * weight
        return None if weight is None else on_device(weight, logits)

    def weights(self, batch: Batch) -> list[float]:
        """Return the denominator of each L_t, for the samples of this process."""
        if self._slate_loss:
            return [float(_clicks(batch).double().sum())]
        if len(self._factors) > 1:
            return _scale(batch).double().sum(0).tolist()
        return [float(batch.size) if batch.weight is None else float(batch.weight.double().sum())]

    def joined(self, sums: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the scalar L from the numerators of this process and the denominators over all processes."""
        losses = sums / on_device(torch.tensor([_or_infinity(weight) for weight in weights], dtype=sums.dtype), sums)
        return (losses * on_device(torch.tensor(self._factors, dtype=sums.dtype), sums)).sum()


def _clicks(batch: Batch) -> Tensor:
    """Return the weight of each sample that counts in a loss of slates, and 0 for other samples, ``[B]``.

    A sample counts if it is a click and its slate also has a sample without a click.
    """
    assert batch.slates is not None
    slate = torch.repeat_interleave(batch.slates)
    missed = torch.zeros(len(batch.slates)).index_add(0, slate, 1 - batch.label)
    clicks = batch.label * (missed > 0)[slate]
    return clicks if batch.weight is None else clicks * batch.weight


def _scale(batch: Batch) -> Tensor:
    """Return the weight of each label of each sample, ``[B, T]``: 0 if the label is not known."""
    is_known = batch.label.isfinite().float()
    return is_known if batch.weight is None else is_known * batch.weight.unsqueeze(1)


def _or_infinity(weight: float) -> float:
    # So the loss of a batch with a total weight of 0 is 0.
    return weight or float("inf")
