"""What models do with deduplicated batches: vectors of runs or of distinct values to samples and back.

Shapes: B samples, R runs of them, U distinct values, W columns of a pooled buffer, E values under windows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.runs import cpu, plain
from stratarec.kernels.runtime.accelerator import beside
from stratarec.kernels.runtime.memory import RECYCLER
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads, tile_size

# A cache line of float32: columns are cut into pieces of it, so that threads share the work.
_LINE = 16


def find_runs(inverse: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[R + 1]``: `starts` of runs from 0 to B, and where in them neighbouring samples differ in `inverse` ``[B]``.

    Samples of a session lie together in a batch, so runs are nearly as few as distinct values, and copying to the
    samples of a run, or summing over them, needs no index.
    """
    found = np.empty(len(inverse) + 1, dtype=np.int64)
    return found[: cpu.find_runs(inverse, starts, found)]


class RunColumns:
    """Which columns of a pooled buffer hold one row a run of samples instead of one a sample.

    Parameters
    ----------
    columns : int
        W.
    spans : sequence
        Pairs of first column and width; they do not overlap.
    starts : Tensor
        ``[R + 1]`` int64: run r is samples ``starts[r]:starts[r + 1]``, at least one.
    """

    def __init__(self, columns: int, spans: Sequence[tuple[int, int]], starts: Tensor) -> None:
        self.columns, self.starts = columns, starts.numpy()
        self._lengths = starts.diff()
        self.size = int(self.starts[-1])
        self._spans = _merged(sorted(spans))

    def expand(self, pooled: Tensor) -> Tensor:
        """``[B, W]`` of which the spans are filled for each sample: `pooled` itself, overwritten."""
        if pooled.device.type != "cpu":
            return plain.expand(pooled, self._spans, self._run(pooled))
        first, width = _pieces(self._spans)
        cpu.expand(
            team_of(team_threads()), pooled.view(-1).numpy(), self.columns, self.starts, first, width
        )  # fmt: skip
        return pooled

    def fold(self, gradient: Tensor) -> Tensor:
        """``[B, W]`` -> ``[B, W]``: in the spans, gradients summed over a run's samples in ascending order.

        The spans of rows beyond the number of runs hold anything.
        """
        if gradient.device.type != "cpu":
            return plain.fold(gradient, self._spans, self._run(gradient), len(self._lengths))
        out = RECYCLER.empty(self.size, self.columns)
        first, width = (np.array(part, dtype=np.int64) for part in zip(*self._spans, strict=True))
        threads = team_threads()
        tile = tile_size(len(self.starts) - 1, threads)
        cpu.fold(
            team_of(threads), _flat(gradient), self.columns, self.starts, first, width, out.view(-1).numpy(), tile
        )  # fmt: skip
        return out

    def _run(self, tensor: Tensor) -> Tensor:
        """``[B]`` run of each sample, where `tensor` is."""
        return beside(torch.repeat_interleave(torch.arange(len(self._lengths)), self._lengths), tensor)


def sum_rows(gradient: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """``[rows, W]`` from ``[B, W]``: row r is the sum over samples with ``inverse[b] == r`` in ascending order."""
    if gradient.device.type != "cpu":
        return plain.sum_rows(gradient, beside(inverse.long(), gradient), rows)
    out = RECYCLER.empty(rows, gradient.shape[1])
    cpu.sum_rows(
        team_of(team_threads()), _flat(gradient), gradient.shape[1], inverse.numpy(), out.view(-1).numpy(),
        rows, _LINE,
    )  # fmt: skip
    return out


def _flat(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().contiguous().view(-1).numpy()
    return array


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring spans as one."""
    found: list[tuple[int, int]] = []
    for first, width in spans:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + width)
        else:
            found.append((first, width))
    return found


def _pieces(spans: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pieces = [(first + done, min(_LINE, width - done)) for first, width in spans for done in range(0, width, _LINE)]
    table = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def gather_windows(rows: Tensor, start: Tensor, length: Tensor, longest: int) -> Tensor:
    """``[U, longest, D]`` from rows ``[E, D]``, with zeros behind each window."""
    if rows.device.type != "cpu":
        return plain.gather_windows(rows, beside(plain.window_places(start, length, longest, len(rows)), rows))
    out, threads = RECYCLER.empty(start.numel(), longest, rows.shape[1]), team_threads()
    cpu.gather_windows(
        team_of(threads), _flat(rows), rows.shape[1], start.numpy(), length.numpy(), longest,
        tile_size(start.numel(), threads), out.view(-1).numpy(),
    )  # fmt: skip
    return out


def scatter_windows(gradient: Tensor, start: Tensor, length: Tensor, values: int) -> Tensor:
    """``[E, D]`` from ``[U, longest, D]``: the sum over the windows that cover each value, in ascending order."""
    longest, width = gradient.shape[1:]
    if gradient.device.type != "cpu":
        places = beside(plain.window_places(start, length, longest, values), gradient)
        return plain.scatter_windows(gradient, places, values)
    out, threads = RECYCLER.empty(values, width), team_threads()
    cpu.scatter_windows(
        team_of(threads), _flat(gradient), width, start.numpy(), length.numpy(), longest, tile_size(values, threads),
        out.view(-1).numpy(), values,
    )  # fmt: skip
    return out
