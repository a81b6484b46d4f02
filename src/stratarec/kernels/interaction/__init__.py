"""DLRM's interaction (Naumov et al. 2019): dot products of all pairs of a sample's vectors, as one
operation.

Neither the concatenated vectors nor the full matrix of products of a batch is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from stratarec.errors import ConfigError
from stratarec.kernels.interaction import cpu
from stratarec.kernels.interaction.reference import dot_interaction as _reference
from stratarec.kernels.runtime.accelerator import transfers_of
from stratarec.kernels.runtime.memory import RECYCLER
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads
from stratarec.kernels.simd.vector import blocks

# Matrix products whose inner size is not a multiple of eight floats take up to 1.5 times as long.
_MULTIPLE = 8


def _padded(columns: int) -> int:
    return -(-columns // _MULTIPLE) * _MULTIPLE


def dot_interaction(dense: Tensor | None, pooled: Tensor) -> Tensor:
    """Return the dense vector, the products of all pairs, and zeros up to a multiple of eight
    columns.

    Parameters
    ----------
    dense : Tensor or None
        ``[B, D]`` output of the bottom MLP.
    pooled : Tensor
        ``[B, F, D]`` embeddings, contiguous.

    Returns
    -------
    Tensor
        ``[B, D + V (V - 1) / 2]`` float32 with V = F + 1, then the zeros. Without `dense`, V = F
        and there are no dense columns. Pairs (i, j), j < i, are in the order of the lower triangle;
        the dense vector has number 0.

    Raises
    ------
    ConfigError
        If widths or batch sizes differ.
    """
    if pooled.ndim != 3 or (dense is not None and dense.shape != (pooled.shape[0], pooled.shape[2])):
        got = None if dense is None else tuple(dense.shape)
        raise ConfigError(
            f"dot_interaction got dense {got} and pooled {tuple(pooled.shape)}, expected [B, D], [B, F, D]"
        )
    if torch.compiler.is_exporting():
        return _reference(dense, pooled)
    if has_torch_function((pooled,)):
        return handle_torch_function(dot_interaction, (pooled,), dense, pooled)
    if pooled.device.type != "cpu":
        with torch.autocast(pooled.device.type, enabled=False):
            front = None if dense is None else dense.float()
            vectors = (
                pooled.float() if front is None else torch.cat([front.unsqueeze(1), pooled.float()], dim=1)
            )
            pairs: Tensor = PairProducts.apply(vectors)  # type: ignore[no-untyped-call]
            return pairs if front is None else torch.cat([front, pairs], dim=1)
    out: Tensor = _Interaction.apply(dense, pooled)  # type: ignore[no-untyped-call]
    return out


@lru_cache(maxsize=16)
def split_columns(shared: tuple[bool, ...], *, dense: bool, width: int) -> tuple[Tensor, Tensor]:
    """Return which columns of `dot_interaction` the two outputs of `segment_interaction` contain,
    in their order.

    Parameters
    ----------
    shared : tuple of bool
        ``[F]``, whether the samples of a segment share the feature's vector.
    dense : bool
        Whether there is a dense vector.
    width : int
        Floats of a vector, D.
    """
    first = int(dense)
    per_sample = [*range(first), *(first + f for f, flag in enumerate(shared) if not flag)]
    per_segment = [first + f for f, flag in enumerate(shared) if flag]

    def column(one: int, other: int) -> int:
        high, low = max(one, other), min(one, other)
        return first * width + high * (high - 1) // 2 + low

    pairs = [column(i, j) for place, i in enumerate(per_sample) for j in per_sample[:place]]
    cross = [column(i, j) for i in per_sample for j in per_segment]
    of_segments = [column(i, j) for place, i in enumerate(per_segment) for j in per_segment[:place]]
    of_samples = [*range(first * width), *pairs, *cross]
    return torch.tensor(of_samples, dtype=torch.int64), torch.tensor(of_segments, dtype=torch.int64)


def segment_interaction(
    dense: Tensor | None, pooled: Tensor, shared: Sequence[bool], starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `dot_interaction` if the samples of a segment share some vectors; products of these
    are computed once a segment.

    Parameters
    ----------
    dense : Tensor or None
        ``[B, D]`` output of the bottom MLP.
    pooled : Tensor
        ``[B, F, D]`` embeddings, contiguous. Row r of a shared feature belongs to segment r; its
        rows from R on are not read.
    shared : sequence of bool
        ``[F]``, whether the samples of a segment share the feature's vector.
    starts : Tensor
        ``[R + 1]`` int64: segment r is samples ``starts[r]:starts[r + 1]``.

    Returns
    -------
    tuple of Tensor
        Float32 columns of each sample ``[B, .]`` and of each segment ``[R, .]``, as `split_columns`
        lists them, then zeros up to a multiple of eight.

    Raises
    ------
    ConfigError
        If shapes differ.

    Notes
    -----
    The gradient of shared features is not written in rows from R on.
    """
    fits = pooled.ndim == 3 and len(shared) == pooled.shape[1] and int(starts[-1]) == len(pooled)
    if not fits or (dense is not None and dense.shape != (pooled.shape[0], pooled.shape[2])):
        got = None if dense is None else tuple(dense.shape)
        raise ConfigError(
            f"segment_interaction got dense {got}, pooled {tuple(pooled.shape)}, {len(shared)} flags and "
            f"segments of {int(starts[-1])} samples, expected [B, D], [B, F, D], F and B"
        )
    out: tuple[Tensor, Tensor] = _SegmentInteraction.apply(dense, pooled, tuple(shared), starts)  # type: ignore[no-untyped-call]
    return out


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().view(-1).numpy()


