"""Movement of rows between slots and their home, and the checkpoint files of the rows that are in slots.

A move has two parts. The first part can be undone: records are written to the home and read from it, and no slot has
changed. The second part writes slots; an interrupt there loses rows, which the health of the collection records.

There are two movers, chosen once when tables are built. If records are addressable memory (dram, mapped) that slots can
be swapped with, rows are moved in one pass. If records are in files or slots are on another device, rows are encoded,
written, read and decoded, one batch at a time.

A slot record is ``[row int64, stamp int32, count uint32, float32 row]``; a slot that was emptied has row -1. The slots
that changed since the last checkpoint follow from their stamps, so training sets no marks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.slots import Records, SlotMemory
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.row_files import DeltaChain, read_rows, verify_file
from stratarec.embedding.tables.directory import Directory
from stratarec.errors import CheckpointError, TrainingError
from stratarec.io.atomic import make_directory
from stratarec.kernels import cache as kernel


@dataclass(frozen=True)
class Fetched:
    """Rows that are ready to be decoded into slots: their moves, records, and whether each record exists."""

    incoming: kernel.Moves
    records: Records
    present: NDArray[np.bool_]


class Mover(ABC):
    """Moves the rows of a group between slots and their home.

    Parameters
    ----------
    names : sequence of str
        Names of the tables, for errors.
    directory : Directory
        Lists the moves.
    codec, store, memory
        Rows are floats in `memory` and records of `codec` in `store`.
    """

    def __init__(
        self, names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
    ) -> None:
        self._names, self._directory = tuple(names), directory
        self.codec, self.store, self.memory = codec, store, memory

    @abstractmethod
    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        """Do the first part of a move, which changes no slot; return the argument of `finish`.

        Raises
        ------
        StorageError, TrainingError
            If the home cannot be read or written, or a row does not fit its codec.
        """

    @abstractmethod
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        """Do the second part of a move, which writes slots.

        Raises
        ------
        TrainingError
            If a row does not fit its codec; some rows are then lost.
        """

    @abstractmethod
    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        """Decode rows from the home into slots of `memory`; nothing else changes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return 0

    def write_rows(self, rows: Indices, source: FloatRows, places: Indices, write: int) -> None:
        """Encode rows `places` of `source` and write them to the store as `rows`."""
        keys = self._directory.moves_of(rows, places).keys
        records = np.zeros((len(rows), self.codec.record_bytes), dtype=np.uint8)
        bad = self.codec.encode(source, places, records, np.arange(len(rows), dtype=np.int64), keys, write)
        if bad >= 0:
            raise self._unfit_row(int(rows[bad]))
        self.store.write(rows, records)

    def _encode(self, moves: kernel.Moves, records: Records, places: Indices, write: int) -> None:
        bad = self.memory.encode(self.codec, moves.slots, records, places, moves.keys, write)
        if bad >= 0:
            raise self._unfit_row(int(moves.rows[bad]))

    def _place(self, fetched: Fetched, places: Indices, memory: SlotMemory) -> None:
        """Decode records into slots of `memory`; rows without a record get their initial values."""
        memory.decode(self.codec, fetched.records, places, fetched.incoming.slots)
        # A row that was never written has no record: its initial value follows from (seed, table, row).
        if not fetched.present.all():
            memory.initialize(self._directory.layout, fetched.incoming, ~fetched.present)

    def _unfit_row(self, group_row: int) -> TrainingError:
        table = int(self._directory.tables_of(np.array([group_row]))[0])
        return self._unfit(table, group_row - int(self._directory.layout.first_row[table]))

    def _unfit(self, table: int, row: int) -> TrainingError:
        return TrainingError(
            f"table {self._names[table]!r}, row {row}: a weight or its optimizer state is not a finite number that "
            f"{self.codec.config.kind} can hold; lower the learning rate or give the table a wider precision"
        )


class AddressableHome(Mover):
    """Mover for stores in addressable memory: it writes a slot's evicted row and reads its new row in one pass."""

    @property
    def _array(self) -> Records:
        # Read from the store each time: a reference kept here would keep a closed store's memory alive.
        array = self.store.array
        assert array is not None
        return array

    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        if not staging.released.any():
            return None
        # Before `finish`, which may put another row into a slot of the overflow area that is released here.
        moves = kernel.released(self._directory.layout, staging, self._directory.workspace)
        self._encode(moves, self._array, moves.rows, write)
        self.store.mark_written(moves.rows)
        return None

    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        layout, workspace, bits = self._directory.layout, self._directory.workspace, self.store.bits
        assert bits is not None
        refused = self.memory.swap(layout, staging, workspace, self.codec, (self._array, *bits), write)
        if refused is not None:
            raise self._unfit(*refused)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        self._place(Fetched(moves, self._array, self.store.written(moves.rows)), moves.rows, memory)


