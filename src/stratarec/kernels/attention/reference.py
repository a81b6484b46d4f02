"""Pairs of samples and events in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def places(first: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` sample and ``[N]`` event of every pair."""
    samples = torch.repeat_interleave(torch.arange(len(first)), offsets.diff())
    return samples, torch.arange(len(samples)) - offsets[samples] + first[samples]


def pair_sums(samples: Tensor, events: Tensor, sample: Tensor, event: Tensor) -> Tensor:
    """``[N, D]``: ``samples[b] + events[e]``, of the pairs that `places` gave."""
    return samples[sample] + events[event]


def pair_products(samples: Tensor, events: Tensor, sample: Tensor, event: Tensor) -> Tensor:
    """``[N, D]``: ``samples[b] * events[e]``."""
    return samples[sample] * events[event]


def pair_pool(weights: Tensor, events: Tensor, sample: Tensor, event: Tensor, samples: int) -> Tensor:
    """``[B, D]``: the sum of ``weights[p] * events[e]`` over the pairs of each of so many `samples`."""
    return weights.new_zeros(samples, events.shape[1]).index_add(0, sample, weights.unsqueeze(1) * events[event])
