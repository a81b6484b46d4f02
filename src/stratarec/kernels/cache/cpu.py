"""Numba bodies of the row cache: find rows among the slots, choose victims, bring in what is missing.

Table t owns slots ``[slot_start[t], slot_start[t + 1])``: first ``sets[t]`` sets of W ways, then overflow sets of W
ways, which take rows whose own set is full of rows in use. A tag is a row's id + 1, 0 when the slot is empty; a stamp
is that of the last batch that used or emptied the slot. A slot whose stamp is not below the horizon is in use and is
never a victim.

Hot rows have slots for good: rows below ``hot_rows[t]`` lie, in their order, from slot ``hot[t]`` on, counted from the
table's first. These slots have neither tag nor stamp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from stratarec.kernels.bags.cpu import Bags, span
from stratarec.kernels.random.cpu import GOLDEN, key_of, mix, unit
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.lanes import LANES, find_equal, least
from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
LRU, LFU, RANK = 0, 1, 2
# Overflow sets that a row may lie in: enough that a row finds room while the area as a whole has some.
PROBES = 16
# Lookups ahead of the one in use whose set is prefetched.
AHEAD = 16
LINE = 16


class Lookups(NamedTuple):
    """A batch, the place of each feature among its keys, and the features of each table."""

    bags: Bags
    key: NDArray[np.int64]
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]


class Places(NamedTuple):
    """Where the slots of each table and of its hot rows lie; arrays have one entry a table."""

    rows: NDArray[np.int64]
    hot_rows: NDArray[np.int64]
    hot: NDArray[np.int64]
    slot_start: NDArray[np.int64]
    sets: NDArray[np.int64]
    overflow_sets: NDArray[np.int64]
    ways: int
    policy: int


class Area(NamedTuple):
    """The slots of one table: its first one, its sets, and the overflow sets behind them."""

    start: int
    sets: int
    overflow_sets: int
    ways: int


class State(NamedTuple):
    """What slots hold: `CacheState`."""

    tags: NDArray[np.int32]
    stamps: NDArray[np.int32]
    counts: NDArray[np.uint32]
    reach: NDArray[np.int64]


# Stamps against a horizon, not counters of pins that a backward pass releases: with those, what may go, and so
# rounding, depended on how far a batch had come.
class BatchStamps(NamedTuple):
    """The stamp of the batch, and the first stamp of slots that are in use."""

    batch: int
    horizon: int


class StageLists(NamedTuple):
    """What moves. Those of table t start at ``room[t]``; tables are taken in `order`, the longest first."""

    room: NDArray[np.int64]
    order: NDArray[np.int64]
    pending: NDArray[np.int64]
    in_row: NDArray[np.int64]
    in_slot: NDArray[np.int64]
    in_victim: NDArray[np.int64]
    out_row: NDArray[np.int64]
    out_slot: NDArray[np.int64]


class Arrivals(NamedTuple):
    """One table's share of the lists of rows that come in."""

    row: NDArray[np.int64]
    slot: NDArray[np.int64]
    victim: NDArray[np.int64]


class Found(NamedTuple):
    """`Staging`, and the place of a bad id of each table or -1."""

    rows_in: NDArray[np.int64]
    victims: NDArray[np.int64]
    released: NDArray[np.int64]
    stuck: NDArray[np.int64]
    bad: NDArray[np.int64]


@njit(**BODY)
def area_of(places, t):
    """The slots of table t."""
    return Area(places.slot_start[t], places.sets[t], places.overflow_sets[t], places.ways)


@njit(**BODY)
def spread(row, sets):
    """The set of a row: Fibonacci hashing spreads consecutive ids, the popular ones of a ranked table, evenly."""
    return (((U(row) * U(0x9E3779B1)) & U(0xFFFFFFFF)) * U(sets)) >> U(32)


@njit(**BODY)
def spread_overflow(row, sets):
    """The first overflow set of a row; independent of `spread`."""
    return ((mix(U(row) + GOLDEN) >> U(32)) * U(sets)) >> U(32)


@njit(**BODY)
def prefetch_set(tags, stamps, first, ways):
    for way in range(U(0), U(ways), U(LINE)):
        prefetch(tags, first + way)
        prefetch(stamps, first + way)


