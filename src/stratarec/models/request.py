"""What a batch asks the tables for: distinct values once.

Batches are shuffled in *runs*: neighbouring samples that agree in all groups. The features of groups are looked up once
a run, and a run's vectors serve all its samples. A batch with runs is looked up by one call, so that backward is one
optimizer step: a group's R bags are the first R of B bags of its features, the others are empty. Embedding tables and
caches see an ordinary `KeyedJagged` with fewer ids.

Shapes: B samples, R runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import LEAST_RUN, InverseJagged, JaggedWindows, KeyedJagged
from stratarec.kernels import collate, runs
from stratarec.models.history import HistoryWindows

# Ids. With fewer, groups are looked up sample by sample: a step's bookkeeping of runs takes 0.3 to 0.5 ms whatever they
# spare, and an id of 16 floats 30 ns. Trivago's pooled histories, 4,600 ids spared of a batch of 1,024, trained at 0.83
# of the speed without groups, and train at 0.98 so.
_LEAST_SPARED = 12_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """Ids to look up, and how to expand what is found.

    Parameters
    ----------
    features : KeyedJagged
        Every feature over B bags.
    starts : Tensor or None
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``. None where no feature is looked up by run.
    shared : frozenset of str
        Pooled features of which the first R bags are the runs'.
    windows : mapping of str to Windows
        The unpooled features of groups.
    """

    features: KeyedJagged
    starts: Tensor | None = None
    shared: frozenset[str] = frozenset()
    windows: Mapping[str, HistoryWindows]

    @classmethod
    def of(cls, batch: Batch, sequences: tuple[str, ...], means: tuple[str, ...] = ()) -> Request:
        """Join the features of a batch and of its groups; `sequences` are looked up without pooling, of `means` the
        mean is taken by their weights."""
        own = averaged(batch.sparse, means)
        if not batch.groups:
            return cls(features=own, windows={})
        few = sum(_spared(group, sequences) for group in batch.groups) < _LEAST_SPARED
        starts, alike = _runs(() if few else batch.groups, batch.size)
        keys, parts, windows = [*batch.sparse.keys], [_bags(batch.sparse)], {}
        shared: list[str] = []
        for group in batch.groups:
            for key in [key for key in group.keys if key in sequences]:
                values, windows[key] = _unpooled(group, key)
                keys.append(key)
                parts.append(_bags(values))
            if pooled := [key for key in group.keys if key not in sequences]:
                by_run = any(group is other for other in alike)
                unique = group.unique if len(pooled) == len(group.keys) else group.bags().select(pooled)
                keys += pooled
                parts.append(_bags(unique, group.inverse[starts[:-1]] if by_run else group.inverse))
                shared += pooled if by_run else []
        features = _weighted(_joined(keys, parts, batch.size), own.weights)
        return cls(features=features, starts=starts if shared else None, shared=frozenset(shared), windows=windows)


def _spared(group: InverseJagged, sequences: tuple[str, ...]) -> float:
    """Ids that are not pooled where each distinct value is pooled once; all features of a group count, or none."""
    unique = group.unique
    if all(key in sequences for key in group.keys):
        return 0.0
    ids = int(unique.length.sum()) if isinstance(unique, JaggedWindows) else unique.values.numel()
    return ids * (group.factor - 1)


def _bags(features: KeyedJagged | JaggedWindows, rows: Tensor | None = None) -> collate.FeatureBags:
    start = stop = None
    if isinstance(features, JaggedWindows):
        start = features.start.cpu().numpy()
        stop = start + features.length.cpu().numpy()
    elif features.offsets is not None:
        start, stop = features.offsets.cpu().numpy()[:-1], features.offsets.cpu().numpy()[1:]
    return collate.FeatureBags(
        values=features.values.cpu().numpy(),
        features=len(features.keys),
        bags=features.batch_size,
        start=start,
        stop=stop,
        rows=None if rows is None else rows.cpu().numpy(),
    )


def _joined(keys: Sequence[str], parts: Sequence[collate.FeatureBags], size: int) -> KeyedJagged:
    """Features over different numbers of bags side by side, each filled up with empty bags."""
    size = max(size, *(part.count for part in parts))
    values, offsets = (torch.from_numpy(part) for part in collate.join_bags(parts, size))
    filled = tuple(part.count for part in parts for _ in range(part.features))
    return KeyedJagged(keys=tuple(keys), values=values, offsets=offsets, batch_size=size, filled=filled)


def _weighted(features: KeyedJagged, weights: Tensor | None) -> KeyedJagged:
    """Features of which the first values have `weights`, if there are some; then all others have 1."""
    if weights is None:
        return features
    rest = torch.ones(features.values.numel() - weights.numel())
    return replace(features, weights=torch.cat([weights.cpu(), rest]))


def _unpooled(group: InverseJagged, key: str) -> tuple[KeyedJagged, HistoryWindows]:
    """The values of an unpooled feature, and which of them its histories are."""
    unique = group.unique
    if isinstance(unique, JaggedWindows):
        # Windows share values: all of them are one bag.
        offsets = torch.tensor([0, unique.values.numel()])
        values = KeyedJagged(keys=unique.keys, values=unique.values, offsets=offsets, batch_size=1)
        return values, HistoryWindows(start=unique.start, length=unique.length, inverse=group.inverse)
    bags = unique[key]
    values = KeyedJagged.from_features({key: bags})
    return values, HistoryWindows(start=bags.offsets[:-1], length=bags.lengths(), inverse=group.inverse)


def _runs(groups: Sequence[InverseJagged], size: int) -> tuple[Tensor, list[InverseJagged]]:
    """``[R + 1]`` starts of runs, and the groups that are constant in each: as many as leave runs long enough."""
    starts = np.array([0, size])
    alike: list[InverseJagged] = []
    for group in sorted(groups, key=lambda group: group.unique.batch_size):
        finer = runs.find_runs(group.inverse.cpu().numpy(), starts)
        if (len(finer) - 1) * LEAST_RUN <= size:
            starts, alike = finer, [*alike, group]
    return torch.from_numpy(starts), alike


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
