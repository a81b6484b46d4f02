"""The cache of a table group: a directory of rows in slots, movers between slots and home, and
saved slots.

The cache of each table is set-associative, with a tag and a stamp of 4 bytes per slot. A row is in
its slot or in its record, never in both: a resident row was fetched to be trained and is written
back when its slot is needed, so there is no dirty bit. One set in sixteen belongs to an overflow
area with another hash, for rows whose own set is full of rows in use. Hot rows have permanent slots
after all caches of the group. Two comparisons show whether an id is hot, and its slot follows from
the id, so hot rows need neither tag nor stamp.

The `Directory` decides which rows move, and a `Mover` moves them in two steps. `Mover.begin` writes
evicted rows to the home and reads missing rows from it; no slot changes, so the assignment of slots
can still be undone. `Mover.finish` writes slots. An interrupt there loses rows, and sets the
`Health` of the collection to failed. If records are addressable memory (dram, mapped) that slots
can be swapped with, rows are moved in one pass. If records are in files or slots are on another
device, rows are encoded, written, read and decoded, one batch at a time.

A slot record in a checkpoint is ``[row int64, stamp int32, 4 bytes of zero, float32 row]``; a slot
that was emptied has row -1. The slots that changed since the last checkpoint follow from their
stamps, so training sets no marks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.slots.cpu import CpuSlots
from stratarec.embedding.slots.memory import Records, SlotMemory
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.device import DeviceRecords
from stratarec.embedding.stores.row_files import DeltaChain, read_rows, verify_file
from stratarec.embedding.tiers import TableTier, cache_sets
from stratarec.errors import CheckpointError, ConfigError, TrainingError
from stratarec.io.atomic import make_directory
from stratarec.kernels import bit_rows
from stratarec.kernels import cache as kernel
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import RowNoise, table_key
from stratarec.kernels.runtime.accelerator import HOST
from stratarec.progress import traced

MAX_ROWS = 2**31 - 2
"""Maximum rows or slots of a table: a tag is a row's number plus one in an int32."""
_CHUNK_SLOTS = 1 << 19