class StoredHome(Mover):
    """Mover for other stores: records pass through a buffer that grows to the largest batch."""

    def __init__(
        self, names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
    ) -> None:
        super().__init__(names, directory, codec, store, memory)
        self._records = np.zeros((0, codec.record_bytes), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        return self._records.nbytes

    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        outgoing, incoming = kernel.moves(self._directory.layout, staging, self._directory.workspace)
        if len(outgoing):
            records = self._buffer(len(outgoing))
            self._encode(outgoing, records, np.arange(len(outgoing), dtype=np.int64), write)
            self.store.write(outgoing.rows, records)
        # Outgoing records are written first: incoming records reuse the buffer.
        return self._fetch(incoming, self._buffer(len(incoming))) if len(incoming) else None

    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        if fetched is not None:
            self._place(fetched, np.arange(len(fetched.incoming), dtype=np.int64), self.memory)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        # A temporary buffer: reading more rows than a batch has must not enlarge the permanent one.
        records = np.empty((len(moves), self.codec.record_bytes), np.uint8)
        self._place(self._fetch(moves, records), np.arange(len(moves), dtype=np.int64), memory)

    def _fetch(self, incoming: kernel.Moves, records: Records) -> Fetched:
        return Fetched(incoming, records, self.store.read(incoming.rows, records))

    def _buffer(self, rows: int) -> Records:
        if len(self._records) < rows:
            self._records = np.zeros((rows * 5 // 4, self.codec.record_bytes), dtype=np.uint8)
        return self._records[:rows]


def mover_of(
    names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
) -> Mover:
    """Return the mover for a store and a memory; parameters as those of `Mover`."""
    addressable = memory.addresses_host and store.array is not None and store.bits is not None
    kind = AddressableHome if addressable else StoredHome
    return kind(names, directory, codec, store, memory)


_HEAD = np.dtype([("row", "<i8"), ("stamp", "<i4"), ("count", "<u4")])
_FOLDER = "slots"


class SlotRecords:
    """Saves and restores the contents of a cache's directory and slots, in a chain of files.

    Parameters
    ----------
    codec : RecordCodec
        Codec of the same rows as float32.
    """

    def __init__(self, directory: Directory, memory: SlotMemory, codec: RecordCodec) -> None:
        self._directory, self._memory, self._codec = directory, memory, codec
        self._chain = DeltaChain()
        self._saved_at = 0
        self.shape = (directory.slots, _HEAD.itemsize + codec.record_bytes)

    def save(self, directory: Path, previous: Path | None, oldest_stamp: int) -> dict[str, Any]:
        """Write the slots, or the slots stamped since `previous`, into ``<directory>/slots``; return the manifest."""
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
        """Fill an empty directory and its slots from the files that `save` wrote."""
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
        self._saved_at = max(self._saved_at - by, 0)

    def __getitem__(self, slots: Indices, /) -> NDArray[np.uint8]:
        """Return the records of slots, to be written to a file."""
        rows = self._directory.rows_in(slots)
        head = np.empty(len(slots), dtype=_HEAD)
        head["row"], head["stamp"] = rows, self._directory.stamps_in(slots)
        head["count"] = self._directory.counts_in(slots)
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
        """Store the records of slots, read from a file."""
        head, floats = _split(records)
        self._directory.set_slots(slots, head["row"], head["stamp"], head["count"])
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
    slots, rows : int
        Number of slots and of rows.
    """
    folder, files, width = directory / _FOLDER, manifest["files"], int(manifest["record_bytes"])
    exact = codec.exact()
    for entry in files:
        verify_file(folder / entry["name"], entry["hash"])
    # The last file with each slot: a row may have been in another slot before.
    newest = np.full(slots, -1, dtype=np.int16)
    for number, entry in enumerate(files):
        for places, _ in read_rows(folder / entry["name"], entry["rows"], width, slots):
            newest[places] = number
    for number, entry in enumerate(files):
        for places, records in read_rows(folder / entry["name"], entry["rows"], width, slots):
            head, floats = _split(records)
            if (head["row"] >= rows).any():
                raise CheckpointError(f"{folder / entry['name']} has rows beyond 0..{rows - 1}; use another checkpoint")
            valid = np.flatnonzero((newest[places] == number) & (head["row"] >= 0))
            decoded = FloatRows.allocate(len(valid), codec.width, **codec.layout.kept)
            exact.decode(floats, valid, decoded, np.arange(len(valid), dtype=np.int64))
            yield head["row"][valid].astype(np.int64), decoded
