"""The seam of level 0: slots of float32 rows that are trained in place.

Everything that reads or writes a trained row goes through `CpuSlots`. Caches, stores, saving and the module know slot
numbers, host rows (`FloatRows`) and records (bytes), never the arrays. For a table that lies whole in level 0 a slot is
a row; under a cache it is a place that rows come to and leave.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tables.row_arrays import FloatRows, Indices
from stratarec.kernels import cache, pooling, swap, update
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import fill_uniform
from stratarec.kernels.update import Gradients, Missed, RowUpdate, Scratchpad

Records = NDArray[np.uint8]
Home = tuple[Records, NDArray[np.uint8], NDArray[np.uint8]]
"""Records in addressable memory ``[R, record_bytes]``, the bits of rows that were written, of those that changed."""


class CpuSlots:
    """S slots of width D with their optimizer state, in DRAM.

    Slots and places are ``[n]`` int64. Slots in the memory of another device need a class with these methods and
    nothing else: rows come and go as `FloatRows` and as records of the host, while `pool`, `gather`, `update`,
    `square_norms`, `catch_up` and `weight_gradient` take tensors of that device. A step must give the bits that these
    give: sums of a row's gradients in ascending order of lookup position, noise from keys alone.

    Parameters
    ----------
    slots, width : int
        S and D.
    optimizer : RowOptimizerConfig
        Says which state there is and what it is called.
    scratch : Scratchpad
        Of the updates of all tables that are not updated at the same time; one of its own by default.
    """

    def __init__(
        self, slots: int, width: int, optimizer: RowOptimizerConfig, scratch: Scratchpad | None = None
    ) -> None:
        self._optimizer = optimizer
        self._rows = self._allocate(slots, width)
        self._slots = update.Slots(*self._rows.parts)
        self._workspace = update.UpdateWorkspace(scratch)
        self.slots, self.width = slots, width

    def _allocate(self, slots: int, width: int) -> FloatRows:
        return FloatRows.allocate(slots, width, **self._optimizer.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and state."""
        return self._rows.nbytes

    def like(self, slots: int) -> CpuSlots:
        """Zeroed slots of the same width and state on the same device."""
        return CpuSlots(slots, self.width, self._optimizer)

    def pool(self, layout: GroupLayout, bags: BagBatch, out: Tensor) -> int:
        """Fill the group's columns of `out` ``[B, columns]``; the place of an id outside its table, or -1."""
        return pooling.pool(self._rows.weights, layout, bags, out)

    def gather(self, layout: GroupLayout, bags: BagBatch, feature: int, out: Tensor) -> int:
        """Fill `out` ``[N, D]`` with the rows of a sequence feature; returns as `pool` does."""
        return pooling.gather(self._rows.weights, layout, bags, feature, out)

    def update(
        self, layout: GroupLayout, bags: BagBatch, gradients: Gradients, rule: RowUpdate, missed: Missed | None
    ) -> None:
        """One step of the row optimizer."""
        update.update(self._slots, layout, bags, gradients, rule, self._workspace, missed)

    def square_norms(self, layout: GroupLayout, bags: BagBatch, gradients: Gradients) -> NDArray[np.float64]:
        """Of the summed gradients of a batch's rows, ``[tables]``."""
        return update.square_norms(layout, bags, gradients, self._workspace)

    def catch_up(self, layout: GroupLayout, bags: BagBatch, missed: Missed) -> None:
        """Let the rows of a batch take the steps that they missed; ids outside their table are passed over."""
        update.catch_up(self._slots, layout, bags, missed, self._workspace)

    def settle(self, first: int, last: int, missed: Missed) -> None:
        """Let the rows in the slots ``first:last`` take the steps that they missed."""
        update.settle(self._slots, self.width, first, last, missed)

    def weight_gradient(self, layout: GroupLayout, bags: BagBatch, pooled: Tensor, out: Tensor) -> None:
        """Add the gradients of per-sample weights to `out` ``[N]``."""
        pooling.weight_gradient(self._rows.weights, layout, bags, pooled, out)

    def read(self, slots: Indices) -> FloatRows:
        """A host copy of some slots."""
        found = self._allocate(len(slots), self.width)
        found.copy(np.arange(len(slots), dtype=np.int64), self._rows, slots)
        return found

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        """``slots[i]`` gets row ``places[i]`` of `rows`."""
        self._rows.copy(slots, rows, places)

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        """``weight`` ``[n, D]`` and named optimizer state of the slots ``first:last``, sharing their memory."""
        rows, width, names = self._rows, self.width, self._optimizer.full_state
        views = {"weight": torch.from_numpy(rows.weights).view(-1, width)[first:last]}
        if self._optimizer.row_state:
            views[self._optimizer.row_state] = torch.from_numpy(rows.row_state[first:last])
        if names:
            # Within a slot one state of all weights follows the other, as kernels and records have them.
            state = torch.from_numpy(rows.full_state).view(-1, len(names), width)[first:last]
            views.update(zip(names, state.unbind(1), strict=True))
        if self._optimizer.clocked:
            views["clock"] = torch.from_numpy(rows.clock[first:last])
        return views

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        """Initial weights of all rows of `table` in the slots ``first:last``, a function of `key` and the row."""
        part, bound = table.numbering, table.bound
        weights = self._rows.weights[first * self.width : last * self.width].reshape(-1, self.width)
        fill_uniform(weights, key=key, first_row=part.first, stride=part.stride, low=-bound, high=bound)

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        """Which of the slots ``first:last``, which hold the rows of `table` from `row` on, are not as `fill` left them.

        Counted from `first`; differences are those of bits.
        """
        part, bound = table.numbering, table.bound
        began = np.empty((last - first, self.width), dtype=np.float32)
        begin = part.first + row * part.stride
        fill_uniform(began, key=key, first_row=begin, stride=part.stride, low=-bound, high=bound)
        rows = [each.reshape(self.slots, -1)[first:last].view(np.int32) for each in self._rows.parts if len(each)]
        differs = (rows[0] != began.view(np.int32)).any(axis=1)
        for state in rows[1:]:
            differs |= state.any(axis=1)
        return np.flatnonzero(differs)

    def clear_state(self) -> None:
        """Make optimizer state and clocks of all slots those of rows that were never trained."""
        for part in self._rows.parts[1:]:
            part[:] = 0

    def records(self, slots: Indices) -> Records:
        """Float32 records of some slots, as an exact codec has them: the parts of `FloatRows` one after another."""
        parts = [part.reshape(self.slots, -1)[slots].view(np.uint8) for part in self._rows.parts if len(part)]
        return np.concatenate([np.empty((len(slots), 0), dtype=np.uint8), *parts], axis=1)

    def take_records(self, slots: Indices, records: Records) -> None:
        """Some slots become what `records` gave."""
        at = 0
        for part in (part for part in self._rows.parts if len(part)):
            rows = part.reshape(self.slots, -1)
            end = at + 4 * rows.shape[1]
            rows[slots] = np.ascontiguousarray(records[:, at:end]).view(part.dtype)
            at = end

    def encode(
        self, codec: RecordCodec, slots: Indices, records: Records, places: Indices, keys: NDArray[np.uint64],
        write: int,
    ) -> int:  # fmt: skip
        """`RecordCodec.encode` of slots."""
        return codec.encode(self._rows, slots, records, places, keys, write)

    def decode(self, codec: RecordCodec, records: Records, places: Indices, slots: Indices) -> None:
        """`RecordCodec.decode` into slots."""
        codec.decode(records, places, self._rows, slots)

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        """Initial values in the slots of the rows of `moves` that are `absent` from their home."""
        cache.initialize(layout, moves, absent, self._slots, self.width)

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        """Victims go home and the rows that take their slots come in; table and row of one that does not fit."""
        return swap.swap(layout, staging, workspace, codec.layout, self._slots, home, write)
