"""Slots in the memory of a GPU: Triton kernels for frequent operations, torch for others.

Steps run on the stream on which the training thread computes, moves of rows on a stream of their
own (`rings`), and copies on further streams. So a thread can queue work without waiting until the
current step has ended. The host waits for the device only if it needs a result: in `encode`,
`square_norms`, `weight_gradient` and for copies of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.packed_batch import BatchBuffer, DeviceBatch, FeatureLists, launch
from stratarec.embedding.slots.memory import (
    PackedBatch,
    Records,
    SlotDevice,
    SlotMemory,
    StagedBags,
    Tensors,
    differing_rows,
    named_views,
)
from stratarec.errors import ConfigError
from stratarec.kernels import cache
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.codec import gpu as codecs
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.optimizers import ROW_OPTIMIZERS
from stratarec.kernels.pooling import gpu as pooling
from stratarec.kernels.random import RowNoise
from stratarec.kernels.random import gpu as random
from stratarec.kernels.random.reference import mix
from stratarec.kernels.simd.vector import LANES
from stratarec.kernels.update import Gradients, Missed, RowUpdate, gpu, row_numbers, rules

# _UNROLLED: lookups that a program reads at once. _SUMMED: lookups of a long segment whose
# gradients are read at once.
_UNROLLED, _SUMMED = 4, 16
_FILLED = 1 << 22
_MASK = (1 << 64) - 1


class Tile(NamedTuple):
    """Rows per Triton program, columns (the width, rounded up to a power of two), and warps."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, width: int, floats: int, rows: int, warps: int) -> Tile:
        """Return a tile of about `floats` floats, and of `rows` rows if they fit 1,024 floats."""
        columns = 1 << (width - 1).bit_length()
        return cls(max(floats // columns, min(rows, 1024 // columns), 1), columns, warps)

    def launch(self, kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
        """Run a Triton kernel on `count` rows, in as many programs of this tile as they need.

        `arguments` and `constants` are the kernel's, except for the tile's ``K``, ``DP`` and warps.
        """
        sizes = {"K": self.rows, "DP": self.columns, "num_warps": self.warps}
        launch(kernel, -(-count // self.rows), *arguments, **sizes, **constants)


def _longest_segment(lookups: int) -> int:
    """Return the longest segment of lookups of one row whose gradients one program adds, in the
    CPU's order.

    The longest segment of a batch determines the time of the last program: on an H200, 64 instead
    of 256 took an update of 106,496 lookups of a power law from 0.083 to 0.050 ms. With millions of
    lookups, more blocks of long segments cost more than that: 8.5 million lookups took 1.37 instead
    of 1.19 ms.
    """
    return 64 if lookups < 1 << 22 else 256


class DeviceSlots(SlotMemory):
    """`SlotMemory` in the memory of a GPU, with the parameters of `CpuSlots`.

    Results have the same bits as with `CpuSlots`, with two exceptions. Gradients of rows that a
    batch looks up more than 64 times (256 times in batches of 4 million lookups) are summed in
    another order. Sums of squares may differ for rows that are wider than 256.
    """

    addresses_host, queued = False, True

    def __init__(self, level0: SlotDevice, slots: int, width: int, optimizer: RowOptimizerConfig) -> None:
        if slots >= 1 << 31:
            raise ConfigError(
                f"tables of width {width} have {slots:,} slots, expected fewer than 2^31 on a GPU"
            )
        self._level0 = level0
        self._optimizer = optimizer
        self.slots = slots
        self.width = width
        self._device = level0.device
        self.transfers = level0.copies
        self._kept = optimizer.state_shape
        sizes = {
            "weights": slots * width,
            "row_state": slots * self._kept["row_state"],
            "full_state": slots * width * self._kept["full_state"],
            "clock": slots * self._kept["clock"],
        }
        try:
            with level0.order.rarely():
                self._parts = tuple(
                    torch.zeros(
                        size, dtype=torch.int32 if name == "clock" else torch.float32, device=self._device
                    )
                    for name, size in sizes.items()
                )
        except torch.OutOfMemoryError as error:
            raise self._too_large(4 * sum(sizes.values())) from error
        if ROW_OPTIMIZERS[optimizer.kind].update is not None:
            raise ConfigError(
                f"train.embedding.kind is {optimizer.kind}, which does not run on a GPU: set memory.hbm to "
                "0, or another optimizer"
            )
        self._order = level0.order
        self._kind = rules.KINDS[optimizer.kind]
        # Argument `ok` of kernels for steps that are applied unconditionally.
        self._always = torch.ones(1, dtype=torch.int32, device=self._device)
        self._lanes = math.gcd(width, LANES) if width < LANES else LANES
        # Tiles that were fastest on an H200 for 64 and 128 columns.
        self._pool_tile = Tile.of(width, 256, 4, 1)
        self._tile = Tile.of(width, 512, 8, 4)
        self._features: tuple[GroupLayout | None, FeatureLists | None] = None, None
        self._paces: tuple[NDArray[np.float32], int, Tensor] | None = None

    def _too_large(self, size: int) -> ConfigError:
        return ConfigError(
            f"{self._device} has too little free memory for {self.slots:,} slots of {self.width} floats "
            f"and their optimizer state, {size / 2**30:.1f} GiB: keep fewer rows there"
        )

    def _up(self, array: NDArray[Any]) -> Tensor:
        return self.transfers.up(torch.from_numpy(np.require(array, requirements=["C", "W"])))

    def _down(self, tensor: Tensor) -> NDArray[Any]:
        host = self.transfers.down(tensor)
        self.transfers.wait()
        array: NDArray[Any] = host.numpy()
        return array

    @property
    def _rows(self) -> list[tuple[int, Tensor]]:
        return [
            (place, part.view(self.slots, -1)) for place, part in enumerate(self._parts) if part.numel()
        ]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def like(self, slots: int) -> SlotMemory:
        return type(self)(self._level0, slots, self.width, self._optimizer)

    # A batch

    def stage(self, layout: GroupLayout, bags: BagBatch) -> DeviceBatch:
        staged_layout, features = self._features
        if staged_layout is not layout or features is None:
            # Moves read the lists too.
            with self._order.rarely():
                features = FeatureLists.of(layout, self.transfers)
            self._features = layout, features
        return DeviceBatch.of(layout, bags, features)

    def pack(
        self, staged: Sequence[StagedBags], tensors: Tensors = (), stride: int | None = None
    ) -> PackedBatch:
        buffer = BatchBuffer.pack(self._level0.ring, staged, tensors)
        if stride is not None:
            with self._order.moving():
                for batch in buffer.staged:
                    assert isinstance(batch, DeviceBatch)
                    batch.list_rows(stride)
        return buffer

    def empty(self, *shape: int) -> Tensor:
        return self._level0.empty(*shape)

    def pool(self, staged: StagedBags, out: Tensor) -> None:
        assert isinstance(staged, DeviceBatch)
        staged.lists.arrive()
        lists, features, batch = staged.lists, staged.features, staged.bags.batch
        if features.pooled * batch:
            self._pool_tile.launch(
                pooling.pool,
                features.pooled * batch,
                self._parts[0],
                lists.rows,
                lists.offsets,
                lists.share,
                features.column,
                features.mean,
                out,
                features.pooled * batch,
                batch,
                out.stride(0),
                D=self.width,
                U=_UNROLLED,
                SINGLE=lists.offsets is None,
                BY=math.gcd(features.multiple, out.stride(0)),
            )

    def gather(self, staged: StagedBags, feature: int) -> Tensor:
        assert isinstance(staged, DeviceBatch)
        staged.lists.arrive()
        place = int(np.flatnonzero(staged.features.order == feature)[0])
        rows = staged.lists.rows[staged.begin[place] : staged.begin[place + 1]]
        # The room behind the lookups gets zeros, whatever the last slot contains.
        gathered = self._parts[0].view(-1, self.width).index_select(0, rows.clamp(max=self.slots - 1))
        return gathered.masked_fill_((rows >= self.slots).unsqueeze(1), 0.0)

    def update(
        self, staged: StagedBags, gradients: Gradients, rule: RowUpdate, missed: Missed | None
    ) -> None:
        if missed is not None:
            self.apply_missed_steps(staged, missed)
        numbers, constants = row_numbers(rule)
        self.queue_update(
            staged, gradients, self.transfers.up(torch.tensor(numbers)), constants, self._always
        )

    def queue_update(
        self,
        staged: StagedBags,
        gradients: Gradients,
        numbers: Tensor,
        constants: tuple[float, ...],
        ok: Tensor,
        squares: Tensor | None = None,
    ) -> None:
        assert isinstance(staged, DeviceBatch)
        lists, room, pooled = staged.lists, staged.lists.form.lookups, gradients.pooled
        staged.list_rows(pooled.shape[1])
        # Gradients of exactly the lookups get the room that is behind them in the lists.
        rooms = zip(gradients.rows, staged.lists.form.sequences, strict=True)
        parts_of = [torch.nn.functional.pad(part, (0, 0, 0, room - len(part))) for part, room in rooms]
        sequences = torch.cat(parts_of).view(-1) if parts_of else None
        multiple = math.gcd(staged.features.multiple, pooled.shape[1])
        longest = _longest_segment(room)
        blocks = -(-room // longest)
        parts = torch.empty(2 * blocks * self.width, device=self._device)
        if room > longest:
            launch(
                gpu.sum_parts,
                blocks,
                lists.number,
                lists.first,
                lists.at,
                lists.scale,
                pooled,
                sequences,
                parts,
                lists.sizes,
                D=self.width,
                DP=self._tile.columns,
                K=_SUMMED,
                L=longest,
                BY=multiple,
            )
        self._tile.launch(
            gpu.update,
            room,
            self._parts,
            lists.order,
            lists.first,
            lists.segments,
            lists.segment_row,
            lists.segment_at,
            lists.segment_scale,
            lists.at,
            lists.scale,
            pooled,
            sequences,
            parts,
            blocks,
            numbers,
            constants,
            ok,
            squares,
            D=self.width,
            U=_UNROLLED,
            L=longest,
            LANES=self._lanes,
            KIND=self._kind,
            CLOCKED=bool(self._kept["clock"]),
            BY=multiple,
        )

    def square_norms(self, staged: StagedBags, gradients: Gradients) -> NDArray[np.float64]:
        assert isinstance(staged, DeviceBatch)
        layout, begin = staged.layout, staged.begin
        squares = torch.zeros(staged.lists.form.lookups, device=self._device)
        numbers, constants = row_numbers(self._optimizer.rule(0))
        self.queue_update(
            staged, gradients, self.transfers.up(torch.tensor(numbers)), constants, self._always, squares
        )
        sums_of_rows = self._down(squares).astype(np.float64)
        place_of = np.argsort(staged.features.order)
        sums = np.zeros(len(layout.table_start) - 1)
        for table in range(len(sums)):
            features = layout.table_features[layout.table_start[table] : layout.table_start[table + 1]]
            parts = [sums_of_rows[begin[place] : begin[place + 1]] for place in np.sort(place_of[features])]
            # Added one after another, as on the CPU; `sum` would add pairs.
            sums[table] = np.cumsum(np.concatenate([[0.0], *parts]))[-1]
        return sums

    def apply_missed_steps(self, staged: StagedBags, missed: Missed) -> None:
        assert isinstance(staged, DeviceBatch)
        # Gradients do not matter here, so neither does their stride.
        staged.list_rows(max(staged.lists.listed_for, 0))
        self._apply_missed_steps(staged.lists.segment_row, staged.lists.segments, missed)

    def apply_missed_steps_to_range(self, first: int, last: int, missed: Missed) -> None:
        if last > first:
            with self._order.rarely():
                rows = torch.arange(first, last, dtype=torch.int32, device=self._device)
                count = torch.full((1,), last - first, dtype=torch.int32, device=self._device)
                self._apply_missed_steps(rows, count, missed)

    def _apply_missed_steps(self, rows: Tensor, count: Tensor, missed: Missed) -> None:
        if missed.steps:
            self._tile.launch(
                gpu.apply_missed_steps,
                len(rows),
                self._parts,
                rows,
                count,
                missed.steps,
                self._step_numbers(missed),
                row_numbers(missed.rule)[1],
                D=self.width,
                LANES=self._lanes,
                KIND=self._kind,
            )

    def _step_numbers(self, missed: Missed) -> Tensor:
        """Return the numbers of all steps on the device; only those of new steps are copied."""
        source, copied_steps, numbers = self._paces or (missed.numbers[:0], 0, torch.empty(0))
        if source is not missed.numbers:
            copied_steps, numbers = 0, torch.empty(missed.numbers.shape, device=self._device)
        if copied_steps < missed.steps:
            numbers[copied_steps : missed.steps] = self._up(missed.numbers[copied_steps : missed.steps])
        self._paces = missed.numbers, max(copied_steps, missed.steps), numbers
        return numbers

    def weight_gradient(self, staged: StagedBags, pooled: Tensor, out: Tensor) -> None:
        assert isinstance(staged, DeviceBatch)
        features, count = staged.features, staged.pooled_lookups
        if not count:
            return
        gradient = torch.empty(count, device=self._device)
        lists = staged.lists
        staged.list_rows(pooled.shape[1])
        self._tile.launch(
            pooling.weight_gradient,
            count,
            self._parts[0],
            lists.rows,
            lists.bag_of,
            lists.offsets,
            features.column,
            features.mean,
            pooled,
            gradient,
            count,
            staged.bags.batch,
            pooled.shape[1],
            D=self.width,
            LANES=self._lanes,
        )
        host, array = self._down(gradient), out.numpy()
        for place, feature in enumerate(features.order[: features.pooled].tolist()):
            first, last = staged.bags.span(feature)
            array[first:last] += host[staged.begin[place] : staged.begin[place + 1]]

    # Rows

    def read(self, slots: Indices) -> FloatRows:
        rows = FloatRows.allocate(len(slots), self.width, **self._kept)
        with self._order.rarely():
            places = self._up(slots)
            for part, mine in self._rows if len(slots) else ():
                rows.parts[part].reshape(len(slots), -1)[:] = mine[places].cpu().numpy()
        return rows

    def write(self, slots: Indices, rows: FloatRows, places: Indices) -> None:
        with self._order.rarely():
            for part, mine in self._rows if len(slots) else ():
                mine[self._up(slots)] = self._up(rows.parts[part].reshape(rows.slots, -1)[places])

    def copy_from(self, slots: Indices, source: SlotMemory, source_slots: Indices) -> None:
        assert isinstance(source, DeviceSlots)
        with self._order.rarely():
            for part, mine in self._rows if len(slots) else ():
                mine[self._up(slots)] = source._parts[part].view(source.slots, -1)[self._up(source_slots)]

    def views(self, first: int, last: int) -> dict[str, Tensor]:
        self._order.join()
        return named_views(self._optimizer, self._parts, self.width, first, last)

    def fill(self, first: int, last: int, key: int, table: EmbeddingBagConfig) -> None:
        part = table.numbering
        noise = RowNoise.of([key], [part.first], [part.stride])
        for begin in range(first, last, _FILLED):
            slots = np.arange(begin, min(begin + _FILLED, last))
            keys = cache.cpu.row_keys(noise, np.zeros(len(slots), np.int32), slots - first)
            try:
                self._initialize(slots, keys, np.full(len(slots), table.bound, np.float32))
            except torch.OutOfMemoryError as error:
                raise self._too_large(self.nbytes) from error

    def trained(self, first: int, last: int, key: int, table: EmbeddingBagConfig, row: int) -> Indices:
        self._order.join()
        rows = [part[first:last].cpu().numpy() for _, part in self._rows]
        return differing_rows(rows, key, table, row)

    def clear_state(self) -> None:
        with self._order.rarely():
            for part in self._parts[1:]:
                part.zero_()

    # Moves

    def _form(self, codec: RecordCodec, stride: int) -> dict[str, Any]:
        layout = codec.layout
        return {
            "D": self.width,
            "KIND": list(KINDS).index(layout.kind.name),
            "WIDE": layout.wide_parameters,
            "STATE": 0 if layout.wide_state else 2,
            "ROW_STATE": bool(layout.row_state),
            "FULL": layout.full_state,
            "CLOCKED": bool(layout.clock),
            "PARAMETERS_AT": layout.parameters_at,
            "ROW_STATE_AT": layout.row_state_at,
            "FULL_STATE_AT": layout.full_state_at,
            "CLOCK_AT": layout.clock_at,
            "BYTES": stride,
        }

    def encode(
        self,
        codec: RecordCodec,
        slots: Indices,
        records: Records | Tensor,
        places: Indices,
        keys: NDArray[np.uint64],
        batch_number: int,
    ) -> int:
        count = len(slots)
        if not count:
            return -1
        with self._order.moving():
            target, record_of = records, None
            if isinstance(target, np.ndarray):
                target = torch.empty((count, codec.record_bytes), dtype=torch.uint8, device=self._device)
            else:
                record_of = self._up(places)
            fits = torch.empty(count, dtype=torch.uint8, device=self._device)
            key_of_batch = np.uint64(mix((batch_number * 0x9E3779B97F4A7C15 + 1) & _MASK))
            lists = self._up(np.stack([slots, (keys ^ key_of_batch).view(np.int64)]))
            self._tile.launch(
                codecs.encode,
                count,
                self._parts,
                lists[0],
                lists[1],
                record_of,
                target,
                fits,
                count,
                STOCHASTIC=codec.layout.stochastic,
                **self._form(codec, target.shape[1]),
            )
            copied = self.transfers.down(fits)
            encoded = (
                self._encoded_down(target, records, places) if isinstance(records, np.ndarray) else None
            )
        self.transfers.wait()
        if encoded is not None:
            assert isinstance(records, np.ndarray)
            records[places] = encoded.numpy()
        unfit = np.flatnonzero(copied.numpy() == 0)
        return int(unfit[0]) if len(unfit) else -1

    def _encoded_down(self, encoded: Tensor, records: Records, places: Indices) -> Tensor | None:
        """Start to copy records to the host: into `records` if it is pinned, otherwise into the
        returned tensor.
        """
        out = torch.from_numpy(records)
        direct = _is_whole(places, records) and self.transfers.is_pinned(out)
        host = self.transfers.down(encoded, out if direct else None)
        return None if direct else host

    def decode(
        self, codec: RecordCodec, records: Records | Tensor, places: Indices, slots: Indices
    ) -> None:
        if not len(slots):
            return
        with self._order.moving():
            if isinstance(records, Tensor):
                lists, source = self._up(np.stack([slots, places])), records
            else:
                lists = self._up(slots[None])
                source = self._up(records if _is_whole(places, records) else records[places])
            record_of = lists[1] if isinstance(records, Tensor) else None
            self._tile.launch(
                codecs.decode,
                len(slots),
                self._parts,
                lists[0],
                record_of,
                source,
                len(slots),
                **self._form(codec, source.shape[1]),
            )

    def initialize(self, layout: cache.CacheLayout, moves: cache.Moves, absent: NDArray[np.bool_]) -> None:
        at = np.flatnonzero(absent)
        self._initialize(moves.slots[at], moves.keys[at], layout.bound[moves.tables[at]])

    def _initialize(self, slots: Indices, keys: NDArray[np.uint64], bounds: NDArray[np.float32]) -> None:
        if len(slots):
            with self._order.moving():
                # All lists are sent in one copy. A float32 bound is sent as the bits of a float64,
                # which is exact.
                wide_bounds = bounds.astype(np.float64).view(np.int64)
                lists = self._up(np.stack([slots, keys.view(np.int64), wide_bounds]))
                self._tile.launch(
                    random.initialize,
                    len(slots),
                    self._parts,
                    lists[0],
                    lists[1],
                    lists[2].view(torch.float64).float(),
                    len(slots),
                    D=self.width,
                    ROW_STATE=bool(self._kept["row_state"]),
                    FULL=self._kept["full_state"],
                    CLOCKED=bool(self._kept["clock"]),
                )


def _is_whole(places: Indices, records: Records) -> bool:
    """Whether `places`, which are distinct, are all records in order."""
    return len(places) == len(records) and bool((places[1:] > places[:-1]).all())
