"""The pairwise dot interaction in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dot_interaction(dense: Tensor | None, pooled: Tensor) -> Tensor:
    """Return the dense vector, if there is one, and the products of all pairs.

    Dense is ``[B, D]`` and pooled ``[B, F, D]``. The result is ``[B, D + (F + 1) F / 2]``, or ``[B,
    F (F - 1) / 2]`` without dense.
    """
    vectors = pooled if dense is None else torch.cat([dense.unsqueeze(1), pooled], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    count = vectors.shape[1]
    rows, columns = torch.tril_indices(count, count, offset=-1, device=pooled.device)
    pairs = products[:, rows, columns]
    return pairs if dense is None else torch.cat([dense, pairs], dim=1)


def segment_interaction(
    dense: Tensor | None,
    pooled: Tensor,
    shared: Sequence[bool],
    starts: Tensor,
    columns: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return columns[0] of the interaction for every sample, and columns[1] for the first sample of
    every segment.
    """
    segment = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff())
    vectors = torch.where(torch.tensor(shared).view(1, -1, 1), pooled[segment], pooled)
    products = dot_interaction(dense, vectors)
    return products[:, columns[0]], products[starts[:-1]][:, columns[1]]
