"""Pairs of samples and events in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def places(first: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` sample and ``[N]`` event of every pair."""
    lengths = offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(first)), lengths)
    return samples, torch.arange(len(samples)) - offsets[samples] + first[samples]


def pair_sums(samples: Tensor, events: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D]``: ``samples[b] + events[e]``."""
    sample, event = places(first, offsets)
    return samples[sample] + events[event]


def pair_products(samples: Tensor, events: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D]``: ``samples[b] * events[e]``."""
    sample, event = places(first, offsets)
    return samples[sample] * events[event]


def pair_pool(weights: Tensor, events: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
    """``[B, D]``: the sum of ``weights[p] * events[e]`` over a sample's pairs."""
    sample, event = places(first, offsets)
    return weights.new_zeros(len(first), events.shape[1]).index_add(0, sample, weights.unsqueeze(1) * events[event])
