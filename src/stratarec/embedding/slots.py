"""The seam of level 0: slots of float32 rows that are trained in place.

Everything that reads or writes a trained row goes through `SlotMemory`. Caches, stores, saving and the module know slot
numbers, host rows (`FloatRows`) and records (bytes), never the arrays. For a table that lies whole in level 0 a slot is
a row; under a cache it is a place that rows come to and leave. `Level0` makes them, and is told the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels import cache, pooling, swap, update
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import fill_uniform
from stratarec.kernels.runtime.accelerator import CPU, HOST, Transfers
from stratarec.kernels.update import Gradients, Missed, RowUpdate, Scratchpad

Records = NDArray[np.uint8]
Home = tuple[Records, NDArray[np.uint8], NDArray[np.uint8]]
"""Records in addressable memory ``[R, record_bytes]``, the bits of rows that were written, of those that changed."""


@dataclass(frozen=True)
class StagedBatch:
    """A batch's lists, as a memory took them: its ids lie within their tables, and nobody changes them from now on."""

    layout: GroupLayout
    bags: BagBatch


class SlotMemory(Protocol):
    """S slots of width D with their optimizer state, in the memory of a device.

    Slots and places are ``[n]`` int64 of the host. Rows come and go as `FloatRows` and as records of the host; `empty`,
    and so what is pooled and gathered and the gradients of it, are tensors of the device. A step gives the bits that
    `CpuSlots` gives: sums of a row's gradients in ascending order of lookup position, noise from keys alone.

    Nobody but a memory knows when a step has run. `update` may return once it is queued, behind an event of its own;
    whatever else reads or writes slots waits for the last such event, or is queued behind it. Steps of all memories of
    a `Level0` run one after another, since they share what they work in; methods are called from two threads.
    """

    slots: int
    width: int
    addresses_host: bool
    """Whether `swap` reads and writes the records of a home where they lie; else they pass through buffers."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and state."""

    def like(self, slots: int) -> SlotMemory:
        """Zeroed slots of the same width and state on the same device."""

    # A batch

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBatch:
        """What the methods below need of a batch, made once: whatever they list or group for it goes here."""

    def empty(self, *shape: int) -> Tensor:
        """A float32 tensor into which rows are pooled or gathered."""

    def pool(self, staged: StagedBatch, out: Tensor) -> None:
        """Fill the group's columns of `out` ``[B, columns]``."""

    def gather(self, staged: StagedBatch, feature: int, out: Tensor) -> None:
        """Fill `out` ``[N, D]`` with the rows of a sequence feature."""

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate, missed: Missed | None) -> None:
        """One step of the row optimizer."""

    def square_norms(self, staged: StagedBatch, gradients: Gradients) -> NDArray[np.float64]:
        """Of the summed gradients of a batch's rows, ``[tables]``."""

    def apply_missed_steps(self, staged: StagedBatch, missed: Missed) -> None:
        """Let the rows of a batch take the steps that they missed."""

    def weight_gradient(self, staged: StagedBatch, pooled: Tensor, out: Tensor) -> None:
        """Add the gradients of per-sample weights to `out` ``[N]``."""

    # Rows

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        """Let the rows in the slots ``first:last`` take the steps that they missed."""

    def read(self, slots: Indices) -> FloatRows:
        """A host copy of some slots."""

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        """``slots[i]`` gets row ``places[i]`` of `rows`."""

    def copy_from(self, slots: Indices, source: SlotMemory, theirs: Indices) -> None:
        """``slots[i]`` gets what ``theirs[i]`` of `source`, a memory `like` this one, holds."""

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        """``weight`` ``[n, D]`` and named optimizer state of the slots ``first:last``, sharing their memory."""

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        """Initial weights of all rows of `table` in the slots ``first:last``, a function of `key` and the row."""

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        """Which of the slots ``first:last``, which hold the rows of `table` from `row` on, are not as `fill` left them.

        Counted from `first`; differences are those of bits.
        """

    def clear_state(self) -> None:
        """Make optimizer state and clocks of all slots those of rows that were never trained."""

    # Moves

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


