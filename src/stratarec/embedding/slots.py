"""The seam of level 0: slots of float32 rows that are trained in place, wherever they lie.

Everything that reads or writes a trained row goes through a `SlotMemory`. Caches, stores, saving and the module know
slot numbers, host rows (`FloatRows`) and records (bytes), never the arrays: slots in the memory of another device need
another class here and nothing else. For a table that lies whole in level 0 a slot is a row; under a cache it is a place
that rows come to and leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.rows import FloatRows, Indices
from stratarec.kernels import cache, swap
from stratarec.kernels import embedding as kernel
from stratarec.kernels.random import fill_uniform

Records = NDArray[np.uint8]
Home = tuple[Records, NDArray[np.uint8], NDArray[np.uint8]]
"""Records in addressable memory ``[R, record_bytes]``, the bits of rows that were written, of those that changed."""


class Gradients(NamedTuple):
    """Gradients of what a group of tables gave.

    Parameters
    ----------
    pooled : Tensor
        ``[B, columns]`` float32, contiguous, of all groups' pooled output.
    rows : sequence of Tensor
        ``[N_f, D]`` of each of the group's sequence features, in order.
    """

    pooled: Tensor
    rows: Sequence[Tensor]


class SlotMemory(Protocol):
    """S slots of width D with their optimizer state. Slots and places are ``[n]`` int64."""

    slots: int
    width: int
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of weights and state."""

    def like(self, slots: int) -> SlotMemory:
        """Zeroed slots of the same width and state on the same device."""

    def pool(self, layout: kernel.GroupLayout, bags: kernel.BagBatch, out: Tensor) -> int:
        """Fill the group's columns of `out` ``[B, columns]``; the place of an id outside its table, or -1."""

    def gather(self, layout: kernel.GroupLayout, bags: kernel.BagBatch, feature: int, out: Tensor) -> int:
        """Fill `out` ``[N, D]`` with the rows of a sequence feature; returns as `pool` does."""

    def update(
        self, layout: kernel.GroupLayout, bags: kernel.BagBatch, gradients: Gradients, rule: kernel.RowUpdate
    ) -> None:
        """One step of the row optimizer."""

    def weight_gradient(
        self, layout: kernel.GroupLayout, bags: kernel.BagBatch, pooled: Tensor, out: Tensor
    ) -> None:  # fmt: skip
        """Add the gradients of per-sample weights to `out` ``[N]``."""

    def read(self, slots: Indices) -> FloatRows:
        """A host copy of some slots."""

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        """``slots[i]`` gets row ``places[i]`` of `rows`."""

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        """``weight`` ``[n, D]`` and named optimizer state of the slots ``first:last``, sharing their memory."""

    def encode(
        self, codec: RecordCodec, slots: Indices, records: Records, places: Indices, keys: NDArray[np.uint64],
        write: int,
    ) -> int:  # fmt: skip
        """`RecordCodec.encode` of slots."""

    def decode(self, codec: RecordCodec, records: Records, places: Indices, slots: Indices) -> None:
        """`RecordCodec.decode` into slots."""

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        """Initial values in the slots of the rows of `moves` that are `absent` from their home."""

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        """Victims go home and the rows that take their slots come in; table and row of one that does not fit."""


class CpuSlots:
    """A `SlotMemory` in DRAM.

    Parameters
    ----------
    slots, width : int
        S and D.
    optimizer : RowOptimizerConfig
        Says which state there is and what it is called.
    """

    device = torch.device("cpu")

    def __init__(self, slots: int, width: int, optimizer: RowOptimizerConfig) -> None:
        self._optimizer = optimizer
        kept = {"row_state": bool(optimizer.row_state), "full_state": bool(optimizer.full_state)}
        self._rows = FloatRows.allocate(slots, width, **kept)
        self._kept = kept
        self._workspace = kernel.Workspace()
        self.slots, self.width = slots, width

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def like(self, slots: int) -> CpuSlots:
        return CpuSlots(slots, self.width, self._optimizer)

    def pool(self, layout: kernel.GroupLayout, bags: kernel.BagBatch, out: Tensor) -> int:
        return kernel.pool(self._rows.weights, layout, bags, out.numpy())

    def gather(self, layout: kernel.GroupLayout, bags: kernel.BagBatch, feature: int, out: Tensor) -> int:
        return kernel.gather(self._rows.weights, layout, bags, feature, out.numpy())

    def update(
        self, layout: kernel.GroupLayout, bags: kernel.BagBatch, gradients: Gradients, rule: kernel.RowUpdate
    ) -> None:
        rows = self._rows
        kernel.update(
            rows.weights, rows.row_state, rows.full_state, layout, bags, gradients.pooled.numpy(),
            *_flat(layout, gradients.rows), rule, self._workspace,
        )  # fmt: skip

    def weight_gradient(
        self, layout: kernel.GroupLayout, bags: kernel.BagBatch, pooled: Tensor, out: Tensor
    ) -> None:  # fmt: skip
        kernel.weight_gradient(self._rows.weights, layout, bags, pooled.numpy(), out.numpy())

    def read(self, slots: Indices) -> FloatRows:
        found = FloatRows.allocate(len(slots), self.width, **self._kept)
        found.copy(np.arange(len(slots), dtype=np.int64), self._rows, slots)
        return found

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        self._rows.copy(slots, rows, places)

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        rows, width = self._rows, self.width

        def matrix(array: NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(array[first * width : last * width]).view(-1, width)

        views = {"weight": matrix(rows.weights)}
        if self._optimizer.row_state:
            views[self._optimizer.row_state] = torch.from_numpy(rows.row_state[first:last])
        if self._optimizer.full_state:
            views[self._optimizer.full_state] = matrix(rows.full_state)
        return views

    def fill(self, first: int, last: int, key: int, bound: float) -> None:
        """Uniform weights in +-bound for the slots ``first:last``, a function of `key` and the slot's place."""
        weights = self._rows.weights[first * self.width : last * self.width].reshape(-1, self.width)
        fill_uniform(weights, key=key, low=-bound, high=bound)

    def encode(
        self, codec: RecordCodec, slots: Indices, records: Records, places: Indices, keys: NDArray[np.uint64],
        write: int,
    ) -> int:  # fmt: skip
        return codec.encode(self._rows, slots, records, places, keys, write)

    def decode(self, codec: RecordCodec, records: Records, places: Indices, slots: Indices) -> None:
        codec.decode(records, places, self._rows, slots)

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        rows = self._rows
        cache.initialize(
            layout, moves, absent, rows.weights, rows.row_state, rows.full_state, self.width, **self._kept
        )  # fmt: skip

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        slots = self._rows.weights, self._rows.row_state, self._rows.full_state
        return swap.swap(layout, staging, workspace, codec.layout, slots, home, write)


_NO_ROWS = np.zeros(1, dtype=np.float32)


def _flat(layout: kernel.GroupLayout, rows: Sequence[Tensor]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Gradients of the sequence features one after another, and where each feature's start."""
    if not rows:
        return _NO_ROWS, layout.nowhere
    start = np.zeros(len(layout.sequence), dtype=np.int64)
    start[np.flatnonzero(layout.sequence)] = np.cumsum([0, *(part.numel() for part in rows)])[:-1]
    return torch.cat([part.reshape(-1) for part in rows]).numpy(), start
