"""Numba kernels of the row cache: find rows in slots, choose victims, assign slots to missing rows.

Table t has the slots ``[slot_start[t], slot_start[t + 1])``: first ``sets[t]`` cache sets of W ways
each. Overflow sets of W ways follow, for rows whose own set is full of rows in use. A slot's tag is
the id of its row + 1, or 0 if the slot is empty. A slot's stamp is the number of the last batch
that used or emptied it. A slot is in use, and never a victim, if its stamp is not below the
horizon.

Hot rows, which are the rows below ``hot_rows[t]``, have permanent slots: row r has slot ``hot[t] +
r``, counted from the table's first slot. These slots have neither tag nor stamp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from stratarec.kernels.bags import Bags, span
from stratarec.kernels.policies import POLICIES
from stratarec.kernels.random.cpu import GOLDEN, key_of, mix, unit
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.lanes import LANES, find_equal, largest_below, least
from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
IS_CACHED = POLICIES.close()
# Number of overflow sets that are searched for a row. It must be high enough that a row finds a
# free slot if there is one.
PROBES = 16
# Each lookup prefetches the set of the lookup that is this many positions later.
AHEAD = 16
LINE = 16


class Lookups(NamedTuple):
    """Lookups of a batch, keys of the group's features, and features of each table."""

    bags: Bags
    key: NDArray[np.int64]
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]


class Places(NamedTuple):
    """Positions of the slots of each table and of its hot rows; arrays have one entry per table."""

    rows: NDArray[np.int64]
    hot_rows: NDArray[np.int64]
    hot: NDArray[np.int64]
    slot_start: NDArray[np.int64]
    sets: NDArray[np.int64]
    overflow_sets: NDArray[np.int64]
    ways: int
    policy: int


class Area(NamedTuple):
    """The slots of one table: first slot, number of cache sets, then of overflow sets."""

    start: int
    sets: int
    overflow_sets: int
    ways: int


class State(NamedTuple):
    """Arrays of `CacheState`."""

    tags: NDArray[np.int32]
    stamps: NDArray[np.int32]
    reach: NDArray[np.int64]


# A horizon replaces pins that the backward pass releases. With pins, evictions, and therefore
# rounding, depended on how far the training had progressed.
class BatchStamps(NamedTuple):
    """Stamp of the batch, and horizon: slots with this or a later stamp are in use."""

    batch: int
    horizon: int


class StageLists(NamedTuple):
    """Lists of moves. Entries of table t start at ``room[t]``; `order` lists tables by descending
    number of lookups.
    """

    room: NDArray[np.int64]
    order: NDArray[np.int64]
    pending: NDArray[np.int64]
    in_row: NDArray[np.int64]
    in_slot: NDArray[np.int64]
    in_victim: NDArray[np.int64]
    out_row: NDArray[np.int64]
    out_slot: NDArray[np.int64]


class Arrivals(NamedTuple):
    """One table's rows to fetch: row, slot, and the row that leaves the slot (-1 for none)."""

    row: NDArray[np.int64]
    slot: NDArray[np.int64]
    victim: NDArray[np.int64]


class Found(NamedTuple):
    """Arrays of `Staging`, and per table the position of an invalid id, or -1."""

    rows_in: NDArray[np.int64]
    victims: NDArray[np.int64]
    released: NDArray[np.int64]
    stuck: NDArray[np.int64]
    bad: NDArray[np.int64]


@njit(**BODY)
def area_of(places, t):
    """Return the slots of table t."""
    return Area(places.slot_start[t], places.sets[t], places.overflow_sets[t], places.ways)


@njit(**BODY)
def spread(row, sets):
    """Return the set of a row. Fibonacci hashing spreads consecutive ids evenly; popular rows have
    consecutive ids.
    """
    return (((U(row) * U(0x9E3779B1)) & U(0xFFFFFFFF)) * U(sets)) >> U(32)


@njit(**BODY)
def spread_overflow(row, sets):
    """Return the first overflow set to search for a row, by another hash than that of `spread`."""
    return ((mix(U(row) + GOLDEN) >> U(32)) * U(sets)) >> U(32)