class Level0:
    """Makes the slots of a collection, in the memory of one device.

    Parameters
    ----------
    device : torch.device
        Where rows are trained. The network may be elsewhere: `transfers` are between the two.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        if device.type not in MEMORIES:
            raise ConfigError(f"rows cannot be trained in the memory of {device}, expected {' or '.join(MEMORIES)}")
        self.device, self.scratch = device, Scratchpad()
        self.transfers: Transfers = HOST

    def slots(self, slots: int, width: int, optimizer: RowOptimizerConfig) -> SlotMemory:
        """Zeroed slots with the state that the optimizer has."""
        return MEMORIES[self.device.type](self, slots, width, optimizer)

    def empty(self, *shape: int) -> Tensor:
        """See `SlotMemory.empty`; tables of all widths fill one tensor."""
        return self.transfers.empty(*shape)


class CpuSlots(SlotMemory):
    """`SlotMemory` in DRAM: a step has run when `update` returns, so nothing waits.

    Parameters
    ----------
    level0 : Level0
        Whose it is.
    slots, width : int
        S and D.
    optimizer : RowOptimizerConfig
        Says which state there is and what it is called.
    """

    addresses_host = True

    def __init__(self, level0: Level0, slots: int, width: int, optimizer: RowOptimizerConfig) -> None:
        self._level0, self._optimizer = level0, optimizer
        self._rows = self._allocate(slots, width)
        self._slots = update.Slots(*self._rows.parts)
        self._workspace = update.UpdateWorkspace(level0.scratch)
        self.slots, self.width = slots, width

    def _allocate(self, slots: int, width: int) -> FloatRows:
        return FloatRows.allocate(slots, width, **self._optimizer.kept)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def like(self, slots: int) -> SlotMemory:
        return self._level0.slots(slots, self.width, self._optimizer)

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBatch:
        return StagedBatch(layout, bags)

    def empty(self, *shape: int) -> Tensor:
        return self._level0.empty(*shape)

    def pool(self, staged: StagedBatch, out: Tensor) -> None:
        _require_unchanged(pooling.pool(self._rows.weights, staged.layout, staged.bags, out))

    def gather(self, staged: StagedBatch, feature: int, out: Tensor) -> None:
        _require_unchanged(pooling.gather(self._rows.weights, staged.layout, staged.bags, feature, out))

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate, missed: Missed | None) -> None:
        update.update(self._slots, staged.layout, staged.bags, gradients, rule, self._workspace, missed)

    def square_norms(self, staged: StagedBatch, gradients: Gradients) -> NDArray[np.float64]:
        return update.square_norms(staged.layout, staged.bags, gradients, self._workspace)

    def apply_missed_steps(self, staged: StagedBatch, missed: Missed) -> None:
        update.apply_missed_steps(self._slots, staged.layout, staged.bags, missed, self._workspace)

    def weight_gradient(self, staged: StagedBatch, pooled: Tensor, out: Tensor) -> None:
        pooling.weight_gradient(self._rows.weights, staged.layout, staged.bags, pooled, out)

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        update.apply_missed_steps_to_range(self._slots, self.width, first, last, missed)

    def read(self, slots: Indices) -> FloatRows:
        found = self._allocate(len(slots), self.width)
        found.copy(np.arange(len(slots), dtype=np.int64), self._rows, slots)
        return found

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        self._rows.copy(slots, rows, places)

    def copy_from(self, slots: Indices, source: SlotMemory, theirs: Indices) -> None:
        assert isinstance(source, CpuSlots)
        self._rows.copy(slots, source._rows, theirs)

    def views(self, first: int, last: int) -> dict[str, Tensor]:
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
        part, bound = table.numbering, table.bound
        weights = self._rows.weights[first * self.width : last * self.width].reshape(-1, self.width)
        fill_uniform(weights, key=key, first_row=part.first, stride=part.stride, low=-bound, high=bound)

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
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
        for part in self._rows.parts[1:]:
            part[:] = 0

    def encode(
        self, codec: RecordCodec, slots: Indices, records: Records, places: Indices, keys: NDArray[np.uint64],
        write: int,
    ) -> int:  # fmt: skip
        return codec.encode(self._rows, slots, records, places, keys, write)

    def decode(self, codec: RecordCodec, records: Records, places: Indices, slots: Indices) -> None:
        codec.decode(records, places, self._rows, slots)

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        cache.initialize(layout, moves, absent, self._slots, self.width)

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        return swap.swap(layout, staging, workspace, codec.layout, self._slots, home, write)


def _require_unchanged(place: int) -> None:
    # Kernels read through no bad id, and say so, at no cost: ids were checked when they were prepared.
    if place >= 0:
        raise TrainingError(f"the batch's id number {place} was changed after the batch was prepared: leave ids alone")


MEMORIES: dict[str, Callable[[Level0, int, int, RowOptimizerConfig], SlotMemory]] = {"cpu": CpuSlots}
"""Kind of device -> its slots."""
