"""Which slot of level 0 holds which row: staging a batch brings its rows in and lists what must be moved.

Shapes: T tables of a group, S slots, N ids of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.bags import BagBatch, GroupLayout, lookups_by_table
from stratarec.kernels.cache import cpu
from stratarec.kernels.random import RowNoise
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads, use_torch_threads
from stratarec.kernels.simd.lanes import PADDING

Ints = NDArray[np.int64]

PROBES = cpu.PROBES
POLICIES = {"lru": cpu.LRU, "lfu": cpu.LFU, "rank": cpu.RANK}


@dataclass(frozen=True)
class HotSlots:
    """Rows of each table that have slots for good, behind the slots of all tables; arrays have one entry a table."""

    rows: Ints
    """So many first rows are hot."""
    start: Ints
    """``[T + 1]`` first slot of a table's hot rows, which lie there in their order."""

    @classmethod
    def of(cls, rows: Ints, slots: int) -> HotSlots:
        """The first `rows` of each table, behind `slots` others."""
        return cls(rows=rows, start=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64) + slots)

    def locate(self, tables: NDArray[np.int32], ids: Ints) -> Ints:
        """The slot of each (table, id), or -1 where it is not hot."""
        return np.where(ids < self.rows[tables], self.start[tables] + ids, -1)

    def rows_in(self, slots: Ints) -> tuple[Ints, Ints]:
        """Table and id of what lies in hot slots."""
        tables = np.searchsorted(self.start, slots, side="right") - 1
        return tables, slots - self.start[tables]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Where each table's slots lie; arrays have one entry a table."""

    ways: int
    policy: str
    rows: Ints
    """Rows of the table."""
    first_row: Ints
    """Where the table's rows start in the group's store."""
    slot_start: Ints
    """``[T + 1]``."""
    sets: Ints
    overflow_sets: Ints
    """Sets of the overflow area, which follows the cache sets."""
    noise: RowNoise
    """What initial weights and rounding are functions of."""
    bound: NDArray[np.float32]
    """Initial weights are uniform in +-bound."""
    hot: HotSlots | None = None
    """Rows that no set holds; by default none."""

    @property
    def slots(self) -> int:
        """S, without those of hot rows."""
        return int(self.slot_start[-1])

    @cached_property
    def hot_slots(self) -> HotSlots:
        """`hot`, or none of any table."""
        return self.hot or HotSlots.of(np.zeros(len(self.rows), dtype=np.int64), self.slots)

    @cached_property
    def places(self) -> tuple[Any, ...]:
        """`cpu.Places` as kernels take it."""
        hot = self.hot_slots
        return (
            self.rows, hot.rows, hot.start[:-1] - self.slot_start[:-1], self.slot_start, self.sets,
            self.overflow_sets, self.ways, POLICIES[self.policy],
        )  # fmt: skip


@dataclass(frozen=True)
class CacheState:
    """What the slots hold. `counts` has one entry unless the policy counts.

    The stamp of a slot is that of the last batch that used it, or emptied it: what was not stamped since a checkpoint
    is as the checkpoint has it.

    Arrays have `lanes.PADDING` entries behind the last slot: searches read them, and missing rows touch the last one.
    """

    tags: NDArray[np.int32]
    stamps: NDArray[np.int32]
    counts: NDArray[np.uint32]
    reach: Ints
    """Of each table: sets of the overflow area that one of its rows may lie in; 0 when the area is empty."""

    @classmethod
    def empty(cls, layout: CacheLayout) -> CacheState:
        """All slots free; a stamp of -1 is older than any batch."""
        tags, stamps = (allocate(layout.slots + PADDING).view(np.int32) for _ in range(2))
        stamps.fill(-1)
        return cls(
            tags,
            stamps,
            np.zeros(layout.slots + PADDING if layout.policy == "lfu" else 1, dtype=np.uint32),
            np.zeros(len(layout.sets), dtype=np.int64),
        )

    @property
    def nbytes(self) -> int:
        return int(self.tags.nbytes + self.stamps.nbytes + self.counts.nbytes + self.reach.nbytes)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Rows to move between level 0 and the store, tables in order: row in the group, slot, table, noise key."""

    rows: Ints
    slots: Ints
    tables: NDArray[np.int32]
    keys: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(kw_only=True)
class Staging:
    """How far the staging of a batch has come.

    Parameters
    ----------
    rows_in, victims, released : ndarray
        ``[T]`` rows that come in, how many of them take the slot of another row, and rows that leave the overflow area.
    stuck : ndarray
        ``[T]`` ids that found no room; once the others are where they should be, stage again with a later horizon.
    reach : ndarray
        ``[T]`` `CacheState.reach` as it was before.
    bad : int
        Place in the batch's values of an id outside its table, or -1. Nothing of that table moves; others may.
    """

    rows_in: Ints
    victims: Ints
    released: Ints
    stuck: Ints
    reach: Ints
    bad: int = -1

    @property
    def rows_out(self) -> int:
        """Rows that go out of all tables."""
        return int(self.victims.sum() + self.released.sum())


@dataclass
class StageWorkspace:
    """Lists of one batch; grow to the largest met."""

    arrays: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    room: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    order: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tables, those with the most lookups first."""
    _planned: bytes = b""

    def prepare(self, lookups: Ints, layout: CacheLayout) -> dict[str, NDArray[np.int64]]:
        """Lists with room for every lookup and every overflow slot of each table."""
        if lookups.tobytes() == self._planned:
            return self.arrays
        self._planned = lookups.tobytes()
        self.order = np.argsort(-lookups, kind="stable")
        self.room = np.cumsum(np.concatenate([[0], lookups + layout.overflow_sets * layout.ways])).astype(np.int64)
        if not self.arrays or len(self.arrays["pending"]) < self.room[-1]:
            # In the order of `cpu.StageLists`.
            names = ("pending", "in_row", "in_slot", "in_victim", "out_row", "out_slot")
            self.arrays = {name: np.empty(int(self.room[-1] * 1.25), dtype=np.int64) for name in names}
        return self.arrays


