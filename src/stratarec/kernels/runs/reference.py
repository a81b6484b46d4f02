"""What the kernels of deduplicated batches compute, in plain torch."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def find_runs(inverses: list[list[int]]) -> list[int]:
    """Where neighbouring samples differ, from 0 to B."""
    samples = list(zip(*inverses, strict=True))
    return [b for b in range(len(samples)) if not b or samples[b] != samples[b - 1]] + [len(samples)]


def expand(pooled: Tensor, columns: list[int], starts: list[int]) -> Tensor:
    """``[B, W]``: `columns` come from the row of the sample's run, the others from its own."""
    out = pooled.clone()
    for run, (first, last) in enumerate(pairwise(starts)):
        out[first:last, columns] = pooled[run, columns]
    return out


def fold(gradient: Tensor, columns: list[int], starts: list[int]) -> Tensor:
    """``[B, W]``: `columns` summed over a run's samples in ascending order, zeros in rows beyond the runs."""
    out = gradient.clone()
    out[:, columns] = 0
    for run, (first, last) in enumerate(pairwise(starts)):
        for sample in range(first, last):
            out[run, columns] += gradient[sample, columns]
    return out


def sum_rows(gradient: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """``[rows, W]``: sums over the samples of each row in ascending order."""
    out = gradient.new_zeros(rows, gradient.shape[1])
    for sample, row in enumerate(inverse.tolist()):
        out[row] += gradient[sample]
    return out


def gather_windows(rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
    """``[U, longest, D]`` with zeros behind each window."""
    out = rows.new_zeros(len(start), longest, rows.shape[1])
    for u, (first, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        out[u, :count] = rows[first : first + count]
    return out


def scatter_windows(gradient: Tensor, start: Tensor, length: Tensor, values: int) -> Tensor:
    """``[values, D]``: gradients of the windows that cover each value, summed in ascending order of windows."""
    out = gradient.new_zeros(values, gradient.shape[2])
    for u, (first, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        out[first : first + count] += gradient[u, :count]
    return out
