"""Histories of a batch, and poolings that compute one vector per sample from them.

Each distinct event is looked up once, and histories that overlap share its row. Computations that
do not depend on the candidate item are done once for each distinct history or event. The pooled
vector of an empty history is zeros. A pooling has two methods: `forward` takes a `History`, and
`padded` takes rows and a mask, for `torch.export`.

Shapes: B samples, U distinct histories (B without deduplication), E distinct events, N pairs of a
sample and an event of its history, L longest history of the batch, D width, H a hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.batch.jagged import offsets_of
from stratarec.embedding.rings import room_for
from stratarec.errors import ConfigError
from stratarec.kernels import segments
from stratarec.kernels.attention import DevicePairs, Pairs, pair_pool, pair_products, pair_sums
from stratarec.kernels.row_index import RowIndex, take
from stratarec.models.config import HistoryConfig
from stratarec.models.layers import MLP

# Positions of padded histories on a device are a multiple of this number.
_LENGTHS = 16


@dataclass(frozen=True, kw_only=True)
class HistoryWindows:
    """Windows of histories: history u is ``rows[start[u]:start[u] + length[u]]`` of a feature
    without pooling.

    Parameters
    ----------
    start, length : Tensor
        ``[U]`` int64.
    inverse : Tensor or None
        ``[B]`` history of each sample; None if each sample has its own (U = B).
    """

    start: Tensor
    length: Tensor
    inverse: Tensor | None = None

    @classmethod
    def of_bags(cls, offsets: Tensor, size: int) -> HistoryWindows:
        """Return the windows of the first `size` bags; empty bags may follow the bags of the
        batch's samples.
        """
        offsets = offsets[: size + 1]
        return cls(start=offsets[:-1], length=offsets.diff())

    @property
    def longest(self) -> int:
        """Length of the longest history, at least 1."""
        return max(int(self.length.max()) if len(self.length) else 0, 1)

    @property
    def of_samples(self) -> tuple[Tensor, Tensor]:
        """Start and length ``[B]`` of each sample's history."""
        if self.inverse is None:
            return self.start, self.length
        return self.start[self.inverse], self.length[self.inverse]