@njit(**BODY)
def find_way(tags, first, ways, tag):
    """The way of `tag` in the set whose first slot is `first`, plus 1; 0 when it is absent."""
    way = find_equal(tags, first, tag)
    block = U(LANES)
    while block < U(ways) and way == block:
        way = block + find_equal(tags, first + block, tag)
        block += U(LANES)
    return np.int64(way + U(1)) if way < U(ways) else np.int64(0)


@njit(**BODY)
def find_overflow(tags, first, sets, ways, row, reach):
    """The slot of `row` in the first `reach` sets that it may have of the overflow area at slot `first`, or -1."""
    home = spread_overflow(row, sets)
    for probe in range(U(reach)):
        start = U(first) + (home + probe) % U(sets) * U(ways)
        way = find_way(tags, start, ways, np.int32(row + 1))
        if way:
            return np.int64(start) + way - 1
    return np.int64(-1)


@njit(**BODY)
def find_slot(tags, area, row, reach):
    """The slot of `row` in its table's area, or -1; overflow sets beyond `reach` hold none of the table's rows."""
    first = U(area.start) + spread(row, area.sets) * U(area.ways)
    way = find_way(tags, first, area.ways, np.int32(row + 1))
    slot = np.int64(first) + way - 1 if way else np.int64(-1)
    if reach and slot < 0:
        slot = find_overflow(tags, area.start + area.sets * area.ways, area.overflow_sets, area.ways, row, reach)
    return slot


@njit(**BODY)
def oldest(stamps, first, ways, horizon):
    """The slot of the set at `first` with the least stamp, or -1 when that is in use."""
    stamp = least(stamps, first, U(ways))
    for block in range(U(LANES), U(ways), U(LANES)):
        stamp = min(stamp, least(stamps, first + block, U(ways) - block))
    return np.int64(first) + find_way(stamps, first, ways, stamp) - 1 if stamp < horizon else np.int64(-1)


@njit(**BODY)
def victim(state, first, ways, policy, horizon):
    """The slot to give up in the set at `first`: an empty one, else the policy's choice of those not in use, or -1.

    Ties go to the lower way, so the choice is a function of the set's content alone.
    """
    empty = find_way(state.tags, U(first), ways, np.int32(0))
    if empty:
        return first + empty - 1
    if policy == LRU:
        # The only policy that is worth vector code: the search for the least stamp is most of a miss.
        return oldest(state.stamps, U(first), ways, horizon)
    best, best_score = np.int64(-1), np.int64(0)
    for way in range(ways):
        slot = U(first + way)
        if state.stamps[slot] >= horizon:
            continue
        if policy == LFU:
            score = -((np.int64(state.counts[slot]) << 32) + np.int64(state.stamps[slot]))
        else:
            score = np.int64(state.tags[slot])
        if best < 0 or score > best_score:
            best, best_score = np.int64(slot), score
    return best


@njit(**BODY)
def touch(slot, batch, state, policy):
    """Note that `batch` uses the slot."""
    if policy == LFU:
        # Once a batch, however often it looks the row up: else one batch full of an id would keep its row for long.
        state.counts[slot] += np.uint32(state.stamps[slot] != batch and state.counts[slot] < np.uint32(0xFFFFFFFF))
    state.stamps[slot] = batch


@njit(**BODY)
def find_rows(t, lookups, places, area, state, batch, out, pending):
    """Translate one table's ids into slots where they are resident; the places of the others go to `pending`.

    Returns (number pending, place of a bad id or -1).
    """
    misses, bags = 0, lookups.bags
    # Read once: to the compiler what is stored below might change them.
    limit, hot_rows, hot, reach = places.rows[t], places.hot_rows[t], places.hot[t], state.reach[t]
    for f in lookups.table_features[lookups.table_start[t] : lookups.table_start[t + 1]]:
        begin, end = span(bags, lookups.key[f])
        for i in range(U(begin), U(end)):
            later = bags.values[min(i + U(AHEAD), U(end) - U(1))]
            prefetch_set(state.tags, state.stamps, U(area.start) + spread(later, area.sets) * U(area.ways), area.ways)
            row = bags.values[i]
            if row < 0 or row >= limit:
                return misses, np.int64(i)
            if row < hot_rows:
                out[i] = hot + row
                continue
            slot = find_slot(state.tags, area, row, reach)
            # Whether a row is there cannot be predicted: both outcomes are written, one of them in vain. A missing row
            # touches the padding behind the last slot.
            pending[U(misses)] = i
            misses += slot < 0
            touch(U(slot) if slot >= 0 else U(len(state.stamps) - 1), batch, state, places.policy)
            out[i] = slot - area.start if slot >= 0 else -1
    return misses, np.int64(-1)


