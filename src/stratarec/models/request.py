"""The ids to look up for a batch, each distinct value once, and the vectors that samples share.

Batches are shuffled in *segments*: adjacent samples with equal values in all deduplication groups.
The features of groups are looked up once per segment, and all samples of a segment use the same
vectors. A batch with segments is looked up in one call, so that its backward pass is one optimizer
step. Every feature has B bags. If it is looked up per segment, its first R bags belong to the
segments and the other bags are empty. So embedding tables and caches get an ordinary `KeyedJagged`
with fewer ids.

Shapes: B samples, R segments, F features, D width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import LEAST_SEGMENT, InverseJagged, JaggedWindows, KeyedJagged
from stratarec.kernels import collate, segments
from stratarec.kernels.row_index import RowIndex
from stratarec.models.history import HistoryWindows

# If segments save fewer ids than this, groups are looked up for each sample: segments take 0.3 to
# 0.5 ms a step, and looking up an id with 16 floats takes 30 ns. On Trivago's log with pooled
# histories, where segments save 4,600 ids per batch of 1,024, training with segments had 0.83 of
# the speed without groups; with a lookup for each sample it has 0.98.
_LEAST_SAVED = 12_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """Ids to look up, and how their vectors are expanded to samples.

    Parameters
    ----------
    features : KeyedJagged
        All features, with B bags each.
    starts : Tensor or None
        ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``. None if no feature is
        looked up per segment.
    shared : frozenset of str
        Pooled features that are looked up per segment: their first R bags belong to the segments.
    windows : mapping of str to HistoryWindows
        Windows of the histories that are in deduplication groups and are not pooled.
    lists : tuple of RowIndex or None
        For a network on a device: the segment of each sample, then two lists of each history or
        sequence (`Network.lists`). Empty for a network on the host.
    """

    features: KeyedJagged
    starts: Tensor | None = None
    shared: frozenset[str] = frozenset()
    windows: Mapping[str, HistoryWindows]
    lists: tuple[RowIndex | None, ...] = ()

    def bags_of(self, key: str) -> Tensor:
        """Return the offsets of a feature's bags, from 0."""
        bags, size = self.features.bag_offsets(), self.features.batch_size
        first = self.features.keys.index(key) * size
        return bags[first : first + size + 1] - bags[first]

    def windows_of(self, key: str, size: int) -> HistoryWindows:
        """Return the windows of a feature without pooling in a batch of `size` samples."""
        return self.windows.get(key) or HistoryWindows.of_bags(self.bags_of(key), size)

    @classmethod
    def of(cls, batch: Batch, sequences: tuple[str, ...], means: tuple[str, ...] = ()) -> Request:
        """Return the request of a batch, which joins the features of all groups with the features
        in no group.

        `sequences` are looked up without pooling, and `means` are pooled by weighted means.
        """
        sparse = averaged(batch.sparse, means)
        if not batch.groups:
            return cls(features=sparse, windows={})
        few = sum(_saved(group, sequences) for group in batch.groups) < _LEAST_SAVED
        starts, constant = _segments(() if few else batch.groups, batch.size)
        keys, parts, windows = [*batch.sparse.keys], [_bags(batch.sparse)], {}
        shared: list[str] = []
        for group in batch.groups:
            for key in [key for key in group.keys if key in sequences]:
                values, windows[key] = _unpooled(group, key)
                keys.append(key)
                parts.append(_bags(values))
            if pooled := [key for key in group.keys if key not in sequences]:
                by_segment = any(group is other for other in constant)
                unique = group.unique if len(pooled) == len(group.keys) else group.bags().select(pooled)
                keys += pooled
                parts.append(_bags(unique, group.inverse[starts[:-1]] if by_segment else group.inverse))
                shared += pooled if by_segment else []
        features = _weighted(_joined(keys, parts, batch.size), sparse.weights)
        return cls(
            features=features, starts=starts if shared else None, shared=frozenset(shared), windows=windows
        )


def _saved(group: InverseJagged, sequences: tuple[str, ...]) -> float:
    """Return how many ids are saved by looking up each distinct value of a group once, for all its
    features together.
    """
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
    """Join features with different numbers of bags, each padded with empty bags."""
    size = max(size, *(part.count for part in parts))
    values, offsets = (torch.from_numpy(part) for part in collate.join_bags(parts, size))
    filled = tuple(part.count for part in parts for _ in range(part.features))
    return KeyedJagged(keys=tuple(keys), values=values, offsets=offsets, batch_size=size, filled=filled)


def _weighted(features: KeyedJagged, weights: Tensor | None) -> KeyedJagged:
    """Set the weights of the first values to `weights`, if there are any, and all other weights to
    1.
    """
    if weights is None:
        return features
    ones = torch.ones(features.values.numel() - weights.numel())
    return replace(features, weights=torch.cat([weights.cpu(), ones]))