HistoryLists = tuple[RowIndex | None, RowIndex | None]
"""Lists of a batch's histories that a pooling reads on a device."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Rows of the histories in a batch; overlapping histories share rows.

    Parameters
    ----------
    rows : Tensor
        ``[E, D]``.
    windows : HistoryWindows
        Rows of each history.
    lists : tuple of RowIndex or None, or None
        On a device, the lists of the pooling. Rows are then in a size class, and the last row is
        zeros.
    """

    rows: Tensor
    windows: HistoryWindows
    lists: HistoryLists | None = None

    @classmethod
    def on_device(cls, rows: Tensor, windows: HistoryWindows, lists: HistoryLists) -> History:
        """Return a history on the device of `rows`: copy lists to it, and add rows of zeros, if
        these are missing.
        """
        one, other = (index and index.on_device(rows) for index in lists)
        assert one is not None
        more = len(one.offsets) - 1 - len(rows)
        return cls(
            rows=nn.functional.pad(rows, (0, 0, 0, more)) if more else rows,
            windows=windows,
            lists=(one, other),
        )

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return ``[U, L, D]`` rows, with zeros after each history, and their mask ``[U, L]``."""
        if self.lists is not None:
            index, samples = self.lists
            assert index is not None
            count = len(self.windows.start) if samples is None else len(samples.offsets) - 1
            shape, last = (count, len(index.row) // max(count, 1)), len(self.rows) - 1
            return take(self.rows, index).view(*shape, self.rows.shape[1]), (index.row != last).view(shape)
        start, length, longest = self.windows.start, self.windows.length, self.windows.longest
        rows: Tensor = _Gather.apply(self.rows, start, length, longest)  # type: ignore[no-untyped-call]
        return rows, torch.arange(longest) < length.unsqueeze(1)

    @cached_property
    def pairs(self) -> Pairs | DevicePairs:
        """Return the pairs of each sample with each event of its history."""
        if self.lists is not None:
            events, samples = self.lists
            assert events is not None
            assert samples is not None
            return DevicePairs(samples, events)
        start, length = self.windows.of_samples
        return Pairs(first=start, offsets=offsets_of(length))

    def expand(self, vectors: Tensor) -> Tensor:
        """Return the vector ``[B, D]`` of each sample's history, given one vector per history ``[U,
        D]``.

        Gradients are summed in ascending order of samples.
        """
        if self.lists is not None:
            return vectors if self.lists[1] is None else take(vectors, self.lists[1])
        if self.windows.inverse is None:
            return vectors
        out: Tensor = _Rows.apply(vectors, self.windows.inverse)  # type: ignore[no-untyped-call]
        return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        ctx.rows = values.shape[0]
        return values.index_select(0, inverse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return segments.sum_rows(gradient.float(), ctx.inverse, ctx.rows).to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
        ctx.windows = (start, length)
        ctx.values = rows.shape[0]
        return segments.gather_windows(rows, start, length, longest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start, length = ctx.windows
        return segments.scatter_windows(gradient.float(), start, length, ctx.values), None, None, None


class TargetAttention(nn.Module):
    """DIN's activation unit: an MLP of [query, key, query - key, query * key] returns a row's
    weight, not normalized.

    The query is the candidate and the key is the row of an event. The first layer is linear. So the
    part of its output that depends on the key alone is computed once for each event, and the part
    that depends on the query alone once for each sample. Only the product needs both.
    """

    def __init__(self, width: int, config: HistoryConfig) -> None:
        super().__init__()
        self.score = MLP(4 * width, config.attention_mlp)
        self.out = nn.Linear(self.score.outputs, 1)

    def lists(self, windows: HistoryWindows, rows: int) -> HistoryLists:
        """List event and sample of every pair, given the number of rows of a `History` on a
        device.
        """
        start, length = windows.of_samples
        room = room_for(int(length.sum()))
        events = RowIndex.of_windows(start, length, rows=rows, room=room)
        return events, RowIndex.of_lengths(length, rows=len(length), room=room)

    def forward(self, target: Tensor, history: History) -> Tensor:
        """Return ``[B, D]`` from the candidate ``[B, D]`` and its history."""
        query, keys, product = self._first(target, history.rows)
        sums = pair_sums(query, keys, history.pairs)
        products = pair_products(target, history.rows, history.pairs)
        weights = self._weights(torch.addmm(sums, products, product.t()))
        return pair_pool(weights.squeeze(-1), history.rows, history.pairs)

    def padded(self, target: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return ``[B, D]`` from the candidate ``[B, D]``, rows ``[B, L, D]`` and mask ``[B,
        L]``.
        """
        query, keys, product = self._first(target, rows)
        hidden = keys + query.unsqueeze(1) + functional.linear(target.unsqueeze(1) * rows, product)
        weights = self._weights(hidden) * mask.unsqueeze(-1)
        pooled: Tensor = (weights * rows).sum(1)
        return pooled

    def _first(self, target: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the first layer's output that depend on the query alone, ``[B, H]``,
        and on the key alone, ``[..., H]``, and the layer's weights for query * key.
        """
        first = self.score[0]
        assert isinstance(first, nn.Linear)
        query, key, difference, product = first.weight.chunk(4, dim=1)
        return (
            functional.linear(target, query + difference, first.bias),
            functional.linear(rows, key - difference),
            product,
        )

    def _weights(self, hidden: Tensor) -> Tensor:
        for layer in list(self.score)[1:]:
            hidden = layer(hidden)
        weights: Tensor = self.out(hidden)
        return weights


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, rows: Tensor, visible: Tensor) -> Tensor:
        size, length, width = rows.shape
        shape = (size, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.project(self.before(rows)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        rows = rows + self.join(mixed.transpose(1, 2).reshape(size, length, width))
        out: Tensor = rows + self.feed(self.between(rows))
        return out


class TransformerPooling(nn.Module):
    """Transformer encoder blocks (pre-norm), followed by the mean.

    Learned positions count from the most recent item.
    """

    def __init__(self, width: int, longest: int, config: HistoryConfig) -> None:
        super().__init__()
        if width % config.heads:
            raise ConfigError(
                f"model.history.heads is {config.heads}, which does not divide embedding_dim {width}"
            )
        self.position = nn.Parameter(torch.zeros(longest, width))
        self.blocks = nn.ModuleList(_TransformerBlock(width, config.heads) for _ in range(config.layers))

    def lists(self, windows: HistoryWindows, rows: int) -> HistoryLists:
        """List the row of each position ``[U, L]``, and the history of each sample if samples share
        histories.

        Parameters
        ----------
        rows : int
            Number of rows of the `History` on a device.
        """
        start, length, inverse = windows.start, windows.length, windows.inverse
        # Few lengths and numbers of histories, so that one CUDA graph serves many batches.
        longest = min(-(-windows.longest // _LENGTHS) * _LENGTHS, max(windows.longest, len(self.position)))
        count = len(start) if inverse is None else room_for(len(start))
        places = room_for(int(length.sum()))
        index = RowIndex.of_windows(
            start, length, rows=rows, stride=longest, room=count * longest, places=places
        )
        if inverse is None:
            return index, None
        ones = torch.ones_like(inverse)
        return index, RowIndex.of_windows(inverse, ones, rows=count, stride=1, room=len(inverse))

    def forward(self, target: Tensor, history: History) -> Tensor:
        """Return ``[B, D]``; the candidate is not used, so every distinct history is pooled
        once.
        """
        rows, mask = history.padded()
        age = _ages(mask)
        # The gradient of indexing would sort on a device, and a CUDA graph cannot contain that.
        position = self.position[age.clamp(0, len(self.position) - 1)] if history.lists is None else None
        if position is None:
            position = _Positions.apply(self.position, age)  # type: ignore[no-untyped-call]
        return history.expand(self._pool(rows + position, mask))

    def padded(self, target: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return ``[U, D]`` from rows ``[U, L, D]`` and mask ``[U, L]``."""
        return self._pool(rows + self.position[_ages(mask).clamp(0, len(self.position) - 1)], mask)

    def _pool(self, rows: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(1, keepdim=True)
        # Attention would be NaN if no position were visible. So the first position is always
        # visible, and the results of empty histories are set to zeros.
        visible = mask | (torch.arange(rows.shape[1], device=rows.device) == 0)
        for block in self.blocks:
            rows = block(rows, visible[:, None, None, :])
        return (rows * mask.unsqueeze(-1)).sum(1) / lengths.clamp(min=1)


def _ages(mask: Tensor) -> Tensor:
    """Return how many events of its history are after each position, ``[U, L]``; negative behind
    the history.
    """
    return mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1], device=mask.device)