@njit(**BODY)
def release_overflow(area, state, stamps, out_row, out_slot, listed):
    """Empty the overflow slots that are no longer in use, adding to a list. Returns (listed, whether any row stays)."""
    stay = False
    first = area.start + area.sets * area.ways
    for slot in range(U(first), U(first + area.overflow_sets * area.ways)):
        if state.tags[slot] == 0:
            continue
        # A batch in flight reads this slot.
        if state.stamps[slot] >= stamps.horizon:
            stay = True
            continue
        out_row[U(listed)] = state.tags[slot] - 1
        out_slot[U(listed)] = slot
        state.tags[slot] = 0
        # An emptied slot is stamped, too: a checkpoint that is told only what changed must hear of it.
        state.stamps[slot] = stamps.batch
        listed += 1
    return listed, stay


@njit(**BODY)
def admit(row, area, state, policy, horizon):
    """The slot for a missing row, or -1 when every candidate is in use, and how many overflow sets were searched."""
    slot = victim(state, area.start + np.int64(spread(row, area.sets)) * area.ways, area.ways, policy, horizon)
    if slot >= 0:
        return slot, U(0)
    home = spread_overflow(row, area.overflow_sets)
    for probe in range(U(min(area.overflow_sets, PROBES))):
        place = area.sets + np.int64((home + probe) % U(area.overflow_sets))
        first = area.start + place * area.ways
        empty = find_way(state.tags, U(first), area.ways, np.int32(0))
        if empty:
            return first + empty - 1, probe + U(1)
    return np.int64(-1), U(0)


@njit(**BODY)
def bring_in(pending, values, area, reach, policy, state, stamps, out, arrivals, rows_in):
    """Give every pending id a slot, adding to the list of rows that come in and the rows whose slots they take.

    Returns (rows in, victims, reach of the overflow area, ids that found no room).
    """
    stuck, victims, misses = 0, 0, U(len(pending))
    for p in range(misses):
        later = values[U(pending[min(p + U(AHEAD), misses - U(1))])]
        prefetch_set(state.tags, state.stamps, U(area.start) + spread(later, area.sets) * U(area.ways), area.ways)
        i = U(pending[p])
        row = values[i]
        # Again: an id before it in the list may be the same row, which has come in by now.
        slot = find_slot(state.tags, area, row, reach)
        if slot < 0:
            slot, searched = admit(row, area, state, policy, stamps.horizon)
            if slot < 0:
                stuck += 1
                continue
            reach = max(reach, np.int64(searched))
            arrivals.row[U(rows_in)] = row
            arrivals.slot[U(rows_in)] = slot
            arrivals.victim[U(rows_in)] = state.tags[U(slot)] - 1
            victims += state.tags[U(slot)] != 0
            rows_in += 1
            state.tags[U(slot)] = np.int32(row + 1)
            state.stamps[U(slot)] = stamps.batch
            state.counts[U(slot) if policy == LFU else U(0)] = np.uint32(1)
        out[i] = slot - area.start
    return rows_in, victims, reach, stuck


