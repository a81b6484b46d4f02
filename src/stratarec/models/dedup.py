"""Look up distinct values once and expand what becomes of them.

A batch with groups is looked up by one call, so that backward is one optimizer step: a group's U bags are the first U
of R = max(B, U) bags of its features, the others are empty. Embedding tables and caches see an ordinary `KeyedJagged`
with fewer ids. Expansion is an index-select after pooling; its backward sums the gradients of a distinct value over its
samples in ascending order, before rows are updated. Features of few ids a bag are the exception: looking an id up costs
what copying its vector does, so their ids are expanded before the lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratarec.embedding import Embeddings
from stratarec.jagged import Batch, JaggedTensor, JaggedWindows, KeyedJagged
from stratarec.kernels import dedup

# Ids a bag, on average, up to which looking them up again is cheaper than the two passes of an expansion.
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Ids to look up, and how to expand what is found.

    Parameters
    ----------
    features : KeyedJagged
        Every feature over R bags.
    inverses : mapping of str to Tensor
        ``[B]`` for each feature of a group.
    windows : mapping of str to pair of Tensor
        ``[U]`` start and length for each unpooled feature of a group: slices of its rows.
    """

    features: KeyedJagged
    inverses: Mapping[str, Tensor]
    windows: Mapping[str, tuple[Tensor, Tensor]]


def look_up(batch: Batch, sequences: tuple[str, ...]) -> Lookup:
    """Join the features of a batch and of its groups; `sequences` are looked up without pooling."""
    if not batch.groups:
        return Lookup(features=batch.sparse, inverses={}, windows={})
    bags = {key: batch.sparse[key] for key in batch.sparse.keys}
    inverses, windows = {}, {}
    for group in batch.groups:
        inverses.update(dict.fromkeys(group.keys, group.inverse))
        if isinstance(group.unique, JaggedWindows) and group.unique.key in sequences:
            # Windows that overlap share the rows of their values: all values are one bag, which is not pooled.
            shared = group.unique
            bags[shared.key] = JaggedTensor(values=shared.values, offsets=torch.tensor([0, shared.values.numel()]))
            windows[shared.key] = (shared.start, shared.length)
            continue
        unique = group.bags()
        for key in unique.keys:
            bags[key] = unique[key]
            if key in sequences:
                windows[key] = (bags[key].offsets[:-1], bags[key].lengths())
        for key, bag in _short(unique, group.inverse, bags, sequences).items():
            bags[key] = bag
            del inverses[key]
    return Lookup(features=_joined(bags, batch.size), inverses=inverses, windows=windows)


def _short(
    unique: KeyedJagged, inverse: Tensor, bags: Mapping[str, JaggedTensor], sequences: tuple[str, ...]
) -> dict[str, JaggedTensor]:
    """The pooled features of few ids a bag, expanded."""
    most = _FEW * unique.batch_size
    keys = [key for key in unique.keys if key not in sequences and bags[key].values.numel() <= most]
    if not keys:
        return {}
    chosen = unique if len(keys) == len(unique.keys) else KeyedJagged.from_features({key: bags[key] for key in keys})
    expanded = chosen.take(inverse)
    return {key: expanded[key] for key in keys}


def _joined(bags: Mapping[str, JaggedTensor], size: int) -> KeyedJagged:
    """Features of different numbers of bags side by side, each filled up with empty bags."""
    rows = max([size, *(bag.batch_size for bag in bags.values())])
    lengths = torch.zeros(len(bags), rows, dtype=torch.int64)
    for place, bag in enumerate(bags.values()):
        lengths[place, : bag.batch_size] = bag.lengths()
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths.view(-1), 0, out=offsets[1:])
    values = torch.cat([bag.values for bag in bags.values()])
    return KeyedJagged(keys=tuple(bags), values=values, offsets=offsets, batch_size=rows)


def expand_pooled(found: Embeddings, inverses: Mapping[str, Tensor], size: int) -> Tensor:
    """``[B, sum of dims]`` from ``[R, sum of dims]`` pooled vectors: the columns of each group by its inverse.

    ``found.pooled`` may be overwritten: only the result is to be used.
    """
    if not inverses:
        return found.pooled
    spans: dict[int, tuple[list[tuple[int, int]], Tensor]] = {}
    first = 0
    for key, width in zip(found.pooled_keys, found.dims, strict=True):
        if key in inverses:
            spans.setdefault(id(inverses[key]), ([], inverses[key]))[0].append((first, width))
        first += width
    if not spans and found.pooled.shape[0] == size:
        return found.pooled
    out: Tensor = _Expand.apply(found.pooled, dedup.Spans(first, list(spans.values()), size))  # type: ignore[no-untyped-call]
    return out


def expand_rows(values: Tensor, inverse: Tensor) -> Tensor:
    """``[B, ...]`` from ``[U, ...]``: ``values[inverse]``, gradients summed in ascending order of samples."""
    out: Tensor = _Rows.apply(values.flatten(1), inverse)  # type: ignore[no-untyped-call]
    return out.view(inverse.numel(), *values.shape[1:])


def gather_windows(rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
    """``[U, longest, D]`` from rows ``[E, D]``, zeros behind each window; overlapping windows share rows."""
    out: Tensor = _Gather.apply(rows, start, length, longest)  # type: ignore[no-untyped-call]
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, spans: dedup.Spans) -> Tensor:
        ctx.spans, ctx.rows = spans, pooled.shape[0]
        out = spans.expand(pooled)
        # Overwritten memory under a new tensor: autograd refuses an output of a function that is changed in place, and
        # the lookup keeps nothing of it for its backward.
        return torch.from_numpy(out.numpy()) if out is pooled else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.spans.fold(gradient.float(), ctx.rows), None


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
        columns = gradient.shape[1]
        folded = dedup.Spans(columns, [([(0, columns)], inverse)], inverse.numel()).fold(gradient.float(), ctx.rows)
        return folded.to(gradient.dtype), None


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
