"""Slots in the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.slots.memory import (
    PackedBatch,
    Records,
    SlotDevice,
    SlotMemory,
    StagedBags,
    Tensors,
    differing_rows,
    named_views,
    require_unchanged,
)
from stratarec.kernels import cache, pooling, swap, update
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import fill_uniform
from stratarec.kernels.runtime.accelerator import HOST
from stratarec.kernels.update import Gradients, Missed, RowUpdate

Home = tuple[Records, NDArray[np.uint8], NDArray[np.uint8]]
"""Records in addressable memory ``[R, record_bytes]``, a bitmap of written rows, and a bitmap of
changed rows.
"""


class CpuSlots(SlotMemory):
    """`SlotMemory` in DRAM: a step has run when `update` returns, so no method waits for a step.

    Parameters
    ----------
    slots, width : int
        S and D.
    optimizer : RowOptimizerConfig
        Defines the optimizer state and its names.
    """

    addresses_host, queued = True, False
    transfers = HOST

    def __init__(self, level0: SlotDevice, slots: int, width: int, optimizer: RowOptimizerConfig) -> None:
        self._level0 = level0
        self._optimizer = optimizer
        self._rows = self._allocate(slots, width)
        self._slots = update.Slots(*self._rows.parts)
        self._workspace = update.UpdateWorkspace(level0.scratch)
        self.slots = slots
        self.width = width

    def _allocate(self, slots: int, width: int) -> FloatRows:
        return FloatRows.allocate(slots, width, **self._optimizer.state_shape)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def like(self, slots: int) -> SlotMemory:
        return type(self)(self._level0, slots, self.width, self._optimizer)

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBags:
        return StagedBags(layout, bags)

    def pack(
        self, staged: Sequence[StagedBags], tensors: Tensors = (), stride: int | None = None
    ) -> PackedBatch:
        """Copy nothing: kernels read the batch itself, and `update` groups the lookups."""
        return PackedBatch(tuple(staged))

    def empty(self, *shape: int) -> Tensor:
        return self._level0.empty(*shape)

    def pool(self, staged: StagedBags, out: Tensor) -> None:
        require_unchanged(pooling.pool(self._rows.weights, staged.layout, staged.bags, out))

    def gather(self, staged: StagedBags, feature: int) -> Tensor:
        first, last = staged.bags.span(feature)
        # Not zeroed: every row is written.
        out = self.empty(last - first, self.width)
        require_unchanged(pooling.gather(self._rows.weights, staged.layout, staged.bags, feature, out))
        return out

    def update(
        self, staged: StagedBags, gradients: Gradients, rule: RowUpdate, missed: Missed | None
    ) -> None:
        update.update(self._slots, staged.layout, staged.bags, gradients, rule, self._workspace, missed)

    def queue_update(
        self,
        staged: StagedBags,
        gradients: Gradients,
        numbers: Tensor,
        constants: tuple[float, ...],
        ok: Tensor,
    ) -> None:
        raise AssertionError("the host runs steps at once: `queued` is false")

    def square_norms(self, staged: StagedBags, gradients: Gradients) -> NDArray[np.float64]:
        return update.square_norms(staged.layout, staged.bags, gradients, self._workspace)

    def apply_missed_steps(self, staged: StagedBags, missed: Missed) -> None:
        update.apply_missed_steps(self._slots, staged.layout, staged.bags, missed, self._workspace)

    def weight_gradient(self, staged: StagedBags, pooled: Tensor, out: Tensor) -> None:
        pooling.weight_gradient(self._rows.weights, staged.layout, staged.bags, pooled, out)

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        update.apply_missed_steps_to_range(self._slots, self.width, first, last, missed)

    def read(self, slots: Indices) -> FloatRows:
        rows = self._allocate(len(slots), self.width)
        rows.copy(np.arange(len(slots), dtype=np.int64), self._rows, slots)
        return rows

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        self._rows.copy(slots, rows, places)

    def copy_from(self, slots: Indices, source: SlotMemory, source_slots: Indices) -> None:
        assert isinstance(source, CpuSlots)
        self._rows.copy(slots, source._rows, source_slots)

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        return named_views(
            self._optimizer, tuple(map(torch.from_numpy, self._rows.parts)), self.width, first, last
        )

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        part, bound = table.numbering, table.bound
        weights = self._rows.weights[first * self.width : last * self.width].reshape(-1, self.width)
        fill_uniform(weights, key=key, first_row=part.first, stride=part.stride, low=-bound, high=bound)

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        rows = [array.reshape(self.slots, -1)[first:last] for array in self._rows.parts if len(array)]
        return differing_rows(rows, key, table, row)

    def clear_state(self) -> None:
        for part in self._rows.parts[1:]:
            part[:] = 0

    def encode(
        self,
        codec: RecordCodec,
        slots: Indices,
        records: Records | Tensor,
        places: Indices,
        keys: NDArray[np.uint64],
        batch_number: int,
    ) -> int:
        assert not isinstance(records, Tensor)
        return codec.encode(self._rows, slots, records, places, keys, batch_number)

    def decode(
        self, codec: RecordCodec, records: Records | Tensor, places: Indices, slots: Indices
    ) -> None:
        assert not isinstance(records, Tensor)
        codec.decode(records, places, self._rows, slots)

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        cache.initialize(layout, moves, absent, self._slots, self.width)

    def swap(
        self,
        layout: cache.CacheLayout,
        staging: cache.Staging,
        workspace: cache.StageWorkspace,
        codec: RecordCodec,
        home: Home,
        batch_number: int,
    ) -> tuple[int, int] | None:
        """Write back evicted rows and read the rows that replace them.

        Returns table and row of an evicted row that its codec cannot represent, or None.
        """
        return swap.swap(layout, staging, workspace, codec.layout, self._slots, home, batch_number)
