"""Pooling in plain torch: one bag and one lookup at a time.

All arithmetic is float32, in the order of the fast kernels. So results can be compared bit for bit,
unless they add numbers across the width of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool(weight: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Return the sum or mean of the rows of each bag, ``[B, D]``.

    Shapes: weight ``[R, D]``, values ``[N]``, offsets ``[B + 1]``.
    """
    out = torch.zeros(offsets.numel() - 1, weight.shape[1])
    for b in range(out.shape[0]):
        first, last = int(offsets[b]), int(offsets[b + 1])
        for i in range(first, last):
            row = weight[int(values[i])]
            out[b] += row if weights is None else weights[i] * row
        if mean and last > first + 1:
            out[b] *= torch.tensor(1.0) / (last - first)
    return out
