"""Which row is in which slot: tags, stamps and the policy. It decides what moves, and moves nothing.

A cache is set-associative for each table, with a tag and a stamp of 4 bytes a slot. A row is in its slot or in its
record, never in both: what is resident was brought in to be trained and goes home when its slot is needed, so there is
no dirty bit. One set in sixteen is an overflow area under another hash, for rows whose own set is full of rows in use.
Hot rows have slots of their own behind all caches of the group: two comparisons tell whether an id is hot, and its slot
follows from it, so they need neither tag nor stamp.
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

MOST_ROWS = 2**31 - 2
"""A tag is a row's number plus one in an int32."""
_CHUNK_SLOTS = 1 << 19


class Directory:
    """The slots of a group of tables and what they hold.

    Parameters
    ----------
    configs : sequence of EmbeddingBagConfig
        The tables, in the order of their rows in the group.
    tiers : mapping of str to TableTier
        Cache size of each.
    policy, ways : str, int
        As in `TierConfig`.
    seed : int
        Of initial weights and noise.

    Raises
    ------
    ConfigError
        For a table of more rows, or a cache of more slots, than tags and slot numbers can tell apart.
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
        # Tables lie one behind the other, each with its sets and then its overflow sets.
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
        """What decides where rows may lie, as JSON."""
        layout = self.layout
        sets = [[int(own), int(extra)] for own, extra in zip(layout.sets, layout.overflow_sets, strict=True)]
        found = {"ways": layout.ways, "policy": layout.policy, "sets": sets}
        if layout.hot is not None:
            found["hot"] = layout.hot.rows.tolist()
        return found

    @property
    def slots(self) -> int:
        """All of them: those of hot rows lie behind the others."""
        return int(self.layout.hot_slots.start[-1])

    @property
    def hot_slots(self) -> Indices:
        """The slots of hot rows, in order."""
        return np.arange(self.layout.slots, self.slots, dtype=np.int64)

    def locate_hot(self, rows: Indices) -> Indices:
        """The slot of each row of the group that is hot, or -1."""
        tables = self.tables_of(rows)
        return self.layout.hot_slots.locate(tables, rows - self.layout.first_row[tables])

    def assign(
        self, group: GroupLayout, bags: BagBatch, out: NDArray[np.int32], stamp: int, horizon: int
    ) -> kernel.Staging:
        """Give every id of a batch a slot and say what must move for it; `undo` takes it back.

        Parameters
        ----------
        out : ndarray
            ``[N]`` int32: gets the slots, relative to their table's first; -1 where there is no room.
        stamp, horizon : int
            As in `BatchStamp`.
        """
        return kernel.stage(
            group, self.layout, self.state, bags, out, batch=stamp, horizon=horizon, workspace=self.workspace
        )  # fmt: skip

    def undo(self, staging: kernel.Staging) -> None:
        """Take `assign` back, before anything has moved."""
        kernel.undo(self.state, staging, self.workspace)

    def locate(self, rows: Indices) -> Indices:
        """The slot of each row of the group, or -1 where it is at home."""
        tables = self.tables_of(rows)
        return kernel.locate(self.layout, self.state, tables, rows - self.layout.first_row[tables])

    def moves_of(self, rows: Indices, slots: Indices) -> kernel.Moves:
        """Rows of the group and the slots that they are to come into."""
        tables = self.tables_of(rows)
        keys = kernel.row_keys(self.layout, tables, rows - self.layout.first_row[tables])
        return kernel.Moves(rows=rows, slots=slots, tables=tables, keys=keys)

    def tables_of(self, rows: Indices) -> NDArray[np.int32]:
        """The table of each row of the group."""
        return (np.searchsorted(self.layout.first_row, rows, side="right") - 1).astype(np.int32)

    # Stamps and tags at rest

    def used(self) -> Iterator[Indices]:
        """Slots that hold a row, ascending, in chunks."""
        yield from self._slots_where(self.state.tags, 1)
        yield from self._hot_chunks()

    def stamped_since(self, stamp: int) -> Iterator[Indices]:
        """Slots that were used or emptied at `stamp` or later, ascending, in chunks; hot ones are not stamped, and all
        taken to be."""
        yield from self._slots_where(self.state.stamps, stamp)
        yield from self._hot_chunks()

    def _hot_chunks(self) -> Iterator[Indices]:
        for first in range(self.layout.slots, self.slots, _CHUNK_SLOTS):
            yield np.arange(first, min(first + _CHUNK_SLOTS, self.slots), dtype=np.int64)

    def _slots_where(self, values: NDArray[np.int32], least: int) -> Iterator[Indices]:
        for first in range(0, self.layout.slots, _CHUNK_SLOTS):
            chunk = values[first : min(first + _CHUNK_SLOTS, self.layout.slots)]
            found = np.flatnonzero(chunk >= least)
            if len(found):
                yield found + first

    def rows_in(self, slots: Indices) -> Indices:
        """The group's row in each slot, or -1."""
        found = np.empty(len(slots), dtype=np.int64)
        hot = slots >= self.layout.slots
        tables, ids = self.layout.hot_slots.rows_in(slots[hot])
        found[hot] = self.layout.first_row[tables] + ids
        # Slots of caches only: hot ones lie behind the last table's and would be taken for its own.
        tables = np.searchsorted(self.layout.slot_start, slots[~hot], side="right") - 1
        tags = self.state.tags[slots[~hot]].astype(np.int64)
        found[~hot] = np.where(tags > 0, self.layout.first_row[tables] + tags - 1, -1)
        return found

    def stamps_in(self, slots: Indices) -> NDArray[np.int32]:
        """The stamp of each slot; -1 of hot ones."""
        return self._noted(self.state.stamps, slots, np.int32(-1))

    def counts_in(self, slots: Indices) -> NDArray[np.uint32]:
        """How often each slot's row was used; 0 where the policy does not count, and of hot rows."""
        if len(self.state.counts) > 1:
            return self._noted(self.state.counts, slots, np.uint32(0))
        return np.zeros(len(slots), dtype=np.uint32)

    def _noted(self, values: NDArray[Any], slots: Indices, hot: np.generic) -> NDArray[Any]:
        # `where` reads both sides, so hot slots must point at something.
        last = max(self.layout.slots - 1, 0)
        return np.where(slots < self.layout.slots, values[np.minimum(slots, last)], hot)

    def clear(self) -> None:
        """Empty every slot."""
        self.state = kernel.CacheState.empty(self.layout)

    def adopt(
        self, slots: Indices, rows: Indices, stamps: NDArray[np.int32], counts: NDArray[np.uint32]
    ) -> None:  # fmt: skip
        """Let slots hold the group's rows `rows` (-1: none) with these stamps and counts."""
        state, layout = self.state, self.layout
        hot = slots >= layout.slots
        if (self.rows_in(slots[hot]) != rows[hot]).any():
            raise CheckpointError("hot slots hold other rows than their own; use another checkpoint")
        slots, rows, stamps, counts = slots[~hot], rows[~hot], stamps[~hot], counts[~hot]
        tables = np.searchsorted(layout.slot_start, slots, side="right") - 1
        # A tag is 32 bits: what is of another table would become a row of this one.
        stray = (rows >= 0) & ((rows < layout.first_row[tables]) | (rows >= (layout.first_row + layout.rows)[tables]))
        if (rows < -1).any() or stray.any():
            raise CheckpointError("slots hold rows of other tables than their own; use another checkpoint")
        state.tags[slots] = np.where(rows < 0, 0, rows - layout.first_row[tables] + 1).astype(np.int32)
        state.stamps[slots] = stamps
        if len(state.counts) > 1:
            state.counts[slots] = counts
        overflow_start = layout.slot_start[:-1] + layout.sets * layout.ways
        # A look-up goes only so far into the overflow area as rows may lie there; which of them do is not known here.
        spilled = np.unique(tables[(slots >= overflow_start[tables]) & (rows >= 0)])
        state.reach[spilled] = np.minimum(layout.overflow_sets, kernel.PROBES)[spilled]

    def fault(self, stamp: int) -> str:
        """What is wrong with slots that were adopted, where the clock is at `stamp`; empty when nothing is."""
        if len(self.state.stamps) and (self.state.stamps.min() < -1 or self.state.stamps.max() > stamp):
            return f"stamps of {self.state.stamps.min()} to {self.state.stamps.max()}, expected -1 to {stamp}"
        for slots in self.used():
            if (self.locate(self.rows_in(slots)) != slots).any():
                return "a row lies in two slots, or in one of another set"
        return ""

    def shift(self, by: int) -> None:
        """Count stamps from `by` on; what is older is all the same age."""
        stamps = self.state.stamps
        # First raised, then lowered: in 32 bits the oldest would come out as the newest.
        np.maximum(stamps, by - 1, out=stamps)
        stamps -= np.int32(by)


def _check_size(table: EmbeddingBagConfig, slots: int, hot: int) -> None:
    if hot > table.num_embeddings:
        raise ConfigError(f"table {table.name!r}: {hot:,} rows are to be hot, and it has {table.num_embeddings:,}")
    if table.num_embeddings > MOST_ROWS:
        raise ConfigError(
            f"table {table.name!r} has {table.num_embeddings:,} rows; under a cache a table has at most {MOST_ROWS:,}: "
            "split it into several tables, or leave it out of the tiers to have it whole in level 0"
        )
    if slots > MOST_ROWS:
        raise ConfigError(f"table {table.name!r}: cache_rows is {slots:,}, expected at most {MOST_ROWS:,}")
