"""The interface of slots, the same for every device, and the parts that slots on a device share."""

from __future__ import annotations

from collections.abc import Sequence
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
from stratarec.kernels import cache
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import fill_uniform
from stratarec.kernels.runtime.accelerator import HOST, DeviceTransfers, Transfers, driver_of, transfers_of
from stratarec.kernels.update import Gradients, Missed, RowUpdate, Scratchpad

Records = NDArray[np.uint8]
Tensors = Sequence[Tensor | None]
"""Tensors of the host that a batch takes to the device."""


@dataclass(frozen=True)
class StagedBags:
    """Bags of one table group that a `SlotMemory` has staged: ids are valid and must not change."""

    layout: GroupLayout
    bags: BagBatch


class PackedBatch:
    """A batch whose staged parts can be looked up: `SlotMemory.pack` has sent them to the device of
    the slots.

    Parameters
    ----------
    staged : tuple of StagedBags
        Staged bags of each table group.
    """

    def __init__(self, staged: tuple[StagedBags, ...]) -> None:
        self.staged = staged

    def release(self) -> None:
        """Release the buffers of the batch. All operations that use them must be queued."""


class SlotMemory(Protocol):
    """S slots of width D with their optimizer state, in the memory of a device.

    Slots and places are ``[n]`` int64 arrays on the host. Rows are transferred as `FloatRows` and
    as records on the host. Pooled and gathered rows and their gradients are tensors on the device,
    allocated by `empty`. A step gives the same bits as `CpuSlots`, except where an implementation
    says otherwise: the gradients of a row are summed in ascending order of lookup position, and
    noise depends on keys only.

    Only the memory knows when a step has run. `update` may return as soon as the step is queued;
    every other method that reads or writes slots waits for the last queued step, or is queued after
    it. Moves (`encode`, `decode`, `initialize`) wait only for the batches that `Level0.order.after`
    names. Steps of all memories of a `Level0` run one after another, because they share a
    workspace. Methods are called from two threads.
    """

    slots: int
    width: int
    addresses_host: bool
    """Whether `CpuSlots.swap` can access a home's records in place. If false, records pass through
    staging buffers.
    """
    queued: bool
    """Whether `queue_update` can be called."""
    transfers: Transfers
    """Copies between the host and the memory's device. It also allocates host buffers that are fast
    to copy.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state."""

    def like(self, slots: int) -> SlotMemory:
        """Return `slots` zeroed slots of the same width and state on the same device."""

    # A batch

    def stage(self, layout: GroupLayout, bags: BagBatch) -> StagedBags:
        """Stage the bags of a table group. They can be looked up once they are packed.

        Parameters
        ----------
        layout : GroupLayout
            Features of the tables, and the slots of each table.
        bags : BagBatch
            Bags of these features, with slots in place of ids.
        """

    def pack(
        self, staged: Sequence[StagedBags], tensors: Tensors = (), stride: int | None = None
    ) -> PackedBatch:
        """Send a batch to the device, in one copy, and precompute index lists that `pool`, `gather`
        and `update` share.

        The copy is started and not waited for. The lists depend on ids only.

        Parameters
        ----------
        staged : sequence of StagedBags
            Results of `stage`, of any memories of the same `Level0`.
        tensors : sequence of Tensor or None
            Further tensors that the device needs of the batch.
        stride : int or None
            Number of columns of the pooled output, and so of its gradients; None if no update
            follows soon.
        """

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized float32 tensor for pooled or gathered rows."""

    def pool(self, staged: StagedBags, out: Tensor) -> None:
        """Pool the rows of batch `staged` into the group's columns of `out` ``[B, columns]``."""

    def gather(self, staged: StagedBags, feature: int) -> Tensor:
        """Return the rows ``[N, D]`` of a sequence feature; queued memories add rows of zeros
        (`sequence_room`).

        `feature` is the index of the feature in the layout.
        """

    def update(
        self, staged: StagedBags, gradients: Gradients, rule: RowUpdate, missed: Missed | None
    ) -> None:
        """Apply one step of the row optimizer to the rows of a batch.

        Parameters
        ----------
        staged : StagedBags
            Result of `stage`, which was packed.
        gradients : Gradients
            Gradients of the outputs of `pool` and `gather`.
        rule : RowUpdate
            Parameters of this step.
        missed : Missed or None
            Steps that rows may have missed; None if a step changes only the rows of its batch.
        """

    def queue_update(
        self,
        staged: StagedBags,
        gradients: Gradients,
        numbers: Tensor,
        constants: tuple[float, ...],
        ok: Tensor,
    ) -> None:
        """Queue one step of the row optimizer.

        Parameters
        ----------
        staged, gradients
            As for `update`.
        numbers : Tensor
            First result of `Engine.row_numbers`, as float32 on the device.
        constants : tuple of float
            Second result of `Engine.row_numbers`.
        ok : Tensor
            ``[1]`` int32 on the device. If it is 0, the step changes nothing.
        """

    def square_norms(self, staged: StagedBags, gradients: Gradients) -> NDArray[np.float64]:
        """Return, for each table, the sum of squares of its gradients, after the gradients of each
        row are summed.

        `staged` and `gradients` are those of `update`.
        """

    def apply_missed_steps(self, staged: StagedBags, missed: Missed) -> None:
        """Apply the steps that the rows of the batch `staged` missed."""

    def weight_gradient(self, staged: StagedBags, pooled: Tensor, out: Tensor) -> None:
        """Add the gradients of per-sample weights to `out` ``[N]``; `pooled` is the gradient of the
        pooled output.
        """

    # Rows

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        """Apply the steps that the rows in slots ``first:last`` missed."""

    def read(self, slots: Indices) -> FloatRows:
        """Return a host copy of `slots`."""

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        """Overwrite ``slots[i]`` with row ``places[i]`` of `rows`."""

    def copy_from(self, slots: Indices, source: SlotMemory, source_slots: Indices) -> None:
        """Overwrite ``slots[i]`` with ``source_slots[i]`` of `source`, which has the same width and
        optimizer state.
        """

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        """Return views of slots ``first:last``: ``weight`` ``[n, D]``, optimizer state by name."""

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        """Write initial weights of all rows of `table` to slots ``first:last``: a function of `key`
        and the row.
        """

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        """Return the slots among ``first:last`` whose bits differ from what `fill` wrote, counted
        from `first`.

        The slots contain the rows of `table` from `row` on.
        """

    def clear_state(self) -> None:
        """Set optimizer state and clocks of all slots to 0, as of rows that were never trained."""

    # Moves

    def encode(
        self,
        codec: RecordCodec,
        slots: Indices,
        records: Records | Tensor,
        places: Indices,
        keys: NDArray[np.uint64],
        batch_number: int,
    ) -> int:
        """Encode slots into records; see `RecordCodec.encode`. A tensor of records is in the memory
        of the slots.
        """

    def decode(
        self, codec: RecordCodec, records: Records | Tensor, places: Indices, slots: Indices
    ) -> None:
        """Decode records into slots; see `RecordCodec.decode`. A tensor of records is in the memory
        of the slots.
        """

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        """Write initial values to the slots of `moves` where `absent` is true: these rows have no
        record at home.
        """