class Directory:
    """The slots of a group of tables and the rows in them.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        The tables, in the order of their rows in the group.
    tiers : mapping of str to TableTier
        Cache size of each table.
    policy, ways : str, int
        As in `TierConfig`.
    seed : int
        Seed of initial weights and rounding noise.

    Raises
    ------
    ConfigError
        For a table with more rows, or a cache with more slots, than tags and slot numbers can
        address.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        tiers: Mapping[str, TableTier],
        *,
        policy: str,
        ways: int,
        seed: int,
    ) -> None:
        rows = np.array([table.num_embeddings for table in configs], dtype=np.int64)
        shapes = np.array(
            [cache_sets(tiers[table.name].cache_rows, ways) for table in configs], dtype=np.int64
        )
        hot = np.array([tiers[table.name].hot_rows for table in configs], dtype=np.int64)
        for table, sets, many in zip(configs, shapes.sum(axis=1).tolist(), hot.tolist(), strict=True):
            _check_size(table, sets * ways, many)
        # Tables are contiguous, each with its sets and then its overflow sets.
        slots = int(shapes.sum()) * ways
        self.layout = kernel.CacheLayout(
            ways=ways,
            policy=policy,
            rows=rows,
            first_row=np.cumsum(rows) - rows,
            slot_start=np.cumsum([0, *(shapes.sum(axis=1) * ways)]).astype(np.int64),
            sets=shapes[:, 0].copy(),
            overflow_sets=shapes[:, 1].copy(),
            noise=RowNoise.of(
                [table_key(seed, table.name) for table in configs],
                [table.numbering.first for table in configs],
                [table.numbering.stride for table in configs],
            ),
            bound=np.array([table.bound for table in configs], dtype=np.float32),
            hot=kernel.HotSlots.of(hot, slots) if hot.any() else None,
        )
        self.state = kernel.CacheState.empty(self.layout)
        self.workspace = kernel.StageWorkspace()

    @property
    def shape(self) -> dict[str, Any]:
        """Policy, and the parameters that determine the possible slots of each row, as JSON."""
        layout = self.layout
        sets = [
            [int(regular), int(overflow)]
            for regular, overflow in zip(layout.sets, layout.overflow_sets, strict=True)
        ]
        shape = {"ways": layout.ways, "policy": layout.policy, "sets": sets}
        if layout.hot is not None:
            shape["hot"] = layout.hot.rows.tolist()
        return shape

    @property
    def slots(self) -> int:
        """Number of all slots; slots of hot rows come last."""
        return int(self.layout.hot_slots.start[-1])

    @property
    def hot_slots(self) -> Indices:
        """Slots of hot rows, in order."""
        return np.arange(self.layout.slots, self.slots, dtype=np.int64)

    def locate_hot(self, rows: Indices) -> Indices:
        """Return the slot of each of `rows` (of the group), ``[n]`` int64; -1 if not hot."""
        tables = self.tables_of(rows)
        return self.layout.hot_slots.locate(tables, rows - self.layout.first_row[tables])

    @traced("assign slots")
    def assign(
        self, group: GroupLayout, bags: BagBatch, out: NDArray[np.int32], stamp: int, horizon: int
    ) -> kernel.Staging:
        """Assign a slot to every id of a batch and list the moves that this requires; `undo`
        reverts it.

        Parameters
        ----------
        group : GroupLayout
            Layout of the group's features.
        bags : BagBatch
            Bags of the group's features.
        out : ndarray
            ``[N]`` int32: receives the slots, relative to the first slot of their table; -1 if
            there is no room.
        stamp : int
            Stamp of the batch, which its slots get.
        horizon : int
            Oldest protected stamp: slots with this stamp or a later one are not evicted.
        """
        return kernel.stage(
            group,
            self.layout,
            self.state,
            bags,
            out,
            stamp=stamp,
            horizon=horizon,
            workspace=self.workspace,
        )

    def undo(self, staging: kernel.Staging) -> None:
        """Revert the `assign` that returned `staging`, before any row has moved."""
        kernel.undo(self.state, staging, self.workspace)

    def locate(self, rows: Indices) -> Indices:
        """Return the slot of each of `rows` (of the group), ``[n]`` int64; -1 for rows at home."""
        tables = self.tables_of(rows)
        return kernel.locate(self.layout, self.state, tables, rows - self.layout.first_row[tables])

    def moves_of(self, rows: Indices, slots: Indices) -> kernel.Moves:
        """Return the moves of `rows` of the group into `slots`; both are ``[n]`` int64."""
        tables = self.tables_of(rows)
        keys = kernel.row_keys(self.layout, tables, rows - self.layout.first_row[tables])
        return kernel.Moves(rows=rows, slots=slots, tables=tables, keys=keys)

    def tables_of(self, rows: Indices) -> NDArray[np.int32]:
        """Return the index of the table of each of `rows` (of the group), ``[n]`` int64."""
        return (np.searchsorted(self.layout.first_row, rows, side="right") - 1).astype(np.int32)

    # Stamps and tags at rest

    def used(self) -> Iterator[Indices]:
        """Yield the slots that contain a row, ascending, in chunks."""
        yield from self._slots_where(self.state.tags, 1)
        yield from self._hot_chunks()

    def stamped_since(self, stamp: int) -> Iterator[Indices]:
        """Yield the slots that were used or emptied at `stamp` or later, ascending, in chunks.

        Hot slots have no stamps; all of them are included.
        """
        yield from self._slots_where(self.state.stamps, stamp)
        yield from self._hot_chunks()

    def _hot_chunks(self) -> Iterator[Indices]:
        for first in range(self.layout.slots, self.slots, _CHUNK_SLOTS):
            yield np.arange(first, min(first + _CHUNK_SLOTS, self.slots), dtype=np.int64)

    def _slots_where(self, values: NDArray[np.int32], least: int) -> Iterator[Indices]:
        for first in range(0, self.layout.slots, _CHUNK_SLOTS):
            chunk = values[first : min(first + _CHUNK_SLOTS, self.layout.slots)]
            slots = np.flatnonzero(chunk >= least)
            if len(slots):
                yield slots + first

    def rows_in(self, slots: Indices) -> Indices:
        """Return the row (of the group) in each of `slots`, ``[n]`` int64; -1 for empty slots."""
        rows = np.empty(len(slots), dtype=np.int64)
        hot = slots >= self.layout.slots
        tables, ids = self.layout.hot_slots.rows_in(slots[hot])
        rows[hot] = self.layout.first_row[tables] + ids
        # Slots of caches only: hot slots come after the last table's cache and would be attributed
        # to that table.
        tables = np.searchsorted(self.layout.slot_start, slots[~hot], side="right") - 1
        tags = self.state.tags[slots[~hot]].astype(np.int64)
        rows[~hot] = np.where(tags > 0, self.layout.first_row[tables] + tags - 1, -1)
        return rows

    def stamps_in(self, slots: Indices) -> NDArray[np.int32]:
        """Return the stamp of each of `slots`, ``[n]`` int64; -1 for hot slots."""
        # `where` evaluates both sides, so hot slots need a valid index.
        last = max(self.layout.slots - 1, 0)
        return np.where(slots < self.layout.slots, self.state.stamps[np.minimum(slots, last)], np.int32(-1))

    def clear(self) -> None:
        """Empty every slot."""
        self.state = kernel.CacheState.empty(self.layout)

    def set_slots(self, slots: Indices, rows: Indices, stamps: NDArray[np.int32]) -> None:
        """Set the contents of slots, which were read from a checkpoint.

        Parameters
        ----------
        slots : ndarray
            ``[n]`` int64 slots.
        rows : ndarray
            ``[n]`` int64 row of the group in each slot; -1 for an empty slot.
        stamps : ndarray
            ``[n]`` int32 stamp of each slot.
        """
        state, layout = self.state, self.layout
        hot = slots >= layout.slots
        if (self.rows_in(slots[hot]) != rows[hot]).any():
            raise CheckpointError("hot slots contain rows that do not belong there; use another checkpoint")
        slots, rows, stamps = slots[~hot], rows[~hot], stamps[~hot]
        tables = np.searchsorted(layout.slot_start, slots, side="right") - 1
        # A tag has 32 bits: a row of another table would become a row of this one.
        stray = (rows >= 0) & (
            (rows < layout.first_row[tables]) | (rows >= (layout.first_row + layout.rows)[tables])
        )
        if (rows < -1).any() or stray.any():
            raise CheckpointError("slots contain rows of other tables; use another checkpoint")
        state.tags[slots] = np.where(rows < 0, 0, rows - layout.first_row[tables] + 1).astype(np.int32)
        state.stamps[slots] = stamps
        overflow_start = layout.slot_start[:-1] + layout.sets * layout.ways
        # A lookup searches only as much of the overflow area as may contain rows; the exact extent
        # is not known here.
        spilled = np.unique(tables[(slots >= overflow_start[tables]) & (rows >= 0)])
        state.reach[spilled] = np.minimum(layout.overflow_sets, kernel.PROBES)[spilled]

    def fault(self, stamp: int) -> str:
        """Describe what is wrong with slots from a checkpoint whose next batch has `stamp`; empty
        if they are valid.
        """
        if len(self.state.stamps) and (self.state.stamps.min() < -1 or self.state.stamps.max() > stamp):
            return (
                f"stamps of {self.state.stamps.min()} to {self.state.stamps.max()}, expected -1 to {stamp}"
            )
        for slots in self.used():
            if (self.locate(self.rows_in(slots)) != slots).any():
                return "a row is in two slots, or in a slot of another set"
        return ""

    def shift(self, by: int) -> None:
        """Subtract `by` from all stamps; older stamps become -1."""
        stamps = self.state.stamps
        # Raised before subtracting: the oldest stamps would overflow 32 bits and become the newest.
        np.maximum(stamps, by - 1, out=stamps)
        stamps -= np.int32(by)


def _check_size(table: EmbeddingBagConfig, slots: int, hot: int) -> None:
    if hot > table.num_embeddings:
        raise ConfigError(
            f"table {table.name!r}: hot_rows is {hot:,}, expected at most its {table.num_embeddings:,} rows"
        )
    if table.num_embeddings > MAX_ROWS:
        raise ConfigError(
            f"table {table.name!r} has {table.num_embeddings:,} rows; a cached table has at most "
            f"{MAX_ROWS:,}: split it into several tables, or leave it out of the "
            "tiers to keep it in level 0"
        )
    if slots > MAX_ROWS:
        raise ConfigError(f"table {table.name!r}: cache_rows is {slots:,}, expected at most {MAX_ROWS:,}")


@dataclass(frozen=True)
class Fetched:
    """Rows that are ready to be decoded into slots."""

    incoming: kernel.Moves
    """Rows and their slots, n of them."""
    records: Records | Tensor
    """``[n, record_bytes]`` uint8 records of these rows, or all records of the home, by row."""
    present: NDArray[np.bool_]
    """``[n]`` whether a row has a record; other rows get their initial values."""


class Mover(ABC):
    """Moves the rows of a group between slots and their home.

    Parameters
    ----------
    names : sequence of str
        Names of the tables, for errors.
    directory : Directory
        Lists the moves.
    codec : RecordCodec
        Converts rows between floats and records.
    store : RecordStore
        Home of the rows: records of `codec`, by row of the group.
    memory : SlotMemory
        Slots, in which rows are floats.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Directory,
        codec: RecordCodec,
        store: RecordStore,
        memory: SlotMemory,
    ) -> None:
        self._names = tuple(names)
        self._directory = directory
        self.codec = codec
        self.store = store
        self.memory = memory
        self._buffer = np.zeros((0, codec.record_bytes), dtype=np.uint8)
        self._pinned_bytes = 0

    @abstractmethod
    def begin(self, staging: kernel.Staging, batch_number: int) -> Fetched | None:
        """Write evicted rows to the home and read the missing rows from it.

        No slot changes, so the caller can still undo the assignment.

        Parameters
        ----------
        staging : kernel.Staging
            Moves that `Directory.assign` listed.
        batch_number : int
            Number of the batch (`BatchStamp.number`), of which the noise that rounds evicted rows
            is a function.

        Returns
        -------
        Fetched or None
            The missing rows, to be passed to `finish`; None if there are none, or if `finish` reads
            them itself.

        Raises
        ------
        StorageError, TrainingError
            If the home cannot be read or written, or a row does not fit its codec.
        """

    @abstractmethod
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, batch_number: int) -> None:
        """Write the missing rows into their slots.

        Parameters
        ----------
        staging, batch_number
            The arguments of `begin`.
        fetched : Fetched or None
            Result of `begin`.

        Raises
        ------
        TrainingError
            If a row does not fit its codec; some rows are then lost.
        """

    @abstractmethod
    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        """Decode rows from the home into other slots; the home and the slots of this mover do not
        change.

        Parameters
        ----------
        moves : kernel.Moves
            Rows of the group, and the slots in `memory` that they are copied to.
        memory : SlotMemory
            Slots to write.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the largest staging buffer; 0 for addressable homes."""
        return self._buffer.nbytes + self._pinned_bytes

    def write_rows(self, rows: Indices, source: FloatRows, places: Indices, batch_number: int) -> None:
        """Encode rows `places` of `source` and write them to the store as `rows`; see
        `TableGroup.write_rows`.
        """
        keys = self._directory.moves_of(rows, places).keys
        records = np.zeros((len(rows), self.codec.record_bytes), dtype=np.uint8)
        bad = self.codec.encode(
            source, places, records, np.arange(len(rows), dtype=np.int64), keys, batch_number
        )
        if bad >= 0:
            raise self._unfit_row(int(rows[bad]))
        self.store.write(rows, records)

    def _encode(
        self, moves: kernel.Moves, records: Records | Tensor, places: Indices, batch_number: int
    ) -> None:
        bad = self.memory.encode(self.codec, moves.slots, records, places, moves.keys, batch_number)
        if bad >= 0:
            raise self._unfit_row(int(moves.rows[bad]))

    def _place(self, fetched: Fetched, places: Indices, memory: SlotMemory) -> None:
        """Decode records into slots of `memory`; rows without a record get their initial values."""
        memory.decode(self.codec, fetched.records, places, fetched.incoming.slots)
        # A row that was never written has no record: its initial value follows from (seed, table,
        # row).
        if not fetched.present.all():
            memory.initialize(self._directory.layout, fetched.incoming, ~fetched.present)

    def _unfit_row(self, group_row: int) -> TrainingError:
        table = int(self._directory.tables_of(np.array([group_row]))[0])
        return self._unfit(table, group_row - int(self._directory.layout.first_row[table]))

    def _unfit(self, table: int, row: int) -> TrainingError:
        return TrainingError(
            f"table {self._names[table]!r}, row {row}: a weight or its optimizer state is not a finite "
            "number that "
            f"{self.codec.config.kind} can hold; lower the learning rate or give the "
            "table a larger precision"
        )


