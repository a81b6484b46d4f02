"""Tables that are completely in level 0: a slot is a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig
from stratarec.embedding.optimizers import StepClock
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.memory import StagedBags
from stratarec.embedding.stores.arrays import allocate_bits, clear_bits, row_chunks, set_rows
from stratarec.embedding.stores.row_files import DeltaChain
from stratarec.embedding.tables.base import BatchStamp, TableGroup, TableNumbers
from stratarec.errors import TrainingError
from stratarec.io.atomic import make_directory
from stratarec.kernels.bags import BagBatch, first_outside, mark_rows
from stratarec.kernels.bit_rows import set_bits
from stratarec.kernels.random import table_key
from stratarec.progress import traced


class ResidentTables(TableGroup):
    """Tables in which every row has its own slot, in float32.

    Initial weights are uniform in +-bound, a function of (seed, table name, row of the complete
    table).

    Parameters
    ----------
    configs, columns, step_clock
        As for `TableGroup`.
    seed : int
        Seed of the initial weights.
    level0 : Level0
        Allocates the slots.
    """

    resident = True

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        step_clock: StepClock,
        seed: int,
        level0: Level0,
    ) -> None:
        rows = [table.num_embeddings for table in configs]
        first = np.cumsum([0, *rows]).tolist()
        memory = level0.slots(first[-1], configs[0].embedding_dim, step_clock.optimizer)
        super().__init__(configs, columns, memory, first[:-1], rows, step_clock)
        self.codec = RecordCodec.of(CodecConfig(), memory.width, step_clock.optimizer)
        self._changed = allocate_bits(self.rows)
        self._trained = allocate_bits(self.rows)
        self._chain = DeltaChain()
        self._seed = seed
        self._numbers = TableNumbers(rows)
        self._viewed = False
        self._fresh = True
        self._initialize()

    def _initialize(self) -> None:
        for table in self.configs:
            begin = self.first_row[table.name]
            self.memory.fill(begin, begin + table.num_embeddings, table_key(self._seed, table.name), table)

    def _mark_trained(self) -> None:
        """Mark in `_trained` the rows that differ from their initial values.

        If every change is recorded in `_changed`, its marks are added. Otherwise each row is
        compared.
        """
        if not self._viewed and (self._chain.started or self.step_clock.optimizer.clocked):
            np.bitwise_or(self._trained, self._changed, out=self._trained)
            return
        for table in self.configs:
            begin, key = self.first_row[table.name], table_key(self._seed, table.name)
            for rows in row_chunks(table.num_embeddings):
                first = int(rows[0])
                trained = self.memory.trained(begin + first, begin + first + len(rows), key, table, first)
                set_bits(self._trained, begin + first + trained)

    @traced("stage")
    def stage(self, bags: BagBatch, out: NDArray[np.int32], stamp: BatchStamp) -> StagedBags:
        """Check the ids and stage the bags. Ids are slots, so nothing is fetched; `out` and `stamp`
        are not used.
        """
        return self._stage(bags)

    def _stage(self, bags: BagBatch) -> StagedBags:
        self.check_id(bags, first_outside(self.layout, bags))
        return self.memory.stage(self.layout, bags)

    def read(self, bags: BagBatch, out: Tensor) -> list[Tensor]:
        packed = self.memory.pack((self._stage(bags),))
        # Applying missed steps is not a change: the last checkpoint has the same row at an earlier
        # step.
        self.apply_missed_steps(packed.staged[0])
        self._fresh = self._fresh and not self.step_clock.optimizer.clocked
        return self._pool_once(packed, out)

    def mark_trained(self, staged: StagedBags) -> None:
        self._fresh = False
        # Marking takes time in every step, so it begins after the first checkpoint, which compares
        # rows with their initial values instead. Rows with clocks are marked from the start,
        # because reading changes them too.
        if self._chain.started or self.step_clock.optimizer.clocked:
            mark_rows(self.layout, staged.bags, self._changed)

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return views of rows ``first:last`` of the table `name`."""
        # A view can be written at any time without notice: from now on every checkpoint has all
        # rows.
        self._viewed = True
        self._fresh = False
        first, last = self.first_row[name] + first, self.first_row[name] + last
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps_to_range(first, last, missed)
        return self.memory.views(first, last)

    def write_rows(self, rows: Indices, source: FloatRows, places: Indices, batch_number: int) -> None:
        self.memory.write(rows, source, places)
        self._fresh = False
        set_bits(self._changed, rows)

    def read_rows(self, rows: Indices) -> FloatRows:
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps_to_range(0, self.rows, missed)
        return self.memory.read(rows)

    def save(self, directory: Path, previous: Path | None, oldest_stamp: int) -> dict[str, Any]:
        """Write the trained rows. Rows that were never trained are left out: they are computed from
        their numbers.
        """
        home = directory / "home"
        make_directory(home)
        self._mark_trained()
        files = self._chain.save(
            home,
            None if previous is None or self._viewed else previous / "home",
            _Records(self, self._numbers),
            lambda: map(self._numbers.to_files, set_rows(self._trained)),
            lambda: map(self._numbers.to_files, set_rows(self._changed)),
        )
        clear_bits(self._changed)
        record = self.codec.record_bytes
        return {
            "home": {
                "format": 1,
                "layout": "tables",
                "rows": self.rows,
                "record_bytes": record,
                "files": files,
            }
        }

    def reset(self) -> None:
        self.memory.clear_state()
        self._initialize()
        for bits in (self._trained, self._changed):
            clear_bits(bits)
        self._chain = DeltaChain()
        self._fresh = True

    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        files = manifest["home"]["files"]
        self._chain.verify(directory / "home", files)
        if not self._fresh:  # rows that the checkpoint lacks have their initial values
            self.reset()
        self._fresh = False
        for numbers in self._chain.load(directory / "home", files, _Records(self, self._numbers)):
            set_bits(self._trained, self._numbers.to_group(numbers))

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        return "cache" not in manifest

    @property
    def grows(self) -> bool:
        """True: files number the rows of each table separately."""
        return True

    def shift(self, by: int) -> None:
        """Do nothing: resident rows have no stamps."""

    def close(self) -> None:
        """Do nothing: memory is released with its last view."""

    @property
    def nbytes(self) -> dict[str, int]:
        return {"level0": self.memory.nbytes, "metadata": self._changed.nbytes + self._trained.nbytes}


