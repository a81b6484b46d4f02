"""Read rows by index, and add vectors to rows by index. Each operation is the gradient of the other
one.

On a device, histories and samples of a segment read their rows so. Lists of a batch are computed on
the host, in sizes that batches of a size class share. So a CUDA graph can repeat both operations:
neither waits for the device, and their results have the same bits in every run. Sums are in
ascending order of places, as those of the kernels of the host (`segments`, `attention`).

Shapes: N places, R rows, W columns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from stratarec.errors import ConfigError
from stratarec.kernels.runtime.accelerator import on_device

_MOST = 2**31 - 1


class RowIndex(NamedTuple):
    """The row that each place reads, and the places that read each row.

    Parameters
    ----------
    row : Tensor
        ``[N]`` int32, ascending unless there is `place`. Places that are in no list read a row, but
        add nothing to it.
    place : Tensor or None
        ``[M]`` int32: places ``place[offsets[r]:offsets[r + 1]]`` read row r, ascending; None if
        place i is i.
    offsets : Tensor
        ``[R + 1]`` int32, ascending.
    """

    row: Tensor
    place: Tensor | None
    offsets: Tensor

    def on_device(self, tensor: Tensor) -> RowIndex:
        """Return the lists on the device of `tensor`; they may be there already."""
        place = self.place if self.place is None else on_device(self.place, tensor)
        return RowIndex(on_device(self.row, tensor), place, on_device(self.offsets, tensor))

    @classmethod
    def of_windows(
        cls,
        start: Tensor,
        length: Tensor,
        *,
        rows: int,
        stride: int = 0,
        room: int,
        places: int | None = None,
    ) -> RowIndex:
        """List the rows of windows: window w reads rows ``start[w]`` to ``start[w] + length[w] -
        1``.

        Parameters
        ----------
        start, length : Tensor
            ``[U]`` int64 on the host.
        rows : int
            R. Places that belong to no window read its last row, which no window contains.
        stride : int
            Distance between the first places of two windows; 0 if the places of all windows follow
            one another.
        room : int
            Number of all places.
        places : int
            Room for places of windows; by default `room`.
        """
        places = room if places is None else places
        if max(room, places, rows) > _MOST:
            raise ConfigError(
                f"histories of a batch have {max(room, rows):,} places, expected at most {_MOST:,}"
            )
        row, place = np.full(room, rows - 1, np.int32), np.zeros(places, np.int32)
        offsets = np.zeros(rows + 1, np.int32)
        _list_windows(start.numpy(), length.numpy(), stride, row, place, offsets)
        return cls(*map(torch.from_numpy, (row, place, offsets)))

    @classmethod
    def of_lengths(cls, length: Tensor, *, rows: int, room: int) -> RowIndex:
        """List places of which the first ``length[0]`` read row 0, the next ``length[1]`` row 1,
        and so on.

        Parameters
        ----------
        length : Tensor
            ``[at most R]`` int64 on the host.
        rows, room : int
            R and N. Places behind these read row 0.
        """
        row, offsets = np.zeros(room, np.int32), np.zeros(rows + 1, np.int32)
        ends = np.cumsum(length.numpy())
        offsets[1 : len(ends) + 1] = ends
        offsets[len(ends) + 1 :] = ends[-1] if len(ends) else 0
        row[: offsets[-1]] = np.repeat(np.arange(len(ends), dtype=np.int32), length.numpy())
        return cls(torch.from_numpy(row), None, torch.from_numpy(offsets))


def take(rows: Tensor, index: RowIndex) -> Tensor:
    """Return the row of each place, ``[N, W]``, given `rows` ``[R, W]``. The gradient is `add_up`,
    in float32.
    """
    out: Tensor = _Take.apply(rows, index)
    return out


def add_up(values: Tensor, index: RowIndex) -> Tensor:
    """Return the sum of each row's places, ``[R, W]``, given the `values` of all places ``[N, W]``.

    The gradient is `take`.
    """
    out: Tensor = _AddUp.apply(values, index)
    return out


def _sums(values: Tensor, index: RowIndex) -> Tensor:
    listed = values if index.place is None else values.index_select(0, index.place)
    # One thread adds the places of a row and column, in order, on every device: no atomics.
    return torch.segment_reduce(listed.contiguous(), "sum", offsets=index.offsets, axis=0, unsafe=True)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return rows.index_select(0, index.row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sums(gradient.float(), ctx.index).to(gradient.dtype), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return _sums(values, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.index.row), None


@njit(nogil=True, cache=True)
def _list_windows(start, length, stride, row, place, offsets):
    """Sort the places of windows by row; within a row they ascend, as windows do."""
    for w in range(len(start)):
        for r in range(start[w], start[w] + length[w]):
            offsets[r + 1] += 1
    for r in range(1, len(offsets)):
        offsets[r] += offsets[r - 1]
    first = 0
    for w in range(len(start)):
        first = w * stride if stride else first
        for i in range(length[w]):
            r = start[w] + i
            row[first + i] = r
            # The offset of a row is its next free place, until all places are written.
            place[offsets[r]] = first + i
            offsets[r] += 1
        if not stride:
            first += length[w]
    for r in range(len(offsets) - 1, 0, -1):
        offsets[r] = offsets[r - 1]
    offsets[0] = 0


def reference_take(rows: Tensor, index: RowIndex) -> Tensor:
    """Return ``rows[index.row]``, whose gradient adds up listed places only."""
    listed = torch.zeros(len(index.row), 1)
    listed[_listed(index)] = 1
    read = rows[index.row]
    return read * listed + (read * (1 - listed)).detach()


def reference_add_up(values: Tensor, index: RowIndex) -> Tensor:
    """Add the places of each row one after another, ``[R, W]``."""
    places, offsets = _listed(index), index.offsets.tolist()
    rows = []
    for begin, end in pairwise(offsets):
        total = torch.zeros(values.shape[1])
        for place in places[begin:end]:
            total = total + values[place]
        rows.append(total)
    return torch.stack(rows)


def _listed(index: RowIndex) -> list[int]:
    """Return the places of all rows."""
    count = int(index.offsets[-1])
    return list(range(count)) if index.place is None else index.place[:count].tolist()