def stage(
    group: GroupLayout,
    layout: CacheLayout,
    state: CacheState,
    lookups: BagBatch,
    out: NDArray[np.int32],
    *,
    batch: int,
    horizon: int,
    workspace: StageWorkspace,
) -> Staging:
    """Give every id of the batch a slot and write it, relative to its table's first slot, to `out`; -1 without room.

    A slot is given up only when its stamp is below `horizon`: with lookahead k, ``batch - k``. What comes in and goes
    out follows from the sequence of batches and horizons alone. `undo` takes it back as long as nothing has moved.
    """
    tables = len(layout.sets)
    none = np.zeros((4, tables), dtype=np.int64)
    done = Staging(rows_in=none[0], victims=none[1], released=none[2], stuck=none[3], reach=state.reach.copy())
    lists = workspace.prepare(lookups_by_table(group, lookups), layout)
    bad = np.full(tables, -1, dtype=np.int64)
    cpu.stage(
        team_of(team_threads()), (lookups.compiled, lookups.key, group.table_start, group.table_features),
        layout.places, (state.tags, state.stamps, state.counts, state.reach), (batch, horizon),
        (workspace.room, workspace.order, *lists.values()),
        (done.rows_in, done.victims, done.released, done.stuck, bad), out,
    )  # fmt: skip
    wrong = bad[bad >= 0]
    done.bad = int(wrong.min()) if len(wrong) else -1
    return done


def undo(state: CacheState, staging: Staging, workspace: StageWorkspace) -> None:
    """Let every slot hold the row again that it held before `stage`, of which nothing has moved yet.

    Stamps stay, so a row that would have gone may stay a batch longer than if it had not been tried.
    """
    lists = workspace.arrays
    for table, first in enumerate(workspace.room[:-1]):
        came = slice(first, first + staging.rows_in[table])
        left = slice(first, first + staging.released[table])
        # A row may have come into a slot of the overflow area that another had just left.
        state.tags[lists["in_slot"][came]] = lists["in_victim"][came] + 1
        state.tags[lists["out_slot"][left]] = lists["out_row"][left] + 1
    state.reach[:] = staging.reach


def released(layout: CacheLayout, staging: Staging, workspace: StageWorkspace) -> Moves:
    """Rows that leave the overflow area; to be written before any row comes in."""
    return _moves(layout, workspace, staging.released.sum(), ("out_row", "out_slot", staging.released))


def moves(layout: CacheLayout, staging: Staging, workspace: StageWorkspace) -> tuple[Moves, Moves]:
    """All rows that go out, to be written first, and all that come in."""
    victims = ("in_victim", "in_slot", staging.rows_in)
    outgoing = _moves(layout, workspace, staging.rows_out, ("out_row", "out_slot", staging.released), victims)
    return outgoing, _moves(layout, workspace, staging.rows_in.sum(), ("in_row", "in_slot", staging.rows_in))


def _moves(layout: CacheLayout, workspace: StageWorkspace, total: int, *lists: tuple[str, str, Ints]) -> Moves:
    found = Moves(
        rows=np.empty(total, dtype=np.int64),
        slots=np.empty(total, dtype=np.int64),
        tables=np.empty(total, dtype=np.int32),
        keys=np.empty(total, dtype=np.uint64),
    )
    done = 0
    for rows, slots, count in lists:
        done = cpu.compact(
            workspace.room, count, (workspace.arrays[rows], workspace.arrays[slots]), layout.first_row,
            tuple(layout.noise), done, (found.rows, found.slots, found.tables, found.keys),
        )  # fmt: skip
    return found


def row_keys(layout: CacheLayout, tables: NDArray[np.int32], ids: Ints) -> NDArray[np.uint64]:
    """Key of the noise of each (table, id): a function of seed, table name and id."""
    return cpu.row_keys(tuple(layout.noise), tables, ids)  # type: ignore[no-any-return]


def locate(layout: CacheLayout, state: CacheState, tables: NDArray[np.int32], ids: Ints) -> Ints:
    """The slot of each (table, id), or -1 where it is not resident; changes nothing."""
    out = np.empty(len(ids), dtype=np.int64)
    places = layout.slot_start, layout.sets, layout.overflow_sets, layout.ways
    cpu.locate(ids, tables, places, state.reach, state.tags, out)
    return out if layout.hot is None else np.maximum(out, layout.hot.locate(tables, ids))


def initialize(
    layout: CacheLayout,
    incoming: Moves,
    absent: NDArray[np.bool_],
    level: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]],
    width: int,
) -> None:
    """Initial values in the slots of rows that were never written: those that `kernels.random.fill_uniform` gives.

    Parameters
    ----------
    level : tuple of ndarray
        Weights, row state, full state and clocks of all slots; what is not kept is empty.
    """
    weights, full_state = level[0], level[2]
    cpu.initialize(
        (incoming.slots, incoming.tables, incoming.keys), absent, layout.bound, tuple(level), width,
        len(full_state) // (len(weights) // width), use_torch_threads() * 4,
    )  # fmt: skip
