"""Tables whose rows are stored in a home and pass through the slots of a cache.

A row is always in exactly one place, its slot or its record, so a step never reads a stale copy.
Every row in a slot was fetched to be trained, so every evicted row is written back. Hot rows have
permanent slots, and their records are never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.codecs import FloatRows, Indices, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.homes import HOMES
from stratarec.embedding.lookup_engine import Health
from stratarec.embedding.optimizers import StepClock
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.memory import SlotMemory, StagedBags
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.tables.base import BatchStamp, TableGroup
from stratarec.embedding.tables.cache import Directory, SlotRecords, mover_of
from stratarec.embedding.tiers import slots_for_batch
from stratarec.errors import StrataError, TrainingError
from stratarec.io.atomic import make_directory
from stratarec.kernels.bags import BagBatch
from stratarec.progress import traced


class CachedTables(TableGroup):
    """Tables under a cache.

    Parameters
    ----------
    configs, columns, step_clock
        As for `TableGroup`.
    directory : Directory
        Directory of the same tables.
    codec : RecordCodec
        Codec of the rows at home.
    store : RecordStore
        Has as many rows as all tables together and the codec's record size.
    health : Health
        Set to failed if a move can be neither finished nor undone.
    level0 : Level0
        Allocates the slots.
    """

    resident = False

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        directory: Directory,
        codec: RecordCodec,
        store: RecordStore,
        step_clock: StepClock,
        health: Health,
        level0: Level0,
    ) -> None:
        start = directory.layout.slot_start
        memory = level0.slots(directory.slots, codec.width, step_clock.optimizer)
        # Kernels count a table's slots from its first one: slots of hot rows come after the caches.
        ends = start[1:] if directory.layout.hot is None else directory.layout.hot.start[1:]
        super().__init__(
            configs, columns, memory, start[:-1].tolist(), (ends - start[:-1]).tolist(), step_clock
        )
        self.codec = codec
        self.store = store
        self.directory = directory
        self.health = health
        self.mover = mover_of([table.name for table in configs], directory, codec, store, memory)
        self._slots = SlotRecords(directory, memory, codec.exact())
        # Locked while rows move, and while rows are read in place.
        self._moving = Lock()
        self._initialize_hot()

    def _initialize_hot(self) -> None:
        hot, directory = self.directory.hot_slots, self.directory
        if len(hot):
            moves = directory.moves_of(directory.rows_in(hot), hot)
            self.memory.initialize(directory.layout, moves, np.ones(len(hot), bool))

    @traced("stage")
    def stage(self, bags: BagBatch, out: NDArray[np.int32], stamp: BatchStamp) -> StagedBags:
        fetched = np.zeros(len(self.configs), dtype=np.int64)
        stuck = self._bring_in(bags, out, stamp, stamp.horizon, fetched)
        if stuck >= 0 and stamp.horizon < stamp.value:
            # Rows that were fetched so far stay: they are needed, and the second pass finds them in
            # their slots.
            stamp.make_room()
            stuck = self._bring_in(bags, out, stamp, stamp.value, fetched)
        if stuck >= 0:
            raise TrainingError(self._too_small(bags, stuck))
        if stamp.number % self.traffic.every == 0:
            self.traffic.add_sample(np.array([self._distinct(bags, out), fetched]))
        return self.memory.stage(self.layout, replace(bags, values=out))

    def mark_trained(self, staged: StagedBags) -> None:
        """Do nothing: the stamps of slots show which rows changed."""

    def _distinct(self, bags: BagBatch, slots: NDArray[np.int32]) -> list[int]:
        """Count the distinct rows of a batch in each table's cache; hot rows are not in it."""
        spans = [slots[slice(*bags.span(feature))] for feature in range(len(self.features))]
        ends, starts = self.layout.table_start.tolist(), self.directory.layout.slot_start
        distinct = [np.unique(np.concatenate(spans[first:last])) for first, last in pairwise(ends)]
        return [
            int(np.count_nonzero(used < starts[-1] - start))
            for used, start in zip(distinct, starts, strict=False)
        ]

    def _bring_in(
        self,
        bags: BagBatch,
        out: NDArray[np.int32],
        stamp: BatchStamp,
        horizon: int,
        counts: NDArray[np.int64],
    ) -> int:
        """Fetch the batch's rows as far as there is room, and add their numbers to `counts`.

        Returns a table without room, or -1.
        """
        with self._moving, self.health.changing("bringing rows into level 0"):
            self.health.require()
            staging = self.directory.assign(self.layout, bags, out, stamp.value, horizon)
            try:
                self.check_id(bags, staging.bad)
                fetched = self.mover.begin(staging, stamp.number)
            except StrataError:
                self.directory.undo(staging)
                raise
            try:
                self.mover.finish(staging, fetched, stamp.number)
            except StrataError as error:
                self.health.fail(str(error))
                raise
        counts += staging.rows_in
        self.traffic.rows_in += int(staging.rows_in.sum())
        self.traffic.rows_out += staging.rows_out
        return int(staging.stuck.argmax()) if staging.stuck.any() else -1

    def _too_small(self, bags: BagBatch, table: int) -> str:
        group, slot_start = self.layout, self.directory.layout.slot_start
        features = group.table_features[group.table_start[table] : group.table_start[table + 1]]
        spans = [bags.values[slice(*bags.span(int(feature)))] for feature in features]
        rows = np.unique(np.concatenate(spans)) + self.first_row[self.configs[table].name]
        distinct = int(np.count_nonzero(self.directory.locate_hot(rows) < 0))
        slots = int(slot_start[table + 1] - slot_start[table])
        ways = self.directory.layout.ways
        needed = max(slots_for_batch(distinct, ways), slots + slots // 4)
        size = needed * (self.memory.nbytes // self.memory.slots) / 2**20
        return (
            f"table {self.configs[table].name!r}: a batch with {distinct:,} distinct rows does not fit "
            "into its cache "
            f"of {slots:,} slots, because rows are assigned to sets of {ways} slots by hash; {needed:,} "
            f"slots ({size:.1f} MiB) hold such a batch: set a larger memory.cache.fraction (cache_rows), "
            "more memory.cache.ways, or a smaller train.batch_size"
        )

    # Reading

    def read(self, bags: BagBatch, out: Tensor) -> list[Tensor]:
        spans = [bags.span(feature) for feature in range(len(self.features))]
        rows = [self._rows_of(feature, bags) for feature in range(len(self.features))]
        distinct, place = np.unique(np.concatenate(rows), return_inverse=True)
        values = np.empty(len(bags.values), dtype=np.int64)
        for (first, last), part in zip(
            spans, np.split(place, np.cumsum([len(part) for part in rows])), strict=False
        ):
            values[first:last] = part
        zeros = np.zeros_like(self.layout.base)
        layout = replace(self.layout, base=zeros, rows=zeros + max(len(distinct), 1))
        memory = self.copy(distinct)
        return self._pool_once(
            memory.pack((memory.stage(layout, replace(bags, values=values)),)), out, memory
        )

    def _rows_of(self, feature: int, bags: BagBatch) -> Indices:
        """Check a feature's ids and return their rows in the group."""
        table, (first, last) = self.features[feature][0], bags.span(feature)
        ids = bags.values[first:last]
        outside = (ids < 0) | (ids >= table.num_embeddings)
        if outside.any():
            self.check_id(bags, first + int(outside.argmax()))
        rows: Indices = ids.astype(np.int64) + self.first_row[table.name]
        return rows

    def copy(self, rows: Indices) -> SlotMemory:
        """Copy distinct `rows` of the group (``[n]`` int64) into n new slots, all steps applied.

        The cache and the home do not change.
        """
        copies = self.memory.like(len(rows))
        with self._moving:
            self.health.require()
            slots = self.directory.locate(rows)
            resident, at_home = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
            copies.copy_from(resident, self.memory, slots[resident])
            # Rows at home stay there: evaluation moves nothing.
            if len(at_home):
                self.mover.copy(self.directory.moves_of(rows[at_home], at_home), copies)
        missed = self.step_clock.missed
        if missed is not None:
            copies.apply_missed_steps_to_range(0, len(rows), missed)
        return copies

    def part(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return copies of rows ``first:last`` of the table `name`, all steps applied."""
        start = self.first_row[name]
        return self.copy(np.arange(start + first, start + last, dtype=np.int64)).views(0, last - first)

    def read_records(self, name: str, first: int, last: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return the records of rows ``first:last`` of the table `name`, and whether each record is
        current.

        Returns
        -------
        records : ndarray
            ``[n, record_bytes]`` uint8.
        current : ndarray
            ``[n]`` bool.

        Notes
        -----
        The record of a row that is in a slot, missed steps or was never trained is not current and
        has no meaning.
        """
        rows = np.arange(self.first_row[name] + first, self.first_row[name] + last, dtype=np.int64)
        records = np.zeros((len(rows), self.codec.record_bytes), dtype=np.uint8)
        with self._moving:
            self.health.require()
            current = self.store.read(rows, records) & (self.directory.locate(rows) < 0)
        if self.codec.layout.clock:
            clocks = np.ascontiguousarray(records[:, self.codec.layout.clock_at :]).view(np.int32)[:, 0]
            current &= clocks == self.step_clock.step
        return records, current

    def rows_in_slots(self, name: str, first: int, last: int) -> Indices:
        """Return the rows among ``first:last`` of table `name` that are in a slot, ascending."""
        rows = np.arange(self.first_row[name] + first, self.first_row[name] + last, dtype=np.int64)
        return first + np.flatnonzero(self.directory.locate(rows) >= 0)

    def write_rows(self, rows: Indices, source: FloatRows, places: Indices, batch_number: int) -> None:
        """Overwrite rows of the group in their slots, or else in the store. The base class
        describes the arguments.
        """
        slots = self.directory.locate(rows)
        resident = slots >= 0
        self.memory.write(slots[resident], source, places[resident])
        self.mover.write_rows(rows[~resident], source, places[~resident], batch_number)

    def write_records(self, rows: Indices, records: NDArray[np.uint8]) -> None:
        """Overwrite rows that are in no slot with encoded records that missed no step.

        Parameters
        ----------
        rows : ndarray
            ``[n]`` int64 rows of the group.
        records : ndarray
            ``[n, record_bytes]`` uint8; their clocks are set to 0.
        """
        if self.codec.layout.clock:
            at = self.codec.layout.clock_at
            records[:, at : at + 4] = 0
        self.store.write(rows, records)

    def read_rows(self, rows: Indices) -> FloatRows:
        return self.copy(rows).read(np.arange(len(rows), dtype=np.int64))

    # Checkpoints

    def save(self, directory: Path, previous: Path | None, oldest_stamp: int) -> dict[str, Any]:
        home = directory / "home"
        make_directory(home)
        with self._moving:
            manifest = self.store.checkpoint(home, None if previous is None else previous / "home")
            slots = self._slots.save(directory, previous, oldest_stamp)
        return {"home": manifest, "cache": self.directory.shape, "slots": slots}

    def reset(self) -> None:
        with self._moving:
            self.store.clear()
            self.directory.clear()
            self.memory.clear_state()
            self._slots = SlotRecords(self.directory, self.memory, self.codec.exact())
            self._initialize_hot()

    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        with self._moving:
            self.store.restore(directory / "home", manifest["home"])
            self.directory.clear()
            self._slots.restore(directory, manifest["slots"], stamp)

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        same_home = HOMES[self.store.kind].layout == manifest["home"].get("layout")
        # The rows and stamps in slots are independent of the policy.
        cache = {**(manifest.get("cache") or {}), "policy": self.directory.layout.policy}
        return same_home and cache == self.directory.shape

    # Clocks and resources

    def shift(self, by: int) -> None:
        with self._moving:
            self.directory.shift(by)
            self._slots.shift(by)

    @property
    def nbytes(self) -> dict[str, int]:
        home, lists = self.store.memory(), self.directory.workspace.arrays.values()
        return {
            "level0": self.memory.nbytes,
            "metadata": self.directory.state.nbytes,
            "home_dram": home.dram_bytes,
            "home_block": home.block_bytes,
            "home_hbm": home.device_bytes,
            "staging": self.mover.nbytes + sum(array.nbytes for array in lists),
        }

    @property
    def file_memory(self) -> str:
        return HOMES[self.store.kind].memory

    def close(self) -> None:
        with self._moving:
            self.store.close()