class SlotDevice:
    """The device on which rows are trained, with the buffers, copies and orders that all slots on
    it share.

    Parameters
    ----------
    device : torch.device
        If it is a GPU, the network must be on the same GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = Scratchpad()
        self._transfers = transfers_of(device)
        # Not shared with the network: a wait for the network's copies would also wait for copies of
        # rows.
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
                f"the network is on {transfers.device}, but its rows are trained on {self.device}: move it "
                f"to {self.device}"
            )
        self._transfers = transfers

    @property
    def on_device(self) -> bool:
        """Whether rows are in the memory of a device such as a GPU."""
        return self.device.type != "cpu"

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor like `SlotMemory.empty`. It belongs to no group: tables of all widths
        fill one tensor.
        """
        return torch.empty(shape, device=self.device) if self.on_device else self.transfers.empty(*shape)

    def to_network(self, rows: Tensor) -> Tensor:
        """Return looked-up rows on the network's device."""
        return rows if self.on_device else self.transfers.up(rows)

    def from_network(self, gradient: Tensor) -> Tensor:
        """Return a gradient on the rows' device, valid once ``transfers.wait`` has returned."""
        return gradient.detach() if self.on_device else self.transfers.down(gradient)


def named_views(
    optimizer: RowOptimizerConfig, parts: tuple[Tensor, ...], width: int, first: int, last: int
) -> dict[str, Tensor]:
    """Return the result of `SlotMemory.views`, given flat weights, row state, full state and clocks
    as `parts`.
    """
    weights, row_state, full_state, clock = parts
    names = optimizer.full_state
    views = {"weight": weights.view(-1, width)[first:last]}
    if optimizer.row_state:
        views[optimizer.row_state] = row_state[first:last]
    if names:
        # Within a slot, the states of all weights are contiguous, one state after the other, as in
        # records.
        views.update(zip(names, full_state.view(-1, len(names), width)[first:last].unbind(1), strict=True))
    if optimizer.clocked:
        views["clock"] = clock[first:last]
    return views


def differing_rows(rows: list[NDArray[Any]], key: int, table: EmbeddingBagConfig, row: int) -> Indices:
    """Return the positions in `rows` that differ from the initial values of `table`, whose row
    `row` is the first.

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
    """Raise a `TrainingError` if a kernel read an invalid id at `place` (-1: none did)."""
    # Ids were checked when the batch was staged. Kernels skip an invalid id and report it at no
    # cost.
    if place >= 0:
        raise TrainingError(
            f"the batch's id number {place} was changed after the batch was staged: leave ids alone"
        )
