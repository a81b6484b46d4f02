"""Takes rows between slots and their home, by what the directory decided.

A move has two parts. What the first does can be taken back: records are written at home and read from there, and no
slot has changed. The second writes slots; whoever is interrupted there has lost rows, and must say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.directory import Directory
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.rows import FloatRows, Indices
from stratarec.embedding.slots import Home, SlotMemory
from stratarec.embedding.stores.base import RecordStore
from stratarec.errors import TrainingError
from stratarec.kernels import cache as kernel


@dataclass(frozen=True)
class Fetched:
    """Rows that are ready to come into slots: their records and whether there is one of each."""

    incoming: kernel.Moves
    records: NDArray[np.uint8]
    present: NDArray[np.bool_]


class Mover:
    """Encodes, stores, reads and decodes the rows of a group.

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
        self._records = np.zeros((0, codec.record_bytes), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of buffers."""
        return self._records.nbytes

    @property
    def _home(self) -> Home | None:
        """The store's own memory, where it can be addressed."""
        array, bits = self.store.array, self.store.bits
        return None if array is None or bits is None else (array, *bits)

    def prepare(self, staging: kernel.Staging, write: int) -> Fetched | None:
        """The part of a move that leaves slots alone; returns what `finish` takes.

        Raises
        ------
        StorageError, TrainingError
            When the home refuses, or a row does not fit its codec.
        """
        layout, workspace = self._directory.layout, self._directory.workspace
        if self._home is not None:
            if staging.released.any():
                self._send(kernel.released(layout, staging, workspace), write)
            return None
        outgoing, incoming = kernel.moves(layout, staging, workspace)
        self._send(outgoing, write)
        return self.fetch(incoming) if len(incoming) else None

    def finish(self, staging: kernel.Staging, fetched: Fetched | None, write: int) -> None:
        """The part of a move that writes slots.

        Raises
        ------
        TrainingError
            When a row does not fit its codec; some rows are then neither here nor there.
        """
        home = self._home
        if home is not None:
            layout, workspace = self._directory.layout, self._directory.workspace
            refused = self.memory.swap(layout, staging, workspace, self.codec, home, write)
            if refused is not None:
                table, row = refused
                raise self._unfit(table, row)
        elif fetched is not None:
            self.place(fetched, self.memory)

    def fetch(self, incoming: kernel.Moves, *, keep_buffer: bool = True) -> Fetched:
        """Read records from home."""
        array, count = self.store.array, len(incoming)
        if array is not None:
            return Fetched(incoming, array, self.store.written(incoming.rows))
        # The buffer that is kept is of a batch: whoever reads more than that does not make it larger.
        records = self._buffer(count) if keep_buffer else np.empty((count, self.codec.record_bytes), np.uint8)
        return Fetched(incoming, records, self.store.read(incoming.rows, records))

    def place(self, fetched: Fetched, memory: SlotMemory) -> None:
        """Records, or the initial values of rows that have none, into slots of `memory`."""
        incoming, count = fetched.incoming, len(fetched.incoming)
        direct = self.store.array is not None
        places = incoming.rows if direct else np.arange(count, dtype=np.int64)
        memory.decode(self.codec, fetched.records, places, incoming.slots)
        if not fetched.present.all():
            memory.initialize(self._directory.layout, incoming, ~fetched.present)

    def put(self, rows: Indices, source: FloatRows, places: Indices, write: int) -> None:
        """Write rows `places` of `source` straight into the store."""
        keys = self._directory.moves_of(rows, places).keys
        records = np.zeros((len(rows), self.codec.record_bytes), dtype=np.uint8)
        bad = self.codec.encode(source, places, records, np.arange(len(rows), dtype=np.int64), keys, write)
        if bad >= 0:
            raise self._unfit_row(int(rows[bad]))
        self.store.write(rows, records)

    def _send(self, moves: kernel.Moves, write: int) -> None:
        """Rows of slots go home."""
        if not len(moves):
            return
        array = self.store.array
        records = self._buffer(len(moves)) if array is None else array
        places = np.arange(len(moves), dtype=np.int64) if array is None else moves.rows
        bad = self.memory.encode(self.codec, moves.slots, records, places, moves.keys, write)
        if bad >= 0:
            raise self._unfit_row(int(moves.rows[bad]))
        if array is None:
            self.store.write(moves.rows, records)
        else:
            self.store.mark_written(moves.rows)

    def _buffer(self, rows: int) -> NDArray[np.uint8]:
        if len(self._records) < rows:
            self._records = np.zeros((rows * 5 // 4, self.codec.record_bytes), dtype=np.uint8)
        return self._records[:rows]

    def _unfit_row(self, group_row: int) -> TrainingError:
        table = int(self._directory.tables_of(np.array([group_row]))[0])
        return self._unfit(table, group_row - int(self._directory.layout.first_row[table]))

    def _unfit(self, table: int, row: int) -> TrainingError:
        return TrainingError(
            f"table {self._names[table]!r}, row {row}: a weight or its optimizer state is not a finite number that "
            f"{self.codec.config.kind} can hold; lower the learning rate or give the table a wider precision"
        )