class AddressableHome(Mover):
    """Mover for addressable stores: one pass writes a slot's evicted row and reads its new one."""

    @property
    def _array(self) -> Records:
        # Read from the store each time: a reference kept here would keep a closed store's memory
        # alive.
        array = self.store.array
        assert array is not None
        return array

    @traced("fetch rows")
    def begin(self, staging: kernel.Staging, batch_number: int) -> Fetched | None:
        if not staging.released.any():
            return None
        # Done before `finish`, which may put other rows into the slots of the overflow area that
        # are released here.
        moves = kernel.released(self._directory.layout, staging, self._directory.workspace)
        self._encode(moves, self._array, moves.rows, batch_number)
        self.store.mark_written(moves.rows)
        return None

    @traced("place rows")
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, batch_number: int) -> None:
        layout, workspace, bits = self._directory.layout, self._directory.workspace, self.store.bits
        assert bits is not None
        assert isinstance(self.memory, CpuSlots)
        refused = self.memory.swap(
            layout, staging, workspace, self.codec, (self._array, *bits), batch_number
        )
        if refused is not None:
            raise self._unfit(*refused)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        self._place(Fetched(moves, self._array, self.store.written(moves.rows)), moves.rows, memory)


class DeviceHome(Mover):
    """Mover for records in the memory of the slots' device: no record passes through the host."""

    @property
    def _records(self) -> Tensor:
        assert isinstance(self.store, DeviceRecords)
        return self.store.records

    @traced("fetch rows")
    def begin(self, staging: kernel.Staging, batch_number: int) -> Fetched | None:
        outgoing, incoming = kernel.moves(self._directory.layout, staging, self._directory.workspace)
        if len(outgoing):
            self._encode(outgoing, self._records, outgoing.rows, batch_number)
            self.store.mark_written(outgoing.rows)
        return (
            Fetched(incoming, self._records, self.store.written(incoming.rows)) if len(incoming) else None
        )

    @traced("place rows")
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, batch_number: int) -> None:
        if fetched is not None:
            self._place(fetched, fetched.incoming.rows, self.memory)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        self._place(Fetched(moves, self._records, self.store.written(moves.rows)), moves.rows, memory)


