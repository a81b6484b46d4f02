"""Level 0: slots of float32 rows that are trained in place, behind one interface for every device.

All code that reads or writes trained rows goes through `SlotMemory`. Caches, stores, checkpoints and the `nn.Module`
use slot numbers, host rows (`FloatRows`) and records (bytes), never the arrays. For a table that is completely in level
0 a slot is a row; under a cache, rows are fetched into a slot and evicted from it. `Level0` allocates slots on a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.rings import DeviceOrder, Ring, StepOrder
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels import cache, pooling, swap, update
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import fill_uniform
from stratarec.kernels.runtime.accelerator import (
    CPU,
    HOST,
    DeviceTransfers,
    Transfers,
    driver_of,
    require_triton,
    transfers_of,
)
from stratarec.kernels.update import Gradients, Missed, RowUpdate, Scratchpad

Records = NDArray[np.uint8]
Home = tuple[Records, NDArray[np.uint8], NDArray[np.uint8]]
"""Records in addressable memory ``[R, record_bytes]``, a bitmap of written rows, and a bitmap of changed rows."""


@dataclass(frozen=True)
class StagedBatch:
    """A batch that a `SlotMemory` has staged: its ids are valid and must not change any more."""

    layout: GroupLayout
    bags: BagBatch

    def release(self) -> None:
        """Release what was allocated for the batch: all work with it is queued."""


class SlotMemory(Protocol):
    """S slots of width D with their optimizer state, in the memory of a device.

    Slots and places are ``[n]`` int64 arrays on the host. Rows are transferred as `FloatRows` and as records on the
    host. Pooled and gathered rows and their gradients are tensors on the device, allocated by `empty`. A step gives the
    same bits as `CpuSlots`, except where an implementation says otherwise: the gradients of a row are summed in
    ascending order of lookup position, and noise depends on keys only.

    Only the memory knows when a step has run. `update` may return as soon as the step is queued; every other method
    that reads or writes slots waits for the last queued step, or is queued after it. Moves (`encode`, `decode`,
    `initialize`) wait only for the batches that `Level0.order.after` names. Steps of all memories of a `Level0` run one
    after another, because they share a workspace. Methods are called from two threads.
    """

    slots: int
    width: int
    addresses_host: bool
    """Whether `swap` can access the home's records in place. If false, records are copied through staging buffers."""
    queued: bool
    """Whether `queue_update` can be called."""
    transfers: Transfers
    """Copies between the host and the memory's device. It also allocates host buffers that are fast to copy."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state."""

    def like(self, slots: int) -> SlotMemory:
        """Return zeroed slots of the same width and state on the same device."""

    # A batch

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBatch:
        """Precompute the index lists of a batch that `pool`, `gather` and `update` share."""

    def list_rows(self, staged: StagedBatch, stride: int) -> None:
        """Prepare the update of a batch's rows, while earlier batches train. It depends on ids only.

        `stride` is the number of columns of the pooled output, and so of its gradients.
        """

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized float32 tensor for pooled or gathered rows."""

    def pool(self, staged: StagedBatch, out: Tensor) -> None:
        """Pool the rows of a batch into the group's columns of `out` ``[B, columns]``."""

    def gather(self, staged: StagedBatch, feature: int) -> Tensor:
        """Return the rows ``[N, D]`` of a sequence feature; queued memories add rows of zeros (`sequence_room`)."""

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate, missed: Missed | None) -> None:
        """Apply one step of the row optimizer."""

    def queue_update(
        self, staged: StagedBatch, gradients: Gradients, numbers: Tensor, constants: tuple[float, ...], ok: Tensor
    ) -> None:
        """Queue one step of the row optimizer; see `Engine.queue_updates`."""

    def square_norms(self, staged: StagedBatch, gradients: Gradients) -> NDArray[np.float64]:
        """Return, for each table, the sum of squares of its gradients, after the gradients of each row are summed."""

    def apply_missed_steps(self, staged: StagedBatch, missed: Missed) -> None:
        """Apply the steps that the rows of a batch missed."""

    def weight_gradient(self, staged: StagedBatch, pooled: Tensor, out: Tensor) -> None:
        """Add the gradients of per-sample weights to `out` ``[N]``."""

    # Rows

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        """Apply the steps that the rows in slots ``first:last`` missed."""

    def read(self, slots: Indices) -> FloatRows:
        """Return a host copy of `slots`."""

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        """Overwrite ``slots[i]`` with row ``places[i]`` of `rows`."""

    def copy_from(self, slots: Indices, source: SlotMemory, source_slots: Indices) -> None:
        """Overwrite ``slots[i]`` with ``source_slots[i]`` of `source`, which has the same width and optimizer state."""

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        """Return ``weight`` ``[n, D]`` and named optimizer state of slots ``first:last``, sharing their memory."""

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        """Write initial weights of all rows of `table` to slots ``first:last``: a function of `key` and the row."""

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        """Return the slots among ``first:last`` whose bits differ from what `fill` wrote, counted from `first`.

        The slots contain the rows of `table` from `row` on.
        """

    def clear_state(self) -> None:
        """Set optimizer state and clocks of all slots to 0, the values of rows that were never trained."""

    # Moves

    def encode(
        self, codec: RecordCodec, slots: Indices, records: Records | Tensor, places: Indices,
        keys: NDArray[np.uint64], write: int,
    ) -> int:  # fmt: skip
        """Encode slots into records; see `RecordCodec.encode`. A tensor of records is in the memory of the slots."""

    def decode(self, codec: RecordCodec, records: Records | Tensor, places: Indices, slots: Indices) -> None:
        """Decode records into slots; see `RecordCodec.decode`. A tensor of records is in the memory of the slots."""

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        """Write initial values to the slots of `moves` where `absent` is true: these rows have no record at home."""

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        """Write back evicted rows and read the rows that replace them.

        Returns table and row of an evicted row that its codec cannot represent, or None.
        """