class _Records:
    """Array of float32 records, indexed by the numbers that rows have in files; read and written in
    pieces.
    """

    def __init__(self, tables: ResidentTables, numbers: TableNumbers) -> None:
        self._memory = tables.memory
        self._width = tables.width
        layout = tables.codec.layout
        self._numbers = numbers
        self.shape = (numbers.end, layout.record_bytes)
        self._floats = layout.clock_at
        self._state_shape = layout.state_shape

    def __getitem__(self, numbers: Indices, /) -> NDArray[np.uint8]:
        rows = self._numbers.to_group(numbers)
        # NumPy copies as fast as the codec's kernels do, and needs no compilation, which takes
        # seconds.
        records = self._memory.read(rows).to_records().reshape(len(rows), self.shape[1])
        floats = records[:, : self._floats].view(np.float32)
        if not np.isfinite(floats).all():
            bad = rows[~np.isfinite(floats).all(axis=1)][0]
            raise TrainingError(f"row {bad} of the tables of width {self._width} is not finite")
        return records

    def __setitem__(self, numbers: Indices, records: NDArray[np.uint8], /) -> None:
        rows = self._numbers.to_group(numbers)
        decoded = FloatRows.allocate(len(rows), self._width, **self._state_shape)
        decoded.load_records(records)
        self._memory.write(rows, decoded, np.arange(len(rows), dtype=np.int64))
