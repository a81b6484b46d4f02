"""Histories of a batch, and poolings that compute one vector per sample from them.

Each distinct event is looked up once, and histories that overlap share its row. Computations that do not depend on the
candidate item are done once for each distinct history or event. The pooled vector of an empty history is zeros. A
pooling has two methods: `forward` takes a `History`, and `padded` takes rows and a mask, for `torch.export`.

Shapes: B samples, U distinct histories (B without deduplication), E distinct events, N pairs of a sample and an event
of its history, L longest history of the batch, D width, H a hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.batch.jagged import offsets_of
from stratarec.errors import ConfigError
from stratarec.kernels import runs
from stratarec.kernels.attention import Pairs, pair_pool, pair_products, pair_sums
from stratarec.kernels.runtime.accelerator import on_device
from stratarec.models.config import HistoryConfig
from stratarec.models.layers import MLP


@dataclass(frozen=True, kw_only=True)
class HistoryWindows:
    """Windows of histories: history u is ``rows[start[u]:start[u] + length[u]]`` of a feature without pooling.

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


@dataclass(frozen=True, kw_only=True)
class History:
    """Rows of the histories in a batch; overlapping histories share rows.

    Parameters
    ----------
    rows : Tensor
        ``[E, D]``.
    windows : HistoryWindows
        Rows of each history.
    """

    rows: Tensor
    windows: HistoryWindows

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return ``[U, L, D]`` rows, with zeros after each history, and their mask ``[U, L]``."""
        start, length = self.windows.start, self.windows.length
        longest = max(int(length.max()) if len(length) else 0, 1)
        rows: Tensor = _Gather.apply(self.rows, start, length, longest)  # type: ignore[no-untyped-call]
        return rows, on_device(torch.arange(longest) < length.unsqueeze(1), rows)

    @cached_property
    def pairs(self) -> Pairs:
        """Return the pairs of each sample with each event of its history."""
        start, length = self.windows.start, self.windows.length
        if self.windows.inverse is not None:
            start, length = start[self.windows.inverse], length[self.windows.inverse]
        return Pairs(first=start, offsets=offsets_of(length))

    def expand(self, vectors: Tensor) -> Tensor:
        """Return the vector ``[B, D]`` of each sample's history, given one vector per history ``[U, D]``.

        Gradients are summed in ascending order of samples.
        """
        if self.windows.inverse is None:
            return vectors
        out: Tensor = _Rows.apply(vectors, self.windows.inverse)  # type: ignore[no-untyped-call]
        return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse, ctx.rows = inverse, values.shape[0]
        return values.index_select(0, on_device(inverse, values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return runs.sum_rows(gradient.float(), ctx.inverse, ctx.rows).to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
        ctx.windows, ctx.values = (start, length), rows.shape[0]
        return runs.gather_windows(rows, start, length, longest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start, length = ctx.windows
        return runs.scatter_windows(gradient.float(), start, length, ctx.values), None, None, None


class TargetAttention(nn.Module):
    """DIN's activation unit: an MLP of [query, key, query - key, query * key] returns a row's weight, not normalized.

    The query is the candidate and the key is the row of an event. The first layer is linear. So the part of its output
    that depends on the key alone is computed once for each event, and the part that depends on the query alone once for
    each sample. Only the product needs both.
    """

    def __init__(self, width: int, config: HistoryConfig) -> None:
        super().__init__()
        self.score = MLP(4 * width, config.attention_mlp)
        self.out = nn.Linear(self.score.outputs, 1)

    def forward(self, target: Tensor, history: History) -> Tensor:
        """Return ``[B, D]`` from the candidate ``[B, D]`` and its history."""
        query, keys, product = self._first(target, history.rows)
        sums = pair_sums(query, keys, history.pairs)
        products = pair_products(target, history.rows, history.pairs)
        weights = self._weights(torch.addmm(sums, products, product.t()))
        return pair_pool(weights.squeeze(-1), history.rows, history.pairs)

    def padded(self, target: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return ``[B, D]`` from the candidate ``[B, D]``, rows ``[B, L, D]`` and mask ``[B, L]``."""
        query, keys, product = self._first(target, rows)
        hidden = keys + query.unsqueeze(1) + functional.linear(target.unsqueeze(1) * rows, product)
        weights = self._weights(hidden) * mask.unsqueeze(-1)
        pooled: Tensor = (weights * rows).sum(1)
        return pooled

    def _first(self, target: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the first layer's output that depend on the query alone, ``[B, H]``, and on the key
        alone, ``[..., H]``, and the layer's weights for query * key.
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


class _Block(nn.Module):
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
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.project(self.before(rows)).chunk(3, -1))
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
            raise ConfigError(f"model.history.heads is {config.heads}, which does not divide embedding_dim {width}")
        self.position = nn.Parameter(torch.zeros(longest, width))
        self.blocks = nn.ModuleList(_Block(width, config.heads) for _ in range(config.layers))

    def forward(self, target: Tensor, history: History) -> Tensor:
        """Return ``[B, D]``; the candidate is not used, so every distinct history is pooled once."""
        return history.expand(self.padded(target, *history.padded()))

    def padded(self, target: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return ``[U, D]`` from rows ``[U, L, D]`` and mask ``[U, L]``."""
        lengths = mask.sum(1, keepdim=True)
        age = (lengths - 1 - torch.arange(rows.shape[1], device=rows.device)).clamp(0, len(self.position) - 1)
        rows = rows + self.position[age]
        # Attention would be NaN if no position were visible. So the first position is always visible, and the results
        # of empty histories are set to zeros.
        visible = mask | (torch.arange(rows.shape[1], device=rows.device) == 0)
        for block in self.blocks:
            rows = block(rows, visible[:, None, None, :])
        return (rows * mask.unsqueeze(-1)).sum(1) / lengths.clamp(min=1)


def build_pooling(width: int, longest: int, config: HistoryConfig) -> TargetAttention | TransformerPooling:
    """Return the module for a pooling other than ``mean``, which needs no module."""
    if config.pooling == "target_attention":
        return TargetAttention(width, config)
    return TransformerPooling(width, longest, config)