class Level0:
    """Allocates the slots of a collection in the memory of one device.

    Parameters
    ----------
    device : torch.device
        Device on which rows are trained. If it is a GPU, the network must be on the same GPU.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        if device.type not in MEMORIES:
            raise ConfigError(f"rows cannot be trained in the memory of {device}, expected {' or '.join(MEMORIES)}")
        self.device, self.scratch = device, Scratchpad()
        self._transfers = transfers_of(device)
        # Not shared with the network: a wait for the network's copies would also wait for copies of rows.
        self.copies = DeviceTransfers(driver_of(device)) if self.on_device else HOST
        """Copies of records and rare lists between the host and the device of the rows."""
        self.order = DeviceOrder(driver_of(device)) if self.on_device else StepOrder()
        """Order of steps and moves."""
        self.ring = Ring(driver_of(device), self.order.streams)
        """Buffers of batches on the device."""

    @property
    def transfers(self) -> Transfers:
        """Copies of tensors between the host and the network's device."""
        return self._transfers

    @transfers.setter
    def transfers(self, transfers: Transfers) -> None:
        if self.on_device and transfers.device != self.device:
            raise ConfigError(
                f"the network is on {transfers.device}, but its rows are trained on {self.device}: move it to "
                f"{self.device}"
            )
        self._transfers = transfers

    @property
    def on_device(self) -> bool:
        """Whether rows are in the memory of a device such as a GPU."""
        return self.device.type != "cpu"

    def slots(self, slots: int, width: int, optimizer: RowOptimizerConfig) -> SlotMemory:
        """Return zeroed slots with the state of `optimizer`."""
        return MEMORIES[self.device.type](self, slots, width, optimizer)

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor like `SlotMemory.empty`. It belongs to no group: tables of all widths fill one tensor."""
        return torch.empty(shape, device=self.device) if self.on_device else self.transfers.empty(*shape)

    def to_network(self, rows: Tensor) -> Tensor:
        """Return looked-up rows on the network's device."""
        return rows if self.on_device else self.transfers.up(rows)

    def from_network(self, gradient: Tensor) -> Tensor:
        """Return a gradient on the device of the rows, valid once ``transfers.wait`` has returned."""
        return gradient.detach() if self.on_device else self.transfers.down(gradient)


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

    def __init__(self, level0: Level0, slots: int, width: int, optimizer: RowOptimizerConfig) -> None:
        self._level0, self._optimizer = level0, optimizer
        self._rows = self._allocate(slots, width)
        self._slots = update.Slots(*self._rows.parts)
        self._workspace = update.UpdateWorkspace(level0.scratch)
        self.slots, self.width = slots, width

    def _allocate(self, slots: int, width: int) -> FloatRows:
        return FloatRows.allocate(slots, width, **self._optimizer.state_shape)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def like(self, slots: int) -> SlotMemory:
        return self._level0.slots(slots, self.width, self._optimizer)

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBatch:
        return StagedBatch(layout, bags)

    def list_rows(self, staged: StagedBatch, stride: int) -> None:
        """Do nothing: `update` groups the lookups."""

    def empty(self, *shape: int) -> Tensor:
        return self._level0.empty(*shape)

    def pool(self, staged: StagedBatch, out: Tensor) -> None:
        require_unchanged(pooling.pool(self._rows.weights, staged.layout, staged.bags, out))

    def gather(self, staged: StagedBatch, feature: int) -> Tensor:
        first, last = staged.bags.span(feature)
        # Not zeroed: every row is written.
        out = self.empty(last - first, self.width)
        require_unchanged(pooling.gather(self._rows.weights, staged.layout, staged.bags, feature, out))
        return out

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate, missed: Missed | None) -> None:
        update.update(self._slots, staged.layout, staged.bags, gradients, rule, self._workspace, missed)

    def queue_update(
        self, staged: StagedBatch, gradients: Gradients, numbers: Tensor, constants: tuple[float, ...], ok: Tensor
    ) -> None:
        raise AssertionError("the host runs steps at once: `queued` is false")

    def square_norms(self, staged: StagedBatch, gradients: Gradients) -> NDArray[np.float64]:
        return update.square_norms(staged.layout, staged.bags, gradients, self._workspace)

    def apply_missed_steps(self, staged: StagedBatch, missed: Missed) -> None:
        update.apply_missed_steps(self._slots, staged.layout, staged.bags, missed, self._workspace)

    def weight_gradient(self, staged: StagedBatch, pooled: Tensor, out: Tensor) -> None:
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
        return named_views(self._optimizer, tuple(map(torch.from_numpy, self._rows.parts)), self.width, first, last)

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
        self, codec: RecordCodec, slots: Indices, records: Records | Tensor, places: Indices,
        keys: NDArray[np.uint64], write: int,
    ) -> int:  # fmt: skip
        assert not isinstance(records, Tensor)
        return codec.encode(self._rows, slots, records, places, keys, write)

    def decode(self, codec: RecordCodec, records: Records | Tensor, places: Indices, slots: Indices) -> None:
        assert not isinstance(records, Tensor)
        codec.decode(records, places, self._rows, slots)

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        cache.initialize(layout, moves, absent, self._slots, self.width)

    def swap(
        self, layout: cache.CacheLayout, staging: cache.Staging, workspace: cache.StageWorkspace, codec: RecordCodec,
        home: Home, write: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        return swap.swap(layout, staging, workspace, codec.layout, self._slots, home, write)


def named_views(
    optimizer: RowOptimizerConfig, parts: tuple[Tensor, ...], width: int, first: int, last: int
) -> dict[str, Tensor]:
    """Return the result of `SlotMemory.views`, given flat weights, row state, full state and clocks as `parts`."""
    weights, row_state, full_state, clock = parts
    names = optimizer.full_state
    views = {"weight": weights.view(-1, width)[first:last]}
    if optimizer.row_state:
        views[optimizer.row_state] = row_state[first:last]
    if names:
        # Within a slot, the states of all weights are contiguous, one state after the other, as in records.
        views.update(zip(names, full_state.view(-1, len(names), width)[first:last].unbind(1), strict=True))
    if optimizer.clocked:
        views["clock"] = clock[first:last]
    return views


def differing_rows(rows: list[NDArray[Any]], key: int, table: EmbeddingBagConfig, row: int) -> Indices:
    """Return the positions in `rows` that differ from the initial values of `table`, whose row `row` is the first.

    Parameters
    ----------
    rows : list of ndarray
        Weights ``[n, D]``, then the parts of the optimizer state, ``[n, k]``.
    """
    part, bound = table.numbering, table.bound
    initial = np.empty(rows[0].shape, dtype=np.float32)
    first_row = part.first + row * part.stride
    fill_uniform(initial, key=key, first_row=first_row, stride=part.stride, low=-bound, high=bound)
    differs = (rows[0].view(np.int32) != initial.view(np.int32)).any(axis=1)
    for state in rows[1:]:
        differs |= state.view(np.int32).any(axis=1)
    return np.flatnonzero(differs)


def require_unchanged(place: int) -> None:
    """Raise a `TrainingError` if a kernel read an invalid id at `place`, which is -1 if there was none."""
    # Ids were checked when the batch was prepared. Kernels skip an invalid id and report it at no cost.
    if place >= 0:
        raise TrainingError(f"the batch's id number {place} was changed after the batch was prepared: leave ids alone")


def _device_slots(level0: Level0, slots: int, width: int, optimizer: RowOptimizerConfig) -> SlotMemory:
    require_triton(level0.device)
    # Imported late: Triton is an optional dependency.
    from stratarec.embedding.device_slots import DeviceSlots

    return DeviceSlots(level0, slots, width, optimizer)


MEMORIES: dict[str, Callable[[Level0, int, int, RowOptimizerConfig], SlotMemory]] = {
    "cpu": CpuSlots,
    "cuda": _device_slots,
}
"""Device type -> constructor of its slots."""
