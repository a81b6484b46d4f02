"""Weights by which the mean of a bag's rows is the weighted one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from stratarec.jagged import KeyedJagged


def averaged(features: KeyedJagged, keys: Collection[str]) -> KeyedJagged:
    """The same bags, of which those of `keys` have weights that add up to their number of values.

    Tables make of n values the mean sum(w * row) / n, which by w * n / sum(w) is sum(w * row) / sum(w). Where all
    weights of a bag are 0 they stay that, and so is what is pooled.
    """
    if features.weights is None or not keys:
        return features
    weights, offsets, size = features.weights.clone(), features.bag_offsets(), features.batch_size
    for key in keys:
        first = features.keys.index(key) * size
        bounds = offsets[first : first + size + 1]
        mine = weights[int(bounds[0]) : int(bounds[-1])]
        mine.copy_(_of_mean(mine, bounds.diff()))
    return replace(features, weights=weights)


def _of_mean(weights: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` weights of bags of these lengths, ``[B]``; in float64, as sums of float32 may be beyond its range."""
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = torch.bincount(bag, weights.double(), minlength=len(lengths))
    factor = torch.where(sums > 0, lengths / sums, 0.0)
    return (weights.double() * factor[bag]).float()