@njit(**BODY)
def prefetch_set(tags, stamps, first, ways):
    for way in range(U(0), U(ways), U(LINE)):
        prefetch(tags, first + way)
        prefetch(stamps, first + way)


@njit(**BODY)
def find_way(tags, first, ways, tag):
    """Return 1 + the way of `tag` in the set that starts at slot `first`, or 0 if it is absent."""
    way = find_equal(tags, first, tag)
    block = U(LANES)
    while block < U(ways) and way == block:
        way = block + find_equal(tags, first + block, tag)
        block += U(LANES)
    return np.int64(way + U(1)) if way < U(ways) else np.int64(0)


@njit(**BODY)
def find_overflow(tags, first, sets, ways, row, reach):
    """Return the slot of `row` in the overflow area that starts at slot `first`, or -1.

    The first `reach` of the row's overflow sets are searched.
    """
    home = spread_overflow(row, sets)
    for probe in range(U(reach)):
        start = U(first) + (home + probe) % U(sets) * U(ways)
        way = find_way(tags, start, ways, np.int32(row + 1))
        if way:
            return np.int64(start) + way - 1
    return np.int64(-1)


@njit(**BODY)
def find_slot(tags, area, row, reach):
    """Return the slot of `row` in its table, or -1; `reach` overflow sets are searched."""
    first = U(area.start) + spread(row, area.sets) * U(area.ways)
    way = find_way(tags, first, area.ways, np.int32(row + 1))
    slot = np.int64(first) + way - 1 if way else np.int64(-1)
    if reach and slot < 0:
        slot = find_overflow(
            tags, area.start + area.sets * area.ways, area.overflow_sets, area.ways, row, reach
        )
    return slot


@njit(**BODY)
def oldest(state, start, ways, horizon):
    """Return the slot with the smallest stamp in the set that starts at `start`, or -1 if even this
    slot is in use.
    """
    stamps, first = state.stamps, U(start)
    stamp = least(stamps, first, U(ways))
    for block in range(U(LANES), U(ways), U(LANES)):
        stamp = min(stamp, least(stamps, first + block, U(ways) - block))
    return np.int64(first) + find_way(stamps, first, ways, stamp) - 1 if stamp < horizon else np.int64(-1)


@njit(**BODY)
def last(state, start, ways, horizon):
    """Return the slot with the largest id in the set from `start` on, or -1 if all are in use."""
    first, before = U(start), np.int32(horizon)
    tag = largest_below(state.tags, state.stamps, first, U(ways), before)
    for block in range(U(LANES), U(ways), U(LANES)):
        tag = max(tag, largest_below(state.tags, state.stamps, first + block, U(ways) - block, before))
    return np.int64(first) + find_way(state.tags, first, ways, tag) - 1 if tag > 0 else np.int64(-1)


def by_score(policy):
    """Return a compiled function: slot of a set with the largest score, -1 if all are in use."""
    score = njit(**BODY)(policy.score)

    @njit(**BODY)
    def choose(state, first, ways, horizon):
        best, best_score = np.int64(-1), np.int64(0)
        for way in range(ways):
            slot = U(first + way)
            if state.stamps[slot] >= horizon:
                continue
            value = score(np.int64(state.tags[slot]) - 1, np.int64(state.stamps[slot]))
            if best < 0 or value > best_score:
                best, best_score = np.int64(slot), value
        return best

    return choose


def chooser(policies, code=0):
    """Return a compiled function that chooses a slot of a set by the policy of a given number."""
    # Vector code, because the search is most of the time of a miss.
    default = oldest if policies[0].keeps == "recent" else last
    first = default if policies[0].score is None else by_score(policies[0])

    @njit(**BODY)
    def only(state, start, ways, policy, horizon):
        return first(state, start, ways, horizon)

    if len(policies) == 1:
        return only
    others = chooser(policies[1:], code + 1)

    @njit(**BODY)
    def choose(state, start, ways, policy, horizon):
        if policy == code:
            return first(state, start, ways, horizon)
        return others(state, start, ways, policy, horizon)

    return choose


choose_victim = chooser(tuple(POLICIES.values()))


