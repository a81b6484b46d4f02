"""What the kernels of deduplicated batches compute, in plain torch."""

from __future__ import annotations

from torch import Tensor


def expand(pooled: Tensor, inverses: list[tuple[list[int], Tensor]], size: int) -> Tensor:
    """``[size, W]``: the columns of each pair come from its inverse, the others from the row itself."""
    out = pooled[:size].clone()
    for columns, inverse in inverses:
        out[:, columns] = pooled[inverse.long()][:, columns]
    return out


def fold(gradient: Tensor, inverses: list[tuple[list[int], Tensor]], rows: int) -> Tensor:
    """``[rows, W]``: the columns of each pair summed over samples in ascending order."""
    out = gradient.new_zeros(rows, gradient.shape[1])
    out[: len(gradient)] = gradient
    for columns, inverse in inverses:
        out[:, columns] = 0
        for sample, target in enumerate(inverse.tolist()):
            out[target, columns] += gradient[sample, columns]
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


def join_windows(start: Tensor, length: Tensor) -> list[int]:
    """Places that some window covers, ascending."""
    spans = zip(start.tolist(), length.tolist(), strict=True)
    return sorted({place for first, count in spans for place in range(first, first + count)})


def renumber(pointers: list[int]) -> tuple[list[int], list[int]]:
    """Number of each pointer by first appearance, and the distinct pointers."""
    used = list(dict.fromkeys(pointers))
    return [used.index(pointer) for pointer in pointers], used