class PairProducts(torch.autograd.Function):
    """Products of all pairs of a sample's vectors ``[B, V, D]`` on a device, ``[B, V (V - 1) /
    2]``.

    The gradient is a product with the symmetric matrix of gradients. torch's own gradient of the
    lower triangle adds element by element, which took 1.4 of 4.2 ms of a step on an H200.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        lower, ctx.column = _pair_places(vectors.shape[1], vectors.device)
        ctx.save_for_backward(vectors)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, lower)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        symmetric = nn.functional.pad(gradient, (0, 1)).index_select(1, ctx.column)
        return torch.bmm(symmetric.view(len(vectors), vectors.shape[1], -1), vectors)


@lru_cache(maxsize=16)
def _pair_places(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the flat indices of pairs in a ``[count, count]`` matrix, and the number of the pair
    at each flat index.

    Indices on the diagonal have the number of pairs, which is one more than the number of the last
    pair.
    """
    rows, columns = torch.tril_indices(count, count, offset=-1)
    column = torch.full((count, count), len(rows))
    column[rows, columns] = column[columns, rows] = torch.arange(len(rows))
    up = transfers_of(device).up
    return up(rows * count + columns), up(column.flatten())


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor | None, pooled: Tensor) -> Tensor:
        batch, features, width = pooled.shape
        first = int(dense is not None)
        vectors = features + first
        columns = _padded(first * width + vectors * (vectors - 1) // 2)
        flat = _flat(pooled)
        front = flat[:0] if dense is None else _flat(dense)
        out = RECYCLER.empty(batch, columns)
        ctx.samples = front, flat, first, batch, vectors, width, columns
        ctx.types = (None if dense is None else dense.dtype, pooled.dtype)
        ctx.shape = pooled.shape
        cpu.kernels(*blocks(width)).forward(team_of(team_threads()), ctx.samples, _flat(out))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        batch, features, width = ctx.shape
        dense_type, pooled_type = ctx.types
        dense_out = torch.empty(batch if dense_type else 0, width)
        pooled_out = RECYCLER.empty(batch, features, width)
        cpu.kernels(*blocks(width)).backward(
            team_of(team_threads()), ctx.samples, _flat(gradient), _flat(dense_out), _flat(pooled_out)
        )
        return (dense_out.to(dense_type) if dense_type else None), pooled_out.to(pooled_type)


def _tile(segments: int, threads: int) -> int:
    return max(min(segments // (threads * 4), 32), 1)


class _SegmentInteraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dense: Tensor | None, pooled: Tensor, shared: tuple[bool, ...], starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, features, width = pooled.shape
        columns = split_columns(shared, dense=dense is not None, width=width)
        sample_out = RECYCLER.empty(batch, _padded(len(columns[0])))
        segment_out = RECYCLER.empty(starts.numel() - 1, _padded(len(columns[1])))
        flat, threads = _flat(pooled), team_threads()
        ctx.samples = (
            flat[:0] if dense is None else _flat(dense),
            flat,
            int(dense is not None),
            width,
            features,
            *_places(shared),
            starts.numpy(),
        )
        ctx.types = (None if dense is None else dense.dtype, pooled.dtype)
        ctx.shape = pooled.shape
        cpu.kernels(*blocks(width)).segment_forward(
            team_of(threads),
            (*ctx.samples, _tile(len(segment_out), threads)),
            _products(sample_out, segment_out),
        )
        return sample_out, segment_out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_samples: Tensor, of_segments: Tensor
    ) -> tuple[Tensor | None, Tensor, None, None]:
        batch, features, width = ctx.shape
        dense_type, pooled_type = ctx.types
        dense_out = torch.empty(batch if dense_type else 0, width)
        pooled_out, threads = RECYCLER.empty(batch, features, width), team_threads()
        cpu.kernels(*blocks(width)).segment_backward(
            team_of(threads),
            (*ctx.samples, _tile(len(of_segments), threads)),
            _products(of_samples, of_segments),
            _flat(dense_out),
            _flat(pooled_out),
        )
        return (dense_out.to(dense_type) if dense_type else None), pooled_out.to(pooled_type), None, None


def _products(of_samples: Tensor, of_segments: Tensor) -> tuple[Any, ...]:
    """Return the fields of `cpu.SegmentProducts`."""
    return _flat(of_samples), _flat(of_segments), of_samples.shape[1], of_segments.shape[1]


def _places(shared: tuple[bool, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the unshared features and of the shared features."""
    flags = np.array(shared, dtype=bool)
    return np.flatnonzero(~flags), np.flatnonzero(flags)