@njit(**BODY)
def victim(state, first, ways, policy, horizon):
    """Return the slot to reuse in the set that starts at slot `first`, or -1 if all slots are in
    use.

    An empty slot is best; otherwise the policy chooses among the slots that are not in use. The
    lower way wins ties, so the choice is a function of the contents of the set.
    """
    empty = find_way(state.tags, U(first), ways, np.int32(0))
    if empty:
        return first + empty - 1
    return choose_victim(state, first, ways, policy, horizon)


@njit(**BODY)
def find_rows(t, lookups, places, area, state, batch, out, pending):
    """Look up the slots of one table's ids; add the positions of ids that are not resident to
    `pending`.

    Returns (number of pending ids, position of an invalid id or -1).
    """
    misses, bags = 0, lookups.bags
    # Read these once: the compiler assumes that the stores below may change them.
    limit = places.rows[t]
    hot_rows = places.hot_rows[t]
    hot = places.hot[t]
    reach = state.reach[t]
    for f in lookups.table_features[lookups.table_start[t] : lookups.table_start[t + 1]]:
        begin, end = span(bags, lookups.key[f])
        for i in range(U(begin), U(end)):
            later = bags.values[min(i + U(AHEAD), U(end) - U(1))]
            prefetch_set(
                state.tags, state.stamps, U(area.start) + spread(later, area.sets) * U(area.ways), area.ways
            )
            row = bags.values[i]
            if row < 0 or row >= limit:
                return misses, np.int64(i)
            if row < hot_rows:
                out[i] = hot + row
                continue
            slot = find_slot(state.tags, area, row, reach)
            # Whether a row is resident cannot be predicted, so the code has no branch: the results
            # of a hit and of a miss are both written. A missing row stamps the padding after the
            # last slot.
            pending[U(misses)] = i
            misses += slot < 0
            state.stamps[U(slot) if slot >= 0 else U(len(state.stamps) - 1)] = batch
            out[i] = slot - area.start if slot >= 0 else -1
    return misses, np.int64(-1)


@njit(**BODY)
def release_overflow(area, state, stamps, out_row, out_slot, listed):
    """Empty the overflow slots that are not in use and add their rows to the lists.

    Returns (entries in the lists, whether any row stays).
    """
    stay = False
    first = area.start + area.sets * area.ways
    for slot in range(U(first), U(first + area.overflow_sets * area.ways)):
        if state.tags[slot] == 0:
            continue
        # A batch in flight uses this slot.
        if state.stamps[slot] >= stamps.horizon:
            stay = True
            continue
        out_row[U(listed)] = state.tags[slot] - 1
        out_slot[U(listed)] = slot
        state.tags[slot] = 0
        # Stamp the emptied slot: a checkpoint that saves only changed slots must see the change.
        state.stamps[slot] = stamps.batch
        listed += 1
    return listed, stay


@njit(**BODY)
def admit(row, area, state, policy, horizon):
    """Return a slot for a missing row, or -1 if every candidate is in use, and the number of
    overflow sets searched.
    """
    slot = victim(
        state, area.start + np.int64(spread(row, area.sets)) * area.ways, area.ways, policy, horizon
    )
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
def bring_in(pending, values, area, reach, places, state, stamps, out, arrivals, rows_in):
    """Assign a slot to every pending id; list the rows to fetch in `arrivals` and the rows that
    they replace in `out`.

    `pending` are positions in `values`, and `reach` is the number of overflow sets that lookups
    search. `rows_in` rows are listed before. Returns (rows to fetch, rows replaced, new reach, ids
    without a slot).
    """
    stuck, victims, misses = 0, 0, U(len(pending))
    for p in range(misses):
        later = values[U(pending[min(p + U(AHEAD), misses - U(1))])]
        prefetch_set(
            state.tags, state.stamps, U(area.start) + spread(later, area.sets) * U(area.ways), area.ways
        )
        i = U(pending[p])
        row = values[i]
        # Search again: the same row may be earlier in the list, in which case it has a slot by now.
        slot = find_slot(state.tags, area, row, reach)
        if slot < 0:
            slot, searched = admit(row, area, state, places.policy, stamps.horizon)
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
        out[i] = slot - area.start
    return rows_in, victims, reach, stuck


