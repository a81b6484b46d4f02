"""Deduplicated batches: pointers to inverse maps, windows to shared values, pooled vectors to samples and back.

Shapes: B samples, U distinct values, R >= B, U rows of a pooled buffer, W its columns, E values under windows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.dedup import cpu
from stratarec.kernels.memory import RECYCLER
from stratarec.kernels.threads import use_torch_threads

# A cache line of float32: wide spans are cut into pieces of it, so that threads share the work of `fold`.
_LINE = 16
_CHUNKS_PER_THREAD = 4


def renumber(pointers: NDArray[np.int32], place: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Pointers as numbers by first appearance, and the distinct pointers; an array look-up each, no hashing.

    Parameters
    ----------
    pointers : ndarray
        ``[B]`` in [0, len(place)).
    place : ndarray
        Scratch full of -1, which it is again afterwards.
    """
    inverse, used = np.empty(len(pointers), dtype=np.int32), np.empty(len(pointers), dtype=np.int64)
    count = cpu.renumber(pointers, place, inverse, used)
    return inverse, used[:count]


def join_windows(
    start: NDArray[np.int64], length: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where windows start among the values that they need, and the ranges (begin, size) of those values, ascending."""
    order = np.argsort(start, kind="stable")
    moved, begin, size = (np.empty(len(start), dtype=np.int64) for _ in range(3))
    ranges = cpu.join_windows(start, length, order, moved, begin, size)
    return moved, begin[:ranges], size[:ranges]


class Spans:
    """Which columns of a pooled buffer are deduplicated, and by which inverse map.

    Parameters
    ----------
    columns : int
        W.
    groups : sequence
        Pairs of ``(first column, width)`` spans and an inverse ``[B]``; spans do not overlap.
    size : int
        B.
    """

    def __init__(self, columns: int, groups: Sequence[tuple[Sequence[tuple[int, int]], Tensor]], size: int) -> None:
        self.columns, self.size = columns, size
        own = sorted((first, width, number) for number, (spans, _) in enumerate(groups) for first, width in spans)
        self._inverses = [inverse.numpy().astype(np.int32, copy=False) for _, inverse in groups]
        self._own = _merged(own)

    @property
    def in_place(self) -> bool:
        """Whether `expand` may overwrite its input: inverses number by first appearance, as the loader's do."""
        places = np.arange(self.size)
        return all(bool((inverse <= places).all()) for inverse in self._inverses)

    def expand(self, pooled: Tensor) -> Tensor:
        """``[R, W]`` -> ``[B, W]``: `pooled` itself, overwritten, where `in_place` and R is B; else a new tensor."""
        if pooled.shape[0] == self.size and self.in_place and pooled.is_contiguous():
            first, width, inverse = self._arrays()
            use_torch_threads()
            cpu.expand(_flat(pooled), self.columns, inverse, first, width, self.size)
            return pooled
        out = pooled[: self.size].clone()
        for first_column, columns, number in self._own:
            places = slice(first_column, first_column + columns)
            out[:, places] = pooled[:, places].index_select(0, torch.from_numpy(self._inverses[number]))
        return out

    def fold(self, gradient: Tensor, rows: int) -> Tensor:
        """``[B, W]`` -> ``[R, W]``: gradients of a distinct value summed over its samples in ascending order.

        R is at least B unless the spans cover every column.
        """
        out = RECYCLER.empty(rows, self.columns)
        kept = min(rows, self.size)
        out[:kept] = gradient[:kept]
        out[kept:] = 0
        first, width, inverse = self._arrays()
        use_torch_threads()
        cpu.fold(_flat(gradient), self.columns, inverse, first, width, out.view(-1).numpy(), self.size, rows)
        return out

    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """First column, width and inverse of each piece."""
        pieces = _pieces(self._own)
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        inverses = [self._inverses[number] for _, _, number in pieces]
        rows = np.stack(inverses) if inverses else np.zeros((0, self.size), dtype=np.int32)
        return table[:, 0].copy(), table[:, 1].copy(), rows


def _flat(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.contiguous().view(-1).numpy()
    return array


def _merged(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring spans of one group as one."""
    found: list[tuple[int, int, int]] = []
    for first, width, number in spans:
        if found and found[-1][0] + found[-1][1] == first and found[-1][2] == number:
            found[-1] = (found[-1][0], found[-1][1] + width, number)
        else:
            found.append((first, width, number))
    return found


def _pieces(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [
        (first + done, min(_LINE, width - done), number)
        for first, width, number in spans
        for done in range(0, width, _LINE)
    ]


def gather_windows(rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
    """``[U, longest, D]`` from rows ``[E, D]``, with zeros behind each window."""
    out = RECYCLER.empty(start.numel(), longest, rows.shape[1])
    chunks = use_torch_threads() * _CHUNKS_PER_THREAD
    cpu.gather_windows(
        _flat(rows), rows.shape[1], start.numpy(), length.numpy(), longest, chunks, out.view(-1).numpy()
    )  # fmt: skip
    return out


def scatter_windows(gradient: Tensor, start: Tensor, length: Tensor, values: int) -> Tensor:
    """``[E, D]`` from ``[U, longest, D]``: the sum over the windows that cover each value, in ascending order."""
    longest, width = gradient.shape[1:]
    out = RECYCLER.empty(values, width)
    chunks = use_torch_threads()
    cpu.scatter_windows(
        _flat(gradient), width, start.numpy(), length.numpy(), longest, chunks, out.view(-1).numpy(), values
    )  # fmt: skip
    return out
