"""Quantiles of the numbers of a training split, as models that encode numbers by bins need them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.models.base import Network
from stratarec.models.zoo.ensemble import EnsembleScore

# Samples that are looked at: the error of a quantile is then below 0.2 % of rank.
_SAMPLES = 100_000


def take_quantiles(network: Network, dataset: Dataset) -> None:
    """Give a new model the quantiles of what its numbers are in training.

    Row groups that lie evenly in the split are read, so that a log that is sorted by time is seen as a whole. The same
    data give the same quantiles in every process.
    """
    score, names = network.score, [feature.name for feature in dataset.schema.dense]
    if not isinstance(score, EnsembleScore) or not names:
        return
    groups = [
        (number, group)
        for number, shard in enumerate(dataset.shards("train"))
        for group in range(len(shard.row_groups))
    ]
    mean = dataset.samples("train") / len(groups)
    wanted = min(max(int(_SAMPLES / mean), 1), len(groups))
    chosen = [groups[place * len(groups) // wanted] for place in range(wanted)]
    tables = [dataset.read_row_group("train", *place).select(names) for place in chosen]
    numbers = np.stack([np.concatenate([table[name].to_numpy() for table in tables]) for name in names])
    edges = np.stack([_edges(column, score.bins) for column in numbers])
    score.take_quantiles(torch.from_numpy(edges))


def _edges(column: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """``[Q + 1]``: all values where they are so few, the last of them repeated, else quantiles."""
    values = np.unique(column)
    if len(values) <= bins + 1:
        return np.pad(values, (0, bins + 1 - len(values)), mode="edge")
    return np.quantile(column, np.linspace(0, 1, bins + 1)).astype(np.float32)