@njit(**BODY)
def stage_tables(member, counter, lookups, places, state, stamps, lists, result, out):
    """Assign slots to all rows of the batch, table by table; `out` receives them relative to the
    table's first slot.

    `result` receives the lengths of the lists; ids without a slot count as `stuck`. Rows of a table
    with an invalid id do not move.
    """
    while True:
        task = take(counter)
        if task >= len(lists.order):
            return
        # The largest table first: if it began last, the whole team would wait for it.
        t = lists.order[U(task)]
        area, begin, end = area_of(places, t), lists.room[t], lists.room[t + 1]
        # Ids are not deduplicated first: a repeated id finds the slot that was assigned to its
        # first occurrence.
        waiting = lists.pending[begin:end]
        misses, result.bad[t] = find_rows(t, lookups, places, area, state, stamps.batch, out, waiting)
        if result.bad[t] >= 0:
            continue
        if state.reach[t]:
            result.released[t], stay = release_overflow(
                area, state, stamps, lists.out_row[begin:end], lists.out_slot[begin:end], result.released[t]
            )
            state.reach[t] *= stay
        arrivals = Arrivals(lists.in_row[begin:end], lists.in_slot[begin:end], lists.in_victim[begin:end])
        result.rows_in[t], replaced, state.reach[t], result.stuck[t] = bring_in(
            waiting[:misses],
            lookups.bags.values,
            area,
            state.reach[t],
            places,
            state,
            stamps,
            out,
            arrivals,
            result.rows_in[t],
        )
        result.victims[t] += replaced


@njit(nogil=True, cache=IS_CACHED)
def stage(team, lookups, places, state, stamps, lists, result, out):
    """Run `stage_tables` with a team; plain tuples take half the time of named ones to unpack."""
    bags, key, table_start, table_features = lookups
    arguments = (
        stack_array(1, np.int64),
        Lookups(Bags(*bags), key, table_start, table_features),
        Places(*places),
        State(*state),
        BatchStamps(*stamps),
        StageLists(*lists),
        Found(*result),
        out,
    )
    run_team(team, stage_tables, arguments)


@njit(nogil=True, cache=True)
def compact(room, count, lists, first_row, noise, total, moves):
    """Append all entries of `lists` (row, slot) to `moves`, table by table; `moves` already has
    `total` entries.

    An entry of `moves` is a row of the group, a slot, a table and a noise key. Rows below 0 are
    skipped. Returns the new number of entries.
    """
    total = U(total)
    row, slot = lists
    group_row, group_slot, table, noise_key = moves
    # One thread adds the tables in order, so that the list does not depend on which thread staged
    # which table.
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
    """Write uniform weights in [-bound, bound], and zeros for state and clock.

    `full` is the number of floats of a row's full state.
    """
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
    """Initialize the slots of rows that were never written: uniform weights within the table's
    bound, zeros for state.

    `moves` are slots, tables and noise keys of rows. Only rows with ``absent[i]`` were never
    written. `bounds` are the largest initial weights of tables, `full` is the number of floats of a
    row's full state, and `chunks` the number of parts that threads process.
    """
    D, (into, tables, keys) = U(width), moves
    for chunk in prange(chunks):
        for i in range(U(len(into) * chunk // chunks), U(len(into) * (chunk + 1) // chunks)):
            if absent[i]:
                initialize_row(U(into[i]), keys[i], bounds[U(tables[i])], slots, D, U(full))


@njit(nogil=True, cache=True)
def locate(row, tables, places, reach, tags, out):
    """Set ``out[i]`` to the slot of (tables[i], row[i]), or to -1 if the row is not resident.

    `places` are the tables' first slots, sets and overflow sets, and the number of ways.
    """
    slot_start, sets, overflow_sets, ways = places
    for i in range(U(len(row))):
        t = U(tables[i])
        out[i] = find_slot(tags, Area(slot_start[t], sets[t], overflow_sets[t], ways), row[i], reach[t])


@njit(nogil=True, cache=True)
def row_keys(noise, tables, ids):
    """Return the noise key of each (table, id), as in `compact`."""
    out = np.empty(len(ids), dtype=np.uint64)
    for i in range(U(len(ids))):
        out[i] = key_of(noise, U(tables[i]), ids[i])
    return out
