"""Quantiles of the numbers of a training split, as models that encode numbers by bins need them."""

from __future__ import annotations

import numpy as np
import torch

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
    edges = np.quantile(numbers, np.linspace(0, 1, score.bins + 1), axis=1).T
    score.take_quantiles(torch.from_numpy(edges.astype(np.float32)))