@njit(**BODY)
def stage_tables(member, counter, lookups, places, state, stamps, lists, found, out):
    """Bring every row of the batch into its table's slots and write slots, relative to the table's first, to `out`.

    Entries of `found` count what the lists have; ids without room are `stuck`, and nothing of a table with a bad id
    moves.
    """
    while True:
        task = take(counter)
        if task >= len(lists.order):
            return
        # The longest first: begun last it would keep the whole team waiting.
        t = lists.order[U(task)]
        area, begin, end = area_of(places, t), lists.room[t], lists.room[t + 1]
        # The distinct ids are not found first: a repeated one finds the row that the first brought in.
        waiting = lists.pending[begin:end]
        misses, found.bad[t] = find_rows(t, lookups, places, area, state, stamps.batch, out, waiting)
        if found.bad[t] >= 0:
            continue
        if state.reach[t]:
            found.released[t], stay = release_overflow(
                area, state, stamps, lists.out_row[begin:end], lists.out_slot[begin:end], found.released[t]
            )
            state.reach[t] *= stay
        arrivals = Arrivals(lists.in_row[begin:end], lists.in_slot[begin:end], lists.in_victim[begin:end])
        found.rows_in[t], replaced, state.reach[t], found.stuck[t] = bring_in(
            waiting[:misses], lookups.bags.values, area, state.reach[t], places.policy, state, stamps, out, arrivals,
            found.rows_in[t],
        )  # fmt: skip
        found.victims[t] += replaced


@njit(nogil=True, cache=True)
def stage(team, lookups, places, state, stamps, lists, found, out):
    """`stage_tables` by a team. Plain tuples come in: unpacking a named one takes twice as long."""
    bags, key, table_start, table_features = lookups
    given = (
        np.zeros(1, np.int64), Lookups(Bags(*bags), key, table_start, table_features), Places(*places), State(*state),
        BatchStamps(*stamps), StageLists(*lists), Found(*found), out,
    )  # fmt: skip
    run_team(team, stage_tables, given)


@njit(nogil=True, cache=True)
def compact(room, count, lists, first_row, noise, total, moves):
    """Add the tables' `lists`, rows and slots, to `total` entries of `moves`: row in the group, slot, table, noise key.

    Rows below 0 are left out. Returns the number of entries.
    """
    total = U(total)
    row, slot = lists
    group_row, group_slot, table, noise_key = moves
    # One thread, tables in order: the list is the same whoever staged which table.
    for t in range(len(count)):
        for i in range(U(room[t]), U(room[t] + count[t])):
            if row[i] >= 0:
                group_row[total] = first_row[t] + row[i]
                group_slot[total] = slot[i]
                table[total] = t
                noise_key[total] = key_of(noise, t, row[i])
                total += U(1)
    return np.int64(total)


@njit(**BODY)
def initialize_row(slot, key, bound, slots, D, full):
    """Uniform weights in +-bound and zeros for state and clock; `full` is how many floats its weights' state has."""
    weights, row_state, full_state, clock = slots
    for d in range(D):
        weights[slot * D + d] = -bound + (bound + bound) * unit(key, d)
    for place in range(slot * full, (slot + U(1)) * full):
        full_state[place] = np.float32(0.0)
    if len(row_state):
        row_state[slot] = np.float32(0.0)
    if len(clock):
        clock[slot] = np.int32(0)


@njit(parallel=True, nogil=True, cache=True)
def initialize(moves, absent, bounds, slots, width, full, chunks):
    """Fill the slots of rows that were never written: uniform weights in +-bound of the row's table, no state.

    `moves` are slots, tables and noise keys.
    """
    D, (into, tables, keys) = U(width), moves
    for chunk in prange(chunks):
        for i in range(U(len(into) * chunk // chunks), U(len(into) * (chunk + 1) // chunks)):
            if absent[i]:
                initialize_row(U(into[i]), keys[i], bounds[U(tables[i])], slots, D, U(full))


@njit(nogil=True, cache=True)
def locate(row, tables, places, reach, tags, out):
    """The slot of each (table, row), or -1; changes nothing. `places` are first slot, sets, overflow sets and ways."""
    slot_start, sets, overflow_sets, ways = places
    for i in range(U(len(row))):
        t = U(tables[i])
        out[i] = find_slot(tags, Area(slot_start[t], sets[t], overflow_sets[t], ways), row[i], reach[t])


@njit(nogil=True, cache=True)
def row_keys(noise, tables, ids):
    """The key of the noise of each (table, id), as `compact` gives it."""
    out = np.empty(len(ids), dtype=np.uint64)
    for i in range(U(len(ids))):
        out[i] = key_of(noise, U(tables[i]), ids[i])
    return out
