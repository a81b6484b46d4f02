"""Level 0 over a home: rows come in when a batch needs them and go home when their slot is needed.

A row is always in exactly one place, its slot or its record, so a step never reads a stale copy. Every resident row
was brought in to be trained, so every victim is written home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.rows import FloatRows
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.rowfile import verify_file
from stratarec.embedding.tiers import TableTier, cache_sets
from stratarec.errors import TrainingError
from stratarec.files import file_hash
from stratarec.kernels import cache as kernel
from stratarec.kernels.embedding import BagBatch, GroupLayout
from stratarec.kernels.random import table_key
from stratarec.kernels.swap import swap
from stratarec.tensors import read_tensors, write_tensors

_RESIDENT = "resident.safetensors"


@dataclass
class CacheTraffic:
    """What staging did so far."""

    rows_in: int = 0
    rows_out: int = 0


class RowCache:
    """The slots of a group of tables, what they hold, and the store under them.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Tables of one width, in the order of the store's rows.
    tiers : mapping of str to TableTier
        Cache size of each.
    store : RecordStore
        With as many rows as all tables together and the codec's record size.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        tiers: Mapping[str, TableTier],
        *,
        policy: str,
        ways: int,
        optimizer: RowOptimizerConfig,
        codec: RecordCodec,
        store: RecordStore,
        seed: int,
    ) -> None:
        self.names = [table.name for table in tables]
        self.codec, self.store = codec, store
        rows = np.array([table.num_embeddings for table in tables], dtype=np.int64)
        shapes = np.array([cache_sets(tiers[name].cache_rows, ways) for name in self.names], dtype=np.int64)
        self.layout = kernel.CacheLayout(
            ways=ways,
            policy=policy,
            rows=rows,
            first_row=np.cumsum(rows) - rows,
            slot_start=np.cumsum([0, *(shapes.sum(axis=1) * ways)]).astype(np.int64),
            sets=shapes[:, 0].copy(),
            overflow_sets=shapes[:, 1].copy(),
            table_key=np.array([table_key(seed, name) for name in self.names], dtype=np.uint64),
            bound=(rows**-0.5).astype(np.float32),
        )
        self._kept = {"row_state": bool(optimizer.row_state), "full_state": bool(optimizer.full_state)}
        self.level0 = FloatRows.allocate(self.layout.slots, codec.width, **self._kept)
        self.state = kernel.CacheState.empty(self.layout)
        self.traffic = CacheTraffic()
        self._workspace = kernel.StageWorkspace()
        self._records = np.zeros((0, codec.record_bytes), dtype=np.uint8)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of every part."""
        home = self.store.memory()
        return {
            "level0": self.level0.nbytes,
            "metadata": self.state.nbytes,
            "home_dram": home.dram_bytes,
            "home_block": home.block_bytes,
            "staging": self._records.nbytes + sum(array.nbytes for array in self._workspace.arrays.values()),
        }

    def stage(
        self,
        group: GroupLayout,
        lookups: BagBatch,
        out: NDArray[np.int32],
        *,
        batch: int,
        horizon: int,
        settle: Callable[[], None],
    ) -> int:
        """Bring the batch's rows into level 0 and write their slots to `out`.

        Parameters
        ----------
        batch : int
            Index of the batch; the noise of a row that goes home now is of this write.
        horizon : int
            Rows that batches from here on use stay.
        settle : callable
            Returns when all earlier batches are done, so that only this batch's own rows must stay; called when they
            do not fit beside those of earlier batches.

        Returns
        -------
        int
            Place of an id outside its table, or -1.

        Raises
        ------
        TrainingError
            When this batch alone needs more slots than a table has, or a row does not fit its codec.
        """
        arguments = (group, self.layout, self.state, lookups, out)
        done = kernel.stage(*arguments, batch=batch, horizon=horizon, workspace=self._workspace)
        try:
            if done.bad < 0 and done.stuck.any():
                settle()
                done = kernel.stage(*arguments, batch=batch, horizon=batch, workspace=self._workspace, before=done)
        finally:
            # A row that was given a slot must be in it, whatever becomes of the batch.
            self._move(done, batch)
        if done.bad < 0 and done.stuck.any():
            raise TrainingError(self._too_small(group, lookups, int(done.stuck.argmax())))
        return done.bad

    def _move(self, staging: kernel.Staging, batch: int) -> None:
        if self.store.array is not None and self.store.bits is not None:
            self._swap(staging, (self.store.array, *self.store.bits), batch)
        else:
            outgoing, incoming = kernel.moves(self.layout, staging, self._workspace)
            self._send_home(outgoing, batch)
            if len(incoming):
                self._load(incoming, self.level0)
        self.traffic.rows_in += int(staging.rows_in.sum())
        self.traffic.rows_out += staging.rows_out

    def _swap(self, staging: kernel.Staging, home: tuple[NDArray[np.uint8], ...], batch: int) -> None:
        if staging.released.any():
            self._send_home(kernel.released(self.layout, staging, self._workspace), batch)
        slots = (self.level0.weights, self.level0.row_state, self.level0.full_state)
        refused = swap(self.layout, staging, self._workspace, self.codec.layout, slots, home, batch)
        if refused is not None:
            table, row = refused
            raise self._unfit(table, int(self.layout.first_row[table]) + row)

    def _too_small(self, group: GroupLayout, lookups: BagBatch, table: int) -> str:
        features = group.table_features[group.table_start[table] : group.table_start[table + 1]]
        spans = [lookups.values[slice(*lookups.span(int(feature)))] for feature in features]
        distinct = len(np.unique(np.concatenate(spans)))
        slots = int(self.layout.slot_start[table + 1] - self.layout.slot_start[table])
        # A quarter more than needed: sets fill unevenly.
        wanted = distinct * 5 // 4
        bytes_wanted = wanted * (self.level0.nbytes // self.layout.slots)
        return (
            f"table {self.names[table]!r}: one batch uses {distinct:,} distinct rows, its cache has {slots:,} slots; "
            f"give it cache_rows of {wanted:,} ({bytes_wanted / 2**20:.1f} MiB) or use smaller batches"
        )

    def _staging(self, rows: int) -> NDArray[np.uint8]:
        if len(self._records) < rows:
            self._records = np.zeros((rows * 5 // 4, self.codec.record_bytes), dtype=np.uint8)
        return self._records[:rows]

    def _send_home(self, moves: kernel.Moves, batch: int) -> None:
        if not len(moves):
            return
        direct = self.store.array is not None
        records = self.store.array if self.store.array is not None else self._staging(len(moves))
        places = moves.rows if direct else np.arange(len(moves), dtype=np.int64)
        bad = self.codec.encode(self.level0, moves.slots, records, places, moves.keys, batch)
        if bad >= 0:
            raise self._unfit(int(moves.tables[bad]), int(moves.rows[bad]))
        if direct:
            self.store.mark_written(moves.rows)
        else:
            self.store.write(moves.rows, records)

    def _unfit(self, table: int, group_row: int) -> TrainingError:
        return TrainingError(
            f"table {self.names[table]!r}, row {group_row - self.layout.first_row[table]}: a weight or its optimizer "
            f"state is not a finite number that {self.codec.config.kind} can hold; lower the learning rate or give the "
            "table a wider precision"
        )

    def _load(self, moves: kernel.Moves, level0: FloatRows) -> None:
        """Records, or the initial values of rows that have none, into slots of `level0`."""
        array = self.store.array
        if array is not None:
            present = self.store.written(moves.rows)
            self.codec.decode(array, moves.rows, level0, moves.slots)
        else:
            # The buffer that is kept is of a batch: whoever reads more than that does not make it larger.
            own = level0 is self.level0
            records = self._staging(len(moves)) if own else np.empty((len(moves), self.codec.record_bytes), np.uint8)
            present = self.store.read(moves.rows, records)
            self.codec.decode(records, np.arange(len(moves), dtype=np.int64), level0, moves.slots)
        if not present.all():
            kernel.initialize(
                self.layout, moves, ~present, level0.weights, level0.row_state, level0.full_state, level0.width,
                **self._kept,
            )  # fmt: skip

    def read(self, rows: NDArray[np.int64]) -> FloatRows:
        """Rows as they are now, wherever they lie; changes nothing.

        Parameters
        ----------
        rows : ndarray
            ``[n]`` int64 rows of the group, distinct.
        """
        tables = (np.searchsorted(self.layout.first_row, rows, side="right") - 1).astype(np.int32)
        ids = rows - self.layout.first_row[tables]
        found = FloatRows.allocate(len(rows), self.level0.width, **self._kept)
        slots = kernel.locate(self.layout, self.state, tables, ids)
        self._copy_resident(slots, found)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            keys = kernel.row_keys(self.layout, tables[absent], ids[absent])
            self._load(kernel.Moves(rows=rows[absent], slots=absent, tables=tables[absent], keys=keys), found)
        return found

    def save(self, directory: Path, previous: Path | None) -> dict[str, Any]:
        """Write records and resident rows into the new directory `directory`; returns the manifest.

        `previous` is where the last call wrote: records that did not change since are linked from there.
        """
        home = directory / "home"
        home.mkdir(parents=True)
        manifest = self.store.checkpoint(home, None if previous is None else previous / "home")
        resident = np.flatnonzero(self.state.tags)
        tables = (np.searchsorted(self.layout.slot_start, resident, side="right") - 1).astype(np.int64)
        parts = {
            "rows": self.layout.first_row[tables] + self.state.tags[resident] - 1,
            "slots": resident,
            "stamps": self.state.stamps[resident],
            **rows_of(self.level0, resident, self.codec),
        }
        if len(self.state.counts) > 1:
            parts["counts"] = self.state.counts[resident].astype(np.int64)
        path = directory / _RESIDENT
        write_tensors(path, {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()})
        return {"home": manifest, "cache": self._shape(), "resident": file_hash(path)}

    def _shape(self) -> dict[str, Any]:
        layout = self.layout
        sets = [[int(own), int(extra)] for own, extra in zip(layout.sets, layout.overflow_sets, strict=True)]
        return {"ways": layout.ways, "policy": layout.policy, "sets": sets}

    def restore(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """Go on exactly where `save` was, which needs a cache of the same shape; see `fits`."""
        self.store.restore(directory / "home", manifest["home"])
        self.state = kernel.CacheState.empty(self.layout)
        parts = read_resident(directory, manifest)
        slots = parts["slots"]
        tables = np.searchsorted(self.layout.slot_start, slots, side="right") - 1
        self.state.tags[slots] = (parts["rows"] - self.layout.first_row[tables] + 1).astype(np.int32)
        self.state.stamps[slots] = parts["stamps"]
        if len(self.state.counts) > 1:
            self.state.counts[slots] = parts["counts"]
        overflow_start = self.layout.slot_start[:-1] + self.layout.sets * self.layout.ways
        spilled = np.unique(tables[slots >= overflow_start[tables]])
        self.state.reach[spilled] = np.minimum(self.layout.overflow_sets, kernel.PROBES)[spilled]
        put_rows(parts, self.level0, slots)

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of a cache of this shape and a store that reads its files."""
        kinds = {"rows": ("dram", "mapped"), "log": ("log",)}
        same_home = self.store.kind in kinds.get(str(manifest["home"].get("layout", "")), ())
        return same_home and manifest["cache"] == self._shape()

    def put(self, rows: NDArray[np.int64], level0: FloatRows, slots: NDArray[np.int64], write: int) -> None:
        """Write rows of the group straight into the store, under an empty cache."""
        tables = (np.searchsorted(self.layout.first_row, rows, side="right") - 1).astype(np.int32)
        keys = kernel.row_keys(self.layout, tables, rows - self.layout.first_row[tables])
        records = np.zeros((len(rows), self.codec.record_bytes), dtype=np.uint8)
        bad = self.codec.encode(level0, slots, records, np.arange(len(rows), dtype=np.int64), keys, write)
        if bad >= 0:
            raise self._unfit(int(tables[bad]), int(rows[bad]))
        self.store.write(rows, records)

    def _copy_resident(self, slots: NDArray[np.int64], found: FloatRows) -> None:
        resident = np.flatnonzero(slots >= 0)
        put_rows(rows_of(self.level0, slots[resident], self.codec), found, resident)


def rows_of(level0: FloatRows, slots: NDArray[np.int64], codec: RecordCodec) -> dict[str, NDArray[Any]]:
    """Weights and state of some slots, by name."""
    parts = {"weights": level0.weights.reshape(-1, level0.width)[slots]}
    if codec.layout.row_state:
        parts["row_state"] = level0.row_state[slots]
    if codec.layout.full_state:
        parts["full_state"] = level0.full_state.reshape(-1, level0.width)[slots]
    return parts


def put_rows(parts: Mapping[str, NDArray[Any]], level0: FloatRows, slots: NDArray[np.int64]) -> None:
    """Weights and state into some slots."""
    level0.weights.reshape(-1, level0.width)[slots] = parts["weights"]
    if "row_state" in parts:
        level0.row_state[slots] = parts["row_state"]
    if "full_state" in parts:
        level0.full_state.reshape(-1, level0.width)[slots] = parts["full_state"]


def read_resident(directory: Path, manifest: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The rows that were in level 0 when a checkpoint was written, with their slots and stamps."""
    path = directory / _RESIDENT
    verify_file(path, manifest["resident"])
    return {name: tensor.numpy() for name, tensor in read_tensors(path).items()}