class StoredHome(Mover):
    """Mover for other stores: records pass through a buffer that grows to the largest batch."""

    @traced("fetch rows")
    def begin(self, staging: kernel.Staging, batch_number: int) -> Fetched | None:
        outgoing, incoming = kernel.moves(self._directory.layout, staging, self._directory.workspace)
        records = self._staging(len(outgoing))
        if len(outgoing):
            self._encode(outgoing, records, np.arange(len(outgoing), dtype=np.int64), batch_number)
        # Outgoing records are written first: incoming records may reuse the buffer.
        fetched = self._staging(len(incoming))
        array, bits = self.store.array, self.store.bits
        if array is not None and bits is not None:
            present = bit_rows.exchange(array, bits, outgoing.rows, records, incoming.rows, fetched)
            return Fetched(incoming, fetched, present) if len(incoming) else None
        if len(outgoing):
            self.store.write(outgoing.rows, records)
        return self._fetch(incoming, fetched) if len(incoming) else None

    @traced("place rows")
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, batch_number: int) -> None:
        if fetched is not None:
            self._place(fetched, np.arange(len(fetched.incoming), dtype=np.int64), self.memory)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        # A temporary buffer: reading more rows than a batch has must not enlarge the permanent one.
        records = np.empty((len(moves), self.codec.record_bytes), np.uint8)
        self._place(self._fetch(moves, records), np.arange(len(moves), dtype=np.int64), memory)

    def _fetch(self, incoming: kernel.Moves, records: Records) -> Fetched:
        return Fetched(incoming, records, self.store.read(incoming.rows, records))

    def _staging(self, rows: int) -> Records:
        shape = rows, self.codec.record_bytes
        if self.memory.transfers is not HOST:
            # A new buffer each time: the device may still read the buffer of the last batch.
            self._pinned_bytes = max(self._pinned_bytes, math.prod(shape))
            records: Records = self.memory.transfers.empty(*shape, dtype=torch.uint8).numpy()
            return records
        if len(self._buffer) < rows:
            self._buffer = np.zeros((rows * 5 // 4, shape[1]), dtype=np.uint8)
        return self._buffer[:rows]


def mover_of(
    names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
) -> Mover:
    """Return the mover for a store and a memory. The parameters are the same as of `Mover`."""
    if isinstance(store, DeviceRecords):
        return DeviceHome(names, directory, codec, store, memory)
    addressable = memory.addresses_host and store.array is not None and store.bits is not None
    kind = AddressableHome if addressable else StoredHome
    return kind(names, directory, codec, store, memory)


_HEAD = np.dtype([("row", "<i8"), ("stamp", "<i4"), ("unused", "<u4")])
_FOLDER = "slots"


class SlotRecords:
    """Saves and restores the contents of a cache's directory and slots, in a chain of files.

    Parameters
    ----------
    directory : Directory
        Rows and stamps of the slots.
    memory : SlotMemory
        Weights and optimizer state in the slots.
    codec : RecordCodec
        Codec of the same rows as float32.
    """

    def __init__(self, directory: Directory, memory: SlotMemory, codec: RecordCodec) -> None:
        self._directory = directory
        self._memory = memory
        self._codec = codec
        self._chain = DeltaChain()
        self._saved_at = 0
        self.shape = (directory.slots, _HEAD.itemsize + codec.record_bytes)

    def save(self, directory: Path, previous: Path | None, oldest_stamp: int) -> dict[str, Any]:
        """Write the slots, or the slots stamped since `previous`, into ``<directory>/slots``;
        return the manifest.

        The arguments are those of `TableGroup.save`.
        """
        folder = directory / _FOLDER
        make_directory(folder)
        files = self._chain.save(
            folder,
            None if previous is None else previous / _FOLDER,
            self,
            self._directory.used,
            lambda: self._directory.stamped_since(self._saved_at),
        )
        self._saved_at = oldest_stamp
        return {"files": files, "record_bytes": self.shape[1]}

    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        """Fill an empty directory and its slots from the files that `save` wrote.

        The arguments are those of `TableGroup.restore`.
        """
        folder = directory / _FOLDER
        self._chain.verify(folder, manifest["files"])
        # The generator stores each piece through `__setitem__`.
        for _ in self._chain.load(folder, manifest["files"], self):
            pass
        # Names and sizes were checked, but not that every row is in at most one slot.
        fault = self._directory.fault(stamp)
        if fault:
            raise CheckpointError(f"{folder} is damaged: {fault}; use another checkpoint")
        self._saved_at = stamp

    def shift(self, by: int) -> None:
        """Subtract `by` from the stamp of the last save."""
        self._saved_at = max(self._saved_at - by, 0)

    def __getitem__(self, slots: Indices, /) -> NDArray[np.uint8]:
        """Return the records of `slots` for a file, ``[n, bytes]``; the module's docstring has
        their layout.
        """
        rows = self._directory.rows_in(slots)
        head = np.zeros(len(slots), dtype=_HEAD)
        head["row"], head["stamp"] = rows, self._directory.stamps_in(slots)
        floats = np.zeros((len(slots), self._codec.record_bytes), dtype=np.uint8)
        filled = np.flatnonzero(rows >= 0)
        # float32 is not rounded, so the keys of the noise do not matter.
        keys = np.zeros(len(filled), dtype=np.uint64)
        bad = self._memory.encode(self._codec, slots[filled], floats, filled, keys, 0)
        if bad >= 0:
            raise TrainingError(
                f"row {rows[filled[bad]]} of the cached tables of width {self._codec.width} is not finite"
            )
        return np.concatenate([head.view(np.uint8).reshape(len(slots), -1), floats], axis=1)

    def __setitem__(self, slots: Indices, records: NDArray[np.uint8], /) -> None:
        """Fill `slots` with their records from a file, ``[n, bytes]``."""
        head, floats = _split(records)
        self._directory.set_slots(slots, head["row"], head["stamp"])
        filled = np.flatnonzero(head["row"] >= 0)
        self._memory.decode(self._codec, floats, filled, slots[filled])


def _split(records: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    head = np.ascontiguousarray(records[:, : _HEAD.itemsize]).view(_HEAD)[:, 0]
    return head, np.ascontiguousarray(records[:, _HEAD.itemsize :])


def saved_slots(
    directory: Path, manifest: Mapping[str, Any], codec: RecordCodec, *, slots: int, rows: int
) -> Iterator[tuple[Indices, FloatRows]]:
    """Yield the rows that were in slots when a checkpoint was written, in pieces, each row once.

    Parameters
    ----------
    directory : Path
        Directory of the group.
    manifest : mapping
        Result of `SlotRecords.save`.
    codec : RecordCodec
        Codec of the rows at home.
    slots, rows : int
        Number of slots of the cache, and number of rows of the group.
    """
    folder, files, width = directory / _FOLDER, manifest["files"], int(manifest["record_bytes"])
    exact = codec.exact()
    for entry in files:
        verify_file(folder / entry["name"], entry["hash"])
    # For each slot the last file that contains it. Earlier files may have other rows in that slot.
    newest = np.full(slots, -1, dtype=np.int16)
    for number, entry in enumerate(files):
        for places, _ in read_rows(folder / entry["name"], entry["rows"], width, slots):
            newest[places] = number
    for number, entry in enumerate(files):
        for places, records in read_rows(folder / entry["name"], entry["rows"], width, slots):
            head, floats = _split(records)
            if (head["row"] >= rows).any():
                raise CheckpointError(
                    f"{folder / entry['name']} has rows beyond 0..{rows - 1}; use another checkpoint"
                )
            valid = np.flatnonzero((newest[places] == number) & (head["row"] >= 0))
            decoded = FloatRows.allocate(len(valid), codec.width, **codec.layout.state_shape)
            exact.decode(floats, valid, decoded, np.arange(len(valid), dtype=np.int64))
            yield head["row"][valid].astype(np.int64), decoded
