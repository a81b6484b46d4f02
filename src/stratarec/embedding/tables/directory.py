"""The directory of a cache: which row is in which slot, and which rows a batch must move. It moves nothing itself.

The cache of each table is set-associative, with a tag and a stamp of 4 bytes per slot. A row is in its slot or in its
record, never in both: a resident row was fetched to be trained and is written back when its slot is needed, so there is
no dirty bit. One set in sixteen belongs to an overflow area with another hash, for rows whose own set is full of rows
in use. Hot rows have permanent slots after all caches of the group. Two comparisons show whether an id is hot, and its
slot follows from the id, so hot rows need neither tag nor stamp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.codecs import Indices
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.tiers import TableTier, cache_sets
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels import cache as kernel
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.random import RowNoise, table_key

MAX_ROWS = 2**31 - 2
"""A tag is a row's number plus one in an int32."""
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
        For a table with more rows, or a cache with more slots, than tags and slot numbers can address.
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
        shapes = np.array([cache_sets(tiers[table.name].cache_rows, ways) for table in configs], dtype=np.int64)
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
        """Parameters that determine the possible slots of each row, as JSON."""
        layout = self.layout
        sets = [
            [int(regular), int(overflow)] for regular, overflow in zip(layout.sets, layout.overflow_sets, strict=True)
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
        """Return the slot of each row of the group that is hot, or -1."""
        tables = self.tables_of(rows)
        return self.layout.hot_slots.locate(tables, rows - self.layout.first_row[tables])

    def assign(
        self, group: GroupLayout, bags: BagBatch, out: NDArray[np.int32], stamp: int, horizon: int
    ) -> kernel.Staging:
        """Assign a slot to every id of a batch and list the moves that this requires; `undo` reverts it.

        Parameters
        ----------
        out : ndarray
            ``[N]`` int32: receives the slots, relative to their table's first; -1 if there is no room.
        stamp, horizon : int
            As `value` and `horizon` of `BatchStamp`.
        """
        return kernel.stage(
            group, self.layout, self.state, bags, out, batch=stamp, horizon=horizon, workspace=self.workspace
        )  # fmt: skip

    def undo(self, staging: kernel.Staging) -> None:
        """Revert `assign`, before anything has moved."""
        kernel.undo(self.state, staging, self.workspace)

    def locate(self, rows: Indices) -> Indices:
        """Return the slot of each row of the group, or -1 if it is at home."""
        tables = self.tables_of(rows)
        return kernel.locate(self.layout, self.state, tables, rows - self.layout.first_row[tables])

    def moves_of(self, rows: Indices, slots: Indices) -> kernel.Moves:
        """Return the moves of rows of the group into `slots`."""
        tables = self.tables_of(rows)
        keys = kernel.row_keys(self.layout, tables, rows - self.layout.first_row[tables])
        return kernel.Moves(rows=rows, slots=slots, tables=tables, keys=keys)

    def tables_of(self, rows: Indices) -> NDArray[np.int32]:
        """Return the table of each row of the group."""
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
        """Return the group's row in each slot, or -1."""
        rows = np.empty(len(slots), dtype=np.int64)
        hot = slots >= self.layout.slots
        tables, ids = self.layout.hot_slots.rows_in(slots[hot])
        rows[hot] = self.layout.first_row[tables] + ids
        # Slots of caches only: hot slots come after those of the last table and would be attributed to it.
        tables = np.searchsorted(self.layout.slot_start, slots[~hot], side="right") - 1
        tags = self.state.tags[slots[~hot]].astype(np.int64)
        rows[~hot] = np.where(tags > 0, self.layout.first_row[tables] + tags - 1, -1)
        return rows

    def stamps_in(self, slots: Indices) -> NDArray[np.int32]:
        """Return the stamp of each slot; -1 for hot slots."""
        return self._values_in(self.state.stamps, slots, np.int32(-1))

    def counts_in(self, slots: Indices) -> NDArray[np.uint32]:
        """Return the use count of each slot's row; 0 for hot rows, and if the policy does not count."""
        if len(self.state.counts) > 1:
            return self._values_in(self.state.counts, slots, np.uint32(0))
        return np.zeros(len(slots), dtype=np.uint32)

    def _values_in(self, values: NDArray[Any], slots: Indices, hot: np.generic) -> NDArray[Any]:
        # `where` evaluates both sides, so hot slots need a valid index.
        last = max(self.layout.slots - 1, 0)
        return np.where(slots < self.layout.slots, values[np.minimum(slots, last)], hot)

    def clear(self) -> None:
        """Empty every slot."""
        self.state = kernel.CacheState.empty(self.layout)

    def set_slots(
        self, slots: Indices, rows: Indices, stamps: NDArray[np.int32], counts: NDArray[np.uint32]
    ) -> None:  # fmt: skip
        """Set the rows of the group (-1: none), stamps and counts of `slots`, read from a checkpoint."""
        state, layout = self.state, self.layout
        hot = slots >= layout.slots
        if (self.rows_in(slots[hot]) != rows[hot]).any():
            raise CheckpointError("hot slots contain rows that do not belong there; use another checkpoint")
        slots, rows, stamps, counts = slots[~hot], rows[~hot], stamps[~hot], counts[~hot]
        tables = np.searchsorted(layout.slot_start, slots, side="right") - 1
        # A tag has 32 bits: a row of another table would become a row of this one.
        stray = (rows >= 0) & ((rows < layout.first_row[tables]) | (rows >= (layout.first_row + layout.rows)[tables]))
        if (rows < -1).any() or stray.any():
            raise CheckpointError("slots contain rows of other tables; use another checkpoint")
        state.tags[slots] = np.where(rows < 0, 0, rows - layout.first_row[tables] + 1).astype(np.int32)
        state.stamps[slots] = stamps
        if len(state.counts) > 1:
            state.counts[slots] = counts
        overflow_start = layout.slot_start[:-1] + layout.sets * layout.ways
        # A lookup searches only as much of the overflow area as may contain rows; the exact extent is not known here.
        spilled = np.unique(tables[(slots >= overflow_start[tables]) & (rows >= 0)])
        state.reach[spilled] = np.minimum(layout.overflow_sets, kernel.PROBES)[spilled]

    def fault(self, stamp: int) -> str:
        """Describe what is wrong with slots from a checkpoint whose clock is at `stamp`; empty if they are valid."""
        if len(self.state.stamps) and (self.state.stamps.min() < -1 or self.state.stamps.max() > stamp):
            return f"stamps of {self.state.stamps.min()} to {self.state.stamps.max()}, expected -1 to {stamp}"
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
            f"table {table.name!r} has {table.num_embeddings:,} rows; a cached table has at most {MAX_ROWS:,}: split "
            "it into several tables, or leave it out of the tiers to keep it in level 0"
        )
    if slots > MAX_ROWS:
        raise ConfigError(f"table {table.name!r}: cache_rows is {slots:,}, expected at most {MAX_ROWS:,}")