class _Positions(torch.autograd.Function):
    """``position[age]`` for ages ``[U, L]`` within 0 and P - 1. The gradient is gathered, not
    scattered.
    """

    @staticmethod
    def forward(ctx: Any, position: Tensor, age: Tensor) -> Tensor:
        ctx.save_for_backward(age)
        ctx.positions = len(position)
        return position.index_select(0, age.clamp(0, len(position) - 1).flatten()).view(*age.shape, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (age,) = ctx.saved_tensors
        (histories, longest), positions = age.shape, ctx.positions
        # The position of age a is at place length - 1 - a, which is the age at place a.
        first = torch.arange(histories, device=age.device).unsqueeze(1) * longest
        by_age = (
            gradient.flatten(0, 1)
            .index_select(0, (first + age.clamp(min=0)).flatten())
            .view(gradient.shape)
        )
        sums = by_age.masked_fill((age < 0).unsqueeze(2), 0.0).sum(0)
        more = nn.functional.pad(sums[:positions], (0, 0, 0, max(positions - longest, 0)))
        if longest > positions:
            more[-1] += sums[positions:].sum(0)
        return more, None


def build_pooling(width: int, longest: int, config: HistoryConfig) -> TargetAttention | TransformerPooling:
    """Return the module for a pooling other than ``mean``, which needs no module."""
    if config.pooling == "target_attention":
        return TargetAttention(width, config)
    return TransformerPooling(width, longest, config)
