"""Gradients of weights that every rank has: one buffer, exchanged, added in the order of ranks, and gathered.

Not DDP, whose buckets change after the first step, and again after a run was resumed, and with them the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratarec.distributed.collectives import Channel


def reduce_gradients(
    channel: Channel, weights: Sequence[Tensor], order: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32, more: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """Replace the gradient of each weight by the sum over ranks, through one flat buffer.

    A weight that has no gradient on a rank counts as zeros there; weights come in the same order everywhere. See
    `Channel.sum` for `order` and `dtype`.

    Parameters
    ----------
    more : sequence of Tensor
        Flat float32 that is added with them.

    Returns
    -------
    list of Tensor
        The sums of `more`.
    """
    if channel.ranks == 1 or not (weights or more):
        return list(more)
    flat = torch.cat([*(_flat_gradient(weight) for weight in weights), *more])
    sizes = [each.numel() for each in (*weights, *more)]
    parts = channel.sum(flat, order, dtype).split(sizes)  # type: ignore[no-untyped-call]
    for weight, part in zip(weights, parts, strict=False):
        weight.grad = part.view_as(weight)
    return list(parts[len(weights) :])


def average(channel: Channel, values: Sequence[Tensor], share: float, order: Sequence[int] | None = None) -> None:
    """Replace float32 values by their mean over ranks, in which this one counts for `share`; see `Channel.sum`."""
    if channel.ranks == 1 or not values:
        return
    flat = torch.cat([value.reshape(-1) for value in values]).mul_(share)
    parts = channel.sum(flat, order).split([value.numel() for value in values])  # type: ignore[no-untyped-call]
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))


def _flat_gradient(weight: Tensor) -> Tensor:
    return torch.zeros(weight.numel()) if weight.grad is None else weight.grad.detach().reshape(-1).float()
