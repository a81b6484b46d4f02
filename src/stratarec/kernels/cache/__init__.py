"""The row cache of level 0: staging a batch assigns slots to its rows and lists the rows to move.

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
from stratarec.kernels.policies import POLICIES
from stratarec.kernels.random import RowNoise
from stratarec.kernels.runtime.memory import allocate
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads, use_torch_threads
from stratarec.kernels.simd.lanes import PADDING

Ints = NDArray[np.int64]

PROBES = cpu.PROBES


@dataclass(frozen=True)
class HotSlots:
    """Rows with permanent slots, after the slots of all caches; arrays have an entry per table."""

    rows: Ints
    """Number of hot rows; they are the first rows of the table."""
    start: Ints
    """``[T + 1]`` first slot of each table's hot rows; their slots have the order of the rows."""

    @classmethod
    def of(cls, rows: Ints, slots: int) -> HotSlots:
        """Return the hot slots of the first `rows` of each table; they follow `slots` others."""
        return cls(rows=rows, start=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64) + slots)

    def locate(self, tables: NDArray[np.int32], ids: Ints) -> Ints:
        """Return the slot of each row, ``[n]`` int64; -1 if the row is not hot.

        Parameters
        ----------
        tables, ids : ndarray
            ``[n]`` int32 index of the row's table, and ``[n]`` int64 row of this table.
        """
        return np.where(ids < self.rows[tables], self.start[tables] + ids, -1)

    def rows_in(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the table's index and its row in each of `slots`, ``[n]`` int64 hot slots."""
        tables = np.searchsorted(self.start, slots, side="right") - 1
        return tables, slots - self.start[tables]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Layout of the slots of all tables; arrays have one entry per table."""

    ways: int
    """Slots of a set."""
    policy: str
    """Choice of the row to evict, a key of `POLICIES`."""
    rows: Ints
    """Number of rows."""
    first_row: Ints
    """First row of the table in the group's store."""
    slot_start: Ints
    """``[T + 1]`` first slot."""
    sets: Ints
    """Number of sets. The overflow area has its own sets, which are not counted."""
    overflow_sets: Ints
    """Number of sets in the overflow area, which follows the cache sets."""
    noise: RowNoise
    """Key of each table's noise, which sets initial weights and stochastic rounding."""
    bound: NDArray[np.float32]
    """Initial weights are uniform in [-bound, bound]."""
    hot: HotSlots | None = None
    """Rows with permanent slots; None for none."""

    @property
    def slots(self) -> int:
        """S, the number of slots, not counting the slots of hot rows."""
        return int(self.slot_start[-1])

    @cached_property
    def hot_slots(self) -> HotSlots:
        """The `hot` slots, or an object without hot rows if `hot` is None."""
        return self.hot or HotSlots.of(np.zeros(len(self.rows), dtype=np.int64), self.slots)

    @cached_property
    def places(self) -> tuple[Any, ...]:
        """Fields of `cpu.Places`."""
        hot = self.hot_slots
        return (
            self.rows,
            hot.rows,
            hot.start[:-1] - self.slot_start[:-1],
            self.slot_start,
            self.sets,
            self.overflow_sets,
            self.ways,
            list(POLICIES).index(self.policy),
        )


@dataclass(frozen=True)
class CacheState:
    """Contents of the slots.

    A slot's stamp is the number of the last batch that used or emptied the slot. So a slot that was
    not stamped since a checkpoint is unchanged. Arrays have `lanes.PADDING` entries after the last
    slot: searches read beyond the last slot, and lookups of missing rows stamp the last entry.
    """

    tags: NDArray[np.int32]
    """``[S + PADDING]`` row of the table in each slot, plus one; 0 for a free slot."""
    stamps: NDArray[np.int32]
    """``[S + PADDING]`` stamp of each slot; -1 if it was never used."""
    reach: Ints
    """Number of overflow sets per table that a lookup searches; 0 without an overflow area."""

    @classmethod
    def empty(cls, layout: CacheLayout) -> CacheState:
        """Return a state in which all slots of `layout` are free, with a stamp before any batch."""
        tags, stamps = (allocate(layout.slots + PADDING).view(np.int32) for _ in range(2))
        stamps.fill(-1)
        return cls(tags, stamps, np.zeros(len(layout.sets), dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return int(self.tags.nbytes + self.stamps.nbytes + self.reach.nbytes)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Rows to move between level 0 and the store; arrays have one entry per move.

    Released rows come first; otherwise moves are ordered by table.
    """

    rows: Ints
    """Row of the group."""
    slots: Ints
    """Slot that the row leaves or gets."""
    tables: NDArray[np.int32]
    """Index of the row's table in the group."""
    keys: NDArray[np.uint64]
    """Key of the row's noise."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(kw_only=True)
class Staging:
    """Result of staging a batch.

    Parameters
    ----------
    rows_in, victims, released : ndarray
        ``[T]`` number of rows to fetch, of rows evicted to make room for them, and of rows removed
        from the overflow area.
    stuck : ndarray
        ``[T]`` number of ids for which no slot is free. Do the other moves, then stage the batch
        again with a later horizon.
    reach : ndarray
        ``[T]`` `CacheState.reach` before staging.
    bad : int
        Position in the batch's values of an id outside its table, or -1. Rows of that table do not
        move; rows of other tables may.
    """

    rows_in: Ints
    victims: Ints
    released: Ints
    stuck: Ints
    reach: Ints
    bad: int = -1

    @property
    def rows_out(self) -> int:
        """Number of rows of all tables to write back."""
        return int(self.victims.sum() + self.released.sum())


@dataclass
class StageWorkspace:
    """Lists of moves that `stage` fills, reused for every batch; they grow to the largest batch."""

    arrays: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    room: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    order: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tables in descending order of lookups."""
    _planned: bytes = b""

    def reserve(self, lookups: Ints, layout: CacheLayout) -> dict[str, NDArray[np.int64]]:
        """Return lists with room for every lookup and every overflow slot of each table.

        Parameters
        ----------
        lookups : ndarray
            ``[T]`` int64 number of lookups of each table in the batch.
        layout : CacheLayout
            Slots of the tables.
        """
        if lookups.tobytes() == self._planned:
            return self.arrays
        self._planned = lookups.tobytes()
        self.order = np.argsort(-lookups, kind="stable")
        self.room = np.cumsum(np.concatenate([[0], lookups + layout.overflow_sets * layout.ways])).astype(
            np.int64
        )
        if not self.arrays or len(self.arrays["pending"]) < self.room[-1]:
            # In the order of the fields of `cpu.StageLists`.
            names = ("pending", "in_row", "in_slot", "in_victim", "out_row", "out_slot")
            self.arrays = {name: np.empty(int(self.room[-1] * 1.25), dtype=np.int64) for name in names}
        return self.arrays


def stage(
    group: GroupLayout,
    layout: CacheLayout,
    state: CacheState,
    bags: BagBatch,
    out: NDArray[np.int32],
    *,
    stamp: int,
    horizon: int,
    workspace: StageWorkspace,
) -> Staging:
    """Assign a slot to every id of the batch, and list the rows to move.

    Moves depend only on the sequence of batches and horizons. Until a row has moved, `undo` reverts
    the assignment.

    Parameters
    ----------
    group : GroupLayout
        Features of the tables.
    layout : CacheLayout
        Slots of the tables.
    state : CacheState
        Contents of the slots, which change.
    bags : BagBatch
        Lookups of the batch.
    out : ndarray
        ``[N]`` int32: receives each slot relative to the first slot of its table, or -1 if no slot
        is free.
    stamp : int
        Stamp of the batch, which its slots get.
    horizon : int
        A slot is reused only if its stamp is below this one; with lookahead k it is ``stamp - k``.
    workspace : StageWorkspace
        Receives the lists of moves.
    """
    tables = len(layout.sets)
    none = np.zeros((4, tables), dtype=np.int64)
    done = Staging(
        rows_in=none[0], victims=none[1], released=none[2], stuck=none[3], reach=state.reach.copy()
    )
    lists = workspace.reserve(lookups_by_table(group, bags), layout)
    bad = np.full(tables, -1, dtype=np.int64)
    cpu.stage(
        team_of(team_threads()),
        (bags.compiled, bags.key, group.table_start, group.table_features),
        layout.places,
        (state.tags, state.stamps, state.reach),
        (stamp, horizon),
        (workspace.room, workspace.order, *lists.values()),
        (done.rows_in, done.victims, done.released, done.stuck, bad),
        out,
    )
    wrong = bad[bad >= 0]
    done.bad = int(wrong.min()) if len(wrong) else -1
    return done


def undo(state: CacheState, staging: Staging, workspace: StageWorkspace) -> None:
    """Revert the assignment of slots by the call of `stage` that returned `staging`; no row may
    have moved since.

    `state` and `workspace` are the arguments of that call. Stamps are not restored. So a row may
    stay in its slot one batch longer than if `stage` had not been called.
    """
    lists = workspace.arrays
    for table, first in enumerate(workspace.room[:-1]):
        fetched = slice(first, first + staging.rows_in[table])
        released = slice(first, first + staging.released[table])
        # In this order, because a fetched row may have an overflow slot that was just released.
        state.tags[lists["in_slot"][fetched]] = lists["in_victim"][fetched] + 1
        state.tags[lists["out_slot"][released]] = lists["out_row"][released] + 1
    state.reach[:] = staging.reach


def released(layout: CacheLayout, staging: Staging, workspace: StageWorkspace) -> Moves:
    """Return the rows removed from the overflow area. They must be written back before rows are
    fetched.

    `staging` is the result of `stage`; `layout` and `workspace` are its arguments.
    """
    return _moves(layout, workspace, staging.released.sum(), ("out_row", "out_slot", staging.released))


def moves(layout: CacheLayout, staging: Staging, workspace: StageWorkspace) -> tuple[Moves, Moves]:
    """Return all rows to write back and all rows to fetch; rows must be written back first.

    `staging` is the result of `stage`; `layout` and `workspace` are its arguments.
    """
    victims = ("in_victim", "in_slot", staging.rows_in)
    outgoing = _moves(
        layout, workspace, staging.rows_out, ("out_row", "out_slot", staging.released), victims
    )
    return outgoing, _moves(
        layout, workspace, staging.rows_in.sum(), ("in_row", "in_slot", staging.rows_in)
    )


def _moves(
    layout: CacheLayout, workspace: StageWorkspace, total: int, *lists: tuple[str, str, Ints]
) -> Moves:
    moves = Moves(
        rows=np.empty(total, dtype=np.int64),
        slots=np.empty(total, dtype=np.int64),
        tables=np.empty(total, dtype=np.int32),
        keys=np.empty(total, dtype=np.uint64),
    )
    done = 0
    for rows, slots, count in lists:
        done = cpu.compact(
            workspace.room,
            count,
            (workspace.arrays[rows], workspace.arrays[slots]),
            layout.first_row,
            tuple(layout.noise),
            done,
            (moves.rows, moves.slots, moves.tables, moves.keys),
        )
    return moves


def row_keys(layout: CacheLayout, tables: NDArray[np.int32], ids: Ints) -> NDArray[np.uint64]:
    """Return the noise key of each row, ``[n]`` uint64, a function of seed, table name and row.

    `tables` and `ids` are as in `HotSlots.locate`.
    """
    return cpu.row_keys(tuple(layout.noise), tables, ids)  # type: ignore[no-any-return]


def locate(layout: CacheLayout, state: CacheState, tables: NDArray[np.int32], ids: Ints) -> Ints:
    """Return the slot of each row, ``[n]`` int64; -1 if the row is in no slot. Stamps do not
    change.

    `tables` and `ids` are as in `HotSlots.locate`.
    """
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
    """Write initial values to the slots of rows that were never written; weights equal the result
    of `fill_uniform`.

    Parameters
    ----------
    layout : CacheLayout
        Keys and bounds of the tables' initial weights.
    incoming : Moves
        Rows to fetch, n of them.
    absent : ndarray
        ``[n]`` bool: whether a row was never written.
    level : tuple of ndarray
        Weights, row state, full state and clocks of all slots; the arrays of unused state are
        empty.
    width : int
        Floats per row.
    """
    weights, full_state = level[0], level[2]
    cpu.initialize(
        (incoming.slots, incoming.tables, incoming.keys),
        absent,
        layout.bound,
        tuple(level),
        width,
        len(full_state) // (len(weights) // width),
        use_torch_threads() * 4,
    )
