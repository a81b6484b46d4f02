"""Look up distinct values once and expand what becomes of them.

Batches are shuffled in *runs*: neighbouring samples that agree in all groups. The features of groups are looked up once
a run, and a run's vectors serve all its samples. A batch with runs is looked up by one call, so that backward is one
optimizer step: a group's R bags are the first R of B bags of its features, the others are empty. Embedding tables and
caches see an ordinary `KeyedJagged` with fewer ids.

Unpooled histories are looked up once for each event; histories that overlap share these rows.

Shapes: B samples, R runs, U distinct histories, E their events, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch import Batch
from stratarec.inverse import LEAST_RUN, InverseJagged, JaggedWindows
from stratarec.jagged import KeyedJagged
from stratarec.kernels import batches, dedup
from stratarec.kernels.attention import Pairs


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which rows of an unpooled feature a history is: ``rows[start[u]:start[u] + length[u]]``.

    Parameters
    ----------
    start, length : Tensor
        ``[U]`` int64.
    inverse : Tensor or None
        ``[B]``, the history of each sample; None where U is B.
    """

    start: Tensor
    length: Tensor
    inverse: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Lookup:
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
    windows: Mapping[str, Windows]


@dataclass(frozen=True, kw_only=True)
class History:
    """The rows of a batch's histories, those of overlapping ones once.

    Parameters
    ----------
    rows : Tensor
        ``[E, D]``.
    windows : Windows
        Which of them each history is.
    """

    rows: Tensor
    windows: Windows

    def padded(self) -> tuple[Tensor, Tensor]:
        """``[U, L, D]`` rows, zeros behind each history, and their mask ``[U, L]``."""
        start, length = self.windows.start, self.windows.length
        longest = max(int(length.max()) if len(length) else 0, 1)
        rows: Tensor = _Gather.apply(self.rows, start, length, longest)  # type: ignore[no-untyped-call]
        return rows, torch.arange(longest) < length.unsqueeze(1)

    @cached_property
    def pairs(self) -> Pairs:
        """Every sample with every event of its history."""
        start, length = self.windows.start, self.windows.length
        if self.windows.inverse is not None:
            start, length = start[self.windows.inverse], length[self.windows.inverse]
        offsets = torch.zeros(len(length) + 1, dtype=torch.int64)
        torch.cumsum(length, 0, out=offsets[1:])
        return Pairs(first=start, offsets=offsets)

    def expand(self, vectors: Tensor) -> Tensor:
        """``[B, D]`` from one vector a history ``[U, D]``; gradients are summed in ascending order of samples."""
        if self.windows.inverse is None:
            return vectors
        out: Tensor = _Rows.apply(vectors, self.windows.inverse)  # type: ignore[no-untyped-call]
        return out


def look_up(batch: Batch, sequences: tuple[str, ...]) -> Lookup:
    """Join the features of a batch and of its groups; `sequences` are looked up without pooling."""
    if not batch.groups:
        return Lookup(features=batch.sparse, windows={})
    starts, alike = _runs(batch.groups, batch.size)
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
    features = _joined(keys, parts, batch.size)
    return Lookup(features=features, starts=starts if shared else None, shared=frozenset(shared), windows=windows)


def _bags(features: KeyedJagged | JaggedWindows, rows: Tensor | None = None) -> batches.Bags:
    start = stop = None
    if isinstance(features, JaggedWindows):
        start = features.start.numpy()
        stop = start + features.length.numpy()
    elif features.offsets is not None:
        start, stop = features.offsets.numpy()[:-1], features.offsets.numpy()[1:]
    return batches.Bags(
        values=features.values.numpy(),
        features=len(features.keys),
        bags=features.batch_size,
        start=start,
        stop=stop,
        rows=None if rows is None else rows.numpy(),
    )


def _joined(keys: Sequence[str], parts: Sequence[batches.Bags], size: int) -> KeyedJagged:
    """Features over different numbers of bags side by side, each filled up with empty bags."""
    size = max(size, *(part.count for part in parts))
    values, offsets = (torch.from_numpy(part) for part in batches.join_bags(parts, size))
    filled = tuple(part.count for part in parts for _ in range(part.features))
    return KeyedJagged(keys=tuple(keys), values=values, offsets=offsets, batch_size=size, filled=filled)


def _unpooled(group: InverseJagged, key: str) -> tuple[KeyedJagged, Windows]:
    """The values of an unpooled feature, and which of them its histories are."""
    unique = group.unique
    if isinstance(unique, JaggedWindows):
        # Windows share values: all of them are one bag.
        offsets = torch.tensor([0, unique.values.numel()])
        values = KeyedJagged(keys=unique.keys, values=unique.values, offsets=offsets, batch_size=1)
        return values, Windows(start=unique.start, length=unique.length, inverse=group.inverse)
    bags = unique[key]
    values = KeyedJagged.from_features({key: bags})
    return values, Windows(start=bags.offsets[:-1], length=bags.lengths(), inverse=group.inverse)


def _runs(groups: Sequence[InverseJagged], size: int) -> tuple[Tensor, list[InverseJagged]]:
    """``[R + 1]`` starts of runs, and the groups that are constant in each: as many as leave runs long enough."""
    starts = np.array([0, size])
    alike: list[InverseJagged] = []
    for group in sorted(groups, key=lambda group: group.unique.batch_size):
        finer = dedup.find_runs(group.inverse.numpy(), starts)
        if (len(finer) - 1) * LEAST_RUN <= size:
            starts, alike = finer, [*alike, group]
    return torch.from_numpy(starts), alike


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Which of a batch's vectors are the same for all samples of a run; of those, row r is run r's.

    Parameters
    ----------
    starts : Tensor
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``.
    shared : tuple of bool
        ``[F]``.
    """

    starts: Tensor
    shared: tuple[bool, ...]

    @classmethod
    def of(cls, lookup: Lookup, keys: Sequence[str]) -> Runs | None:
        """The runs of the pooled features `keys`; None where none is shared."""
        if lookup.starts is None:
            return None
        return cls(starts=lookup.starts, shared=tuple(key in lookup.shared for key in keys))

    def expand(self, vectors: Tensor) -> Tensor:
        """``[B, F, D]`` of which every vector is its sample's; the memory of `vectors` may be overwritten."""
        width = vectors.shape[2]
        spans = [(place * width, width) for place, shared in enumerate(self.shared) if shared]
        columns = dedup.Spans(vectors[0].numel(), spans, self.starts)
        out: Tensor = _Expand.apply(vectors.flatten(1), columns)  # type: ignore[no-untyped-call]
        return out.view(vectors.shape)

    def beside(self, others: int) -> Runs:
        """The same runs with `others` more vectors behind, which are not shared."""
        return Runs(starts=self.starts, shared=(*self.shared, *[False] * others))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, spans: dedup.Spans) -> Tensor:
        ctx.spans = spans
        # Overwritten memory under a new tensor: autograd refuses an output of a function that is changed in place, and
        # the lookup keeps nothing of it for its backward.
        return torch.from_numpy(spans.expand(pooled).numpy())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.spans.fold(gradient.float()), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = values.shape[0]
        return values.index_select(0, inverse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return dedup.sum_rows(gradient.float(), inverse, ctx.rows).to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
        ctx.save_for_backward(start, length)
        ctx.values = rows.shape[0]
        return dedup.gather_windows(rows, start, length, longest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start, length = ctx.saved_tensors
        return dedup.scatter_windows(gradient.float(), start, length, ctx.values), None, None, None
