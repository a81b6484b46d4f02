"""Takes rows between slots and their home, by what the directory decided.

A move has two parts. What the first does can be taken back: records are written at home and read from there, and no
slot has changed. The second writes slots; whoever is interrupted there has lost rows, and must say so.

There are two movers, chosen once when tables are built. Where records are memory (dram, mapped) that slots can be
swapped with, that is one pass; where they are in files, a victim cache lies before the home, or slots are of another
device, rows are encoded, written, read and decoded, a batch at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.directory import Directory
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.slots import Records, SlotMemory
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.tables.row_arrays import FloatRows, Indices
from stratarec.errors import TrainingError
from stratarec.kernels import cache as kernel


@dataclass(frozen=True)
class Fetched:
    """Rows that are ready to come into slots: their records and whether there is one of each."""

    incoming: kernel.Moves
    records: Records
    present: NDArray[np.bool_]


class Mover(ABC):
    """Takes the rows of a group between slots and home.

    Parameters
    ----------
    names : sequence of str
        Of the tables, for errors.
    directory : Directory
        Whose lists it carries out.
    codec, store, memory
        Rows lie in `memory` as floats and in `store` as records of `codec`.
    """

    def __init__(
        self, names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
    ) -> None:
        self._names, self._directory = tuple(names), directory
        self.codec, self.store, self.memory = codec, store, memory

    @abstractmethod
    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        """The part of a move that leaves slots alone; returns what `finish` takes.

        Raises
        ------
        StorageError, TrainingError
            When the home refuses, or a row does not fit its codec.
        """

    @abstractmethod
    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        """The part of a move that writes slots.

        Raises
        ------
        TrainingError
            When a row does not fit its codec; some rows are then neither here nor there.
        """

    @abstractmethod
    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        """Rows as they lie at home into slots of `memory`; changes nothing else."""

    @property
    def nbytes(self) -> int:
        """Bytes of buffers."""
        return 0

    def put(self, rows: Indices, source: FloatRows, places: Indices, write: int) -> None:
        """Write rows `places` of `source` straight into the store."""
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
        """Records, or the initial values of rows that have none, into slots of `memory`."""
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
    """Where the store's records are memory: a victim's record is written, and its slot's next row read, in one pass."""

    @property
    def _array(self) -> Records:
        # Asked for each time: whoever kept it would keep a closed store's memory.
        array = self.store.array
        assert array is not None
        return array

    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        """See `Mover.prepare`."""
        if not staging.released.any():
            return None
        # Before `finish`: another row may come into a slot of the overflow area that one of these left.
        moves = kernel.released(self._directory.layout, staging, self._directory.workspace)
        self._encode(moves, self._array, moves.rows, write)
        self.store.mark_written(moves.rows)
        return None

    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        """See `Mover.finish`."""
        layout, workspace, bits = self._directory.layout, self._directory.workspace, self.store.bits
        assert bits is not None
        refused = self.memory.swap(layout, staging, workspace, self.codec, (self._array, *bits), write)
        if refused is not None:
            raise self._unfit(*refused)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        """See `Mover.copy`."""
        self._place(Fetched(moves, self._array, self.store.written(moves.rows)), moves.rows, memory)


class StoredHome(Mover):
    """Where records pass through a buffer, which grows to the largest batch met."""

    def __init__(
        self, names: Sequence[str], directory: Directory, codec: RecordCodec, store: RecordStore, memory: SlotMemory
    ) -> None:
        super().__init__(names, directory, codec, store, memory)
        self._records = np.zeros((0, codec.record_bytes), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """See `Mover.nbytes`."""
        return self._records.nbytes

    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        """See `Mover.prepare`."""
        outgoing, incoming = kernel.moves(self._directory.layout, staging, self._directory.workspace)
        if len(outgoing):
            records = self._buffer(len(outgoing))
            self._encode(outgoing, records, np.arange(len(outgoing), dtype=np.int64), write)
            self.store.write(outgoing.rows, records)
        # All that go out first: they share the buffer with those that come in.
        return self._fetch(incoming, self._buffer(len(incoming))) if len(incoming) else None

    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        """See `Mover.finish`."""
        if fetched is not None:
            self._place(fetched, np.arange(len(fetched.incoming), dtype=np.int64), self.memory)

    def copy(self, moves: kernel.Moves, memory: SlotMemory) -> None:
        """See `Mover.copy`."""
        # Not the buffer that is kept: whoever reads more than a batch does not make it larger.
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
    """The mover that store and memory need; parameters as those of `Mover`."""
    addressable = memory.addresses_host and store.array is not None and store.bits is not None
    kind = AddressableHome if addressable else StoredHome
    return kind(names, directory, codec, store, memory)