def _unpooled(group: InverseJagged, key: str) -> tuple[KeyedJagged, HistoryWindows]:
    """Return the values of a feature without pooling, and the windows of its histories."""
    unique = group.unique
    if isinstance(unique, JaggedWindows):
        # Windows may overlap, so all values together are one bag.
        offsets = torch.tensor([0, unique.values.numel()])
        values = KeyedJagged(keys=unique.keys, values=unique.values, offsets=offsets, batch_size=1)
        return values, HistoryWindows(start=unique.start, length=unique.length, inverse=group.inverse)
    bags = unique[key]
    values = KeyedJagged.from_features({key: bags})
    return values, HistoryWindows(start=bags.offsets[:-1], length=bags.lengths(), inverse=group.inverse)


def _segments(groups: Sequence[InverseJagged], size: int) -> tuple[Tensor, list[InverseJagged]]:
    """Return ``[R + 1]`` starts of segments, and the groups that are constant within segments.

    Groups for which segments would become too short are left out.
    """
    starts = np.array([0, size])
    constant: list[InverseJagged] = []
    for group in sorted(groups, key=lambda group: group.unique.batch_size):
        finer = segments.find_segments(group.inverse.cpu().numpy(), starts)
        if (len(finer) - 1) * LEAST_SEGMENT <= size:
            starts, constant = finer, [*constant, group]
    return torch.from_numpy(starts), constant


def averaged(features: KeyedJagged, keys: Collection[str]) -> KeyedJagged:
    """Scale the weights of each bag of the features `keys` so that they sum to the bag's number of
    values.

    Tables compute the mean as sum(w * row) / n. With the weights w * n / sum(w) this is sum(w *
    row) / sum(w). If all weights of a bag are 0, they stay 0, and the pooled vector is 0.
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
    """Scale ``[N]`` weights of bags with ``[B]`` lengths. Sums are float64, because they may exceed
    the range of float32.
    """
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = torch.bincount(bag, weights.double(), minlength=len(lengths))
    factor = torch.where(sums > 0, lengths / sums, 0.0)
    return (weights.double() * factor[bag]).float()


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Segments of samples that share some vectors; row r of a shared vector tensor belongs to
    segment r.

    Parameters
    ----------
    starts : Tensor
        ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``.
    shared : tuple of bool
        ``[F]`` flags: whether the vectors of a feature are shared.
    """

    starts: Tensor
    shared: tuple[bool, ...]

    @classmethod
    def of(cls, request: Request, keys: Sequence[str]) -> Segments | None:
        """Return the segments of the pooled features `keys`; None if no feature is shared."""
        if request.starts is None:
            return None
        return cls(starts=request.starts, shared=tuple(key in request.shared for key in keys))

    def expand(self, vectors: Tensor) -> Tensor:
        """Return the vectors ``[B, F, D]`` of every sample; the memory of `vectors` may be
        overwritten.
        """
        width = vectors.shape[2]
        spans = [(place * width, width) for place, shared in enumerate(self.shared) if shared]
        columns = segments.SegmentColumns(vectors[0].numel(), spans, self.starts)
        out: Tensor = _Expand.apply(vectors.flatten(1), columns)  # type: ignore[no-untyped-call]
        return out.view(vectors.shape)

    def split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unshared vectors ``[B, F_u, D]`` and the shared vectors ``[R, F_s, D]``."""
        places = [
            [place for place, shared in enumerate(self.shared) if shared is flag] for flag in (False, True)
        ]
        return chosen(vectors, places[0]), chosen(vectors[: self.starts.numel() - 1], places[1])

    def repeat(self, rows: Tensor) -> Tensor:
        """Repeat the rows of segments ``[R, ...]`` for each sample; return ``[B, ...]``."""
        return rows.repeat_interleave(self.starts.diff(), dim=0)

    def with_unshared(self, others: int) -> Segments:
        """Return the same segments with `others` more vectors at the end, which are not shared."""
        return Segments(starts=self.starts, shared=(*self.shared, *[False] * others))


def chosen(vectors: Tensor, places: Sequence[int]) -> Tensor:
    """Return the vectors at `places` of the second axis: ``[B, n, ...]`` from ``[B, F, ...]``."""
    if vectors.device.type == "cpu":
        return vectors[:, list(places)]
    # Indexing with a list would copy it to the device while the host waits, and a CUDA graph cannot
    # contain that.
    return torch.cat([vectors[:, place : place + 1] for place in places] or [vectors[:, :0]], dim=1)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, spans: segments.SegmentColumns) -> Tensor:
        ctx.spans = spans
        # A new tensor on the overwritten memory, because autograd refuses outputs that are changed
        # in place. The backward pass of the lookup does not need the old values.
        return spans.expand(pooled).data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.spans.fold(gradient.float()), None
