"""Tables that lie whole in level 0: a slot is a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import CodecConfig, FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import StepClock
from stratarec.embedding.slots import Level0, StagedBatch
from stratarec.embedding.stores.arrays import allocate_bits, clear_bits, row_chunks, set_rows
from stratarec.embedding.stores.row_files import Chain
from stratarec.embedding.tables.base import BatchStamp, TableGroup, TableNumbers
from stratarec.errors import TrainingError
from stratarec.io.atomic import make_directory
from stratarec.kernels.bags import BagBatch, first_outside, mark_rows
from stratarec.kernels.bit_rows import set_bits
from stratarec.kernels.random import table_key
from stratarec.kernels.update import Gradients, RowUpdate


class ResidentTables(TableGroup):
    """Tables whose every row is a slot of its own, in float32.

    Initial weights are uniform in +-bound, a function of (seed, table name, row of the whole table).
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
        self._changed, self._trained = allocate_bits(self.rows), allocate_bits(self.rows)
        self._chain, self._seed, self._numbers = Chain(), seed, TableNumbers(rows)
        self._viewed, self._fresh = False, True
        self._initialize()

    def _initialize(self) -> None:
        for table in self.configs:
            begin = self.first_row[table.name]
            self.memory.fill(begin, begin + table.num_embeddings, table_key(self._seed, table.name), table)

    def _mark_trained(self) -> None:
        """Find the rows that are not as they began, or, where all changes are marked, add those."""
        if not self._viewed and (self._chain.started or self.step_clock.optimizer.clocked):
            np.bitwise_or(self._trained, self._changed, out=self._trained)
            return
        for table in self.configs:
            begin, key = self.first_row[table.name], table_key(self._seed, table.name)
            for rows in row_chunks(table.num_embeddings):
                first = int(rows[0])
                found = self.memory.trained(begin + first, begin + first + len(rows), key, table, first)
                set_bits(self._trained, begin + first + found)

    def stage(self, bags: BagBatch, out: NDArray[np.int32], stamp: BatchStamp) -> StagedBatch:
        """Nothing to bring in: ids are slots."""
        return self._stage(bags)

    def _stage(self, bags: BagBatch) -> StagedBatch:
        self.check(bags, first_outside(self.layout, bags))
        return self.memory.stage(self.layout, bags)

    def read(self, bags: BagBatch, out: Tensor) -> list[Tensor]:
        """See `TableGroup.read`."""
        staged = self._stage(bags)
        # A row that catches up is none that changed: its last checkpoint says the same of it.
        self.apply_missed_steps(staged)
        self._fresh = self._fresh and not self.step_clock.optimizer.clocked
        return self.pool(staged, out)

    def update(self, staged: StagedBatch, gradients: Gradients, rule: RowUpdate) -> None:
        """See `TableGroup.update`."""
        super().update(staged, gradients, rule)
        self._fresh = False
        # Marking takes time in every step: the first checkpoint compares rows with what they began with instead. Where
        # rows have clocks that would not do, as reading changes them, too.
        if self._chain.started or self.step_clock.optimizer.clocked:
            mark_rows(self.layout, staged.bags, self._changed)

    def table(self, name: str) -> dict[str, Tensor]:
        """See `TableGroup.table`."""
        # Whoever holds a view may write it at any time, which nothing here would see: from now on all rows are saved.
        self._viewed, self._fresh = True, False
        first = self.first_row[name]
        last = first + next(table.num_embeddings for table in self.configs if table.name == name)
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps_to_range(first, last, missed)
        return self.memory.views(first, last)

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """See `TableGroup.part`; these are views."""
        return {part: view[first:last] for part, view in self.table(name).items()}

    def put(self, rows: Indices, source: FloatRows, places: Indices, write: int) -> None:
        """See `TableGroup.put`."""
        self.memory.write(rows, source, places)
        self._fresh = False
        set_bits(self._changed, rows)

    def take(self, rows: Indices) -> FloatRows:
        """See `TableGroup.take`."""
        missed = self.step_clock.missed
        if missed is not None:
            self.memory.apply_missed_steps_to_range(0, self.rows, missed)
        return self.memory.read(rows)

    def save(self, directory: Path, previous: Path | None, settled: int) -> dict[str, Any]:
        """See `TableGroup.save`. Rows that were never trained are left out: they are functions of their numbers."""
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
        return {"home": {"format": 1, "layout": "tables", "rows": self.rows, "record_bytes": record, "files": files}}

    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        """See `TableGroup.restore`."""
        files = manifest["home"]["files"]
        self._chain.verify(directory / "home", files)
        if not self._fresh:  # rows that the checkpoint lacks are as they began
            self.memory.clear_state()
            self._initialize()
        self._fresh = False
        for bits in (self._trained, self._changed):
            clear_bits(bits)
        for numbers in self._chain.load(directory / "home", files, _Records(self, self._numbers)):
            set_bits(self._trained, self._numbers.to_group(numbers))

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """See `TableGroup.fits`."""
        return "cache" not in manifest

    @property
    def grows(self) -> bool:
        """See `TableGroup.grows`: files number the rows of each table by itself."""
        return True

    def shift(self, by: int) -> None:
        """Nothing to do: rows that never leave have no stamps."""

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the last view of it."""

    @property
    def nbytes(self) -> dict[str, int]:
        """See `TableGroup.nbytes`."""
        return {"level0": self.memory.nbytes, "metadata": self._changed.nbytes + self._trained.nbytes}


class _Records:
    """The slots as float32 records, piece by piece, by their numbers in files."""

    def __init__(self, tables: ResidentTables, numbers: TableNumbers) -> None:
        self._memory, self._width, layout = tables.memory, tables.width, tables.codec.layout
        self._numbers, self.shape, self._floats = numbers, (numbers.end, layout.record_bytes), layout.clock_at
        self._kept = layout.kept

    def __getitem__(self, numbers: Indices, /) -> NDArray[np.uint8]:
        rows = self._numbers.to_group(numbers)
        # Copies, which NumPy makes as fast as the codec's kernels would once they were compiled, which takes seconds.
        records = self._memory.read(rows).to_records().reshape(len(rows), self.shape[1])
        floats = records[:, : self._floats].view(np.float32)
        if not np.isfinite(floats).all():
            bad = rows[~np.isfinite(floats).all(axis=1)][0]
            raise TrainingError(f"row {bad} of the tables of width {self._width} is not finite")
        return records

    def __setitem__(self, numbers: Indices, records: NDArray[np.uint8], /) -> None:
        rows = self._numbers.to_group(numbers)
        decoded = FloatRows.allocate(len(rows), self._width, **self._kept)
        decoded.take_records(records)
        self._memory.write(rows, decoded, np.arange(len(rows), dtype=np.int64))
