"""Numba bodies of the row cache: find rows among the slots, choose victims, bring in what is missing.

Table t owns slots ``[slot_start[t], slot_start[t + 1])``: first ``sets[t]`` sets of W ways, then overflow sets of W
ways, which take rows whose own set is full of rows in use. A tag is a row's id + 1, 0 when the slot is empty; a stamp
is that of the last batch that used or emptied the slot. A slot whose stamp is not below the horizon is in use and is
never a victim.

Hot rows have slots for good: rows below ``head[t]`` and from ``tail[t]`` on lie, in their order, from slot ``hot[t]``
on, counted from the table's first. These slots have neither tag nor stamp.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from stratarec.kernels.bags.cpu import Bags
from stratarec.kernels.lanes import LANES, find_equal, least
from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.random.cpu import GOLDEN, key_of, mix, unit
from stratarec.kernels.team import BODY, run_team, take

U = np.uint64
LRU, LFU, RANK = 0, 1, 2
# Overflow sets that a row may lie in: enough that a row finds room while the area as a whole has some.
PROBES = 16
# Lookups ahead of the one in use whose set is prefetched.
AHEAD = 16
LINE = 16


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
def find_slot(tags, start, sets, overflow_sets, ways, row, reach):
    """The slot of `row` in the table whose first slot is `start`, or -1."""
    first = U(start) + spread(row, sets) * U(ways)
    way = find_way(tags, first, ways, np.int32(row + 1))
    slot = np.int64(first) + way - 1 if way else np.int64(-1)
    if reach and slot < 0:
        slot = find_overflow(tags, start + sets * ways, overflow_sets, ways, row, reach)
    return slot


@njit(**BODY)
def oldest(stamps, first, ways, horizon):
    """The slot of the set at `first` with the least stamp, or -1 when that is in use."""
    stamp = least(stamps, first, U(ways))
    for block in range(U(LANES), U(ways), U(LANES)):
        stamp = min(stamp, least(stamps, first + block, U(ways) - block))
    return np.int64(first) + find_way(stamps, first, ways, stamp) - 1 if stamp < horizon else np.int64(-1)


@njit(**BODY)
def victim(tags, stamps, counts, first, ways, policy, horizon):
    """The slot to give up in the set at `first`: an empty one, else the policy's choice of those not in use, or -1.

    Ties go to the lower way, so the choice is a function of the set's content alone.
    """
    empty = find_way(tags, U(first), ways, np.int32(0))
    if empty:
        return first + empty - 1
    if policy == LRU:
        return oldest(stamps, U(first), ways, horizon)
    best, best_score = np.int64(-1), np.int64(0)
    for way in range(ways):
        slot = U(first + way)
        if stamps[slot] >= horizon:
            continue
        if policy == LFU:
            score = -((np.int64(counts[slot]) << 32) + np.int64(stamps[slot]))
        else:
            score = np.int64(tags[slot])
        if best < 0 or score > best_score:
            best, best_score = np.int64(slot), score
    return best


@njit(**BODY)
def touch(slot, batch, stamps, counts, policy):
    """Note that `batch` uses the slot."""
    if policy == LFU:
        counts[slot] += np.uint32(stamps[slot] != batch and counts[slot] < np.uint32(0xFFFFFFFF))
    stamps[slot] = batch


@njit(**BODY)
def find_rows(
    features, bags, key, limit, head, tail, hot, start, sets, overflow_sets, reach, ways,
    tags, stamps, counts, policy, batch, out, pending,
):  # fmt: skip
    """Translate one table's ids into slots where they are resident; the places of the others go to `pending`.

    Returns (number pending, place of a bad id or -1).
    """
    misses = 0
    for f in features:
        begin, end = key[f] * bags.batch, (key[f] + 1) * bags.batch
        if not bags.singles:
            begin, end = bags.offsets[begin], bags.offsets[end]
        for i in range(U(begin), U(end)):
            later = bags.values[min(i + U(AHEAD), U(end) - U(1))]
            prefetch_set(tags, stamps, U(start) + spread(later, sets) * U(ways), ways)
            row = bags.values[i]
            if row < 0 or row >= limit:
                return misses, np.int64(i)
            if row < head or row >= tail:
                out[i] = hot + row - (0 if row < head else tail - head)
                continue
            slot = find_slot(tags, start, sets, overflow_sets, ways, row, reach)
            # Whether a row is there cannot be predicted: both outcomes are written, one of them in vain. A missing row
            # touches the padding behind the last slot.
            pending[U(misses)] = i
            misses += slot < 0
            touch(U(slot) if slot >= 0 else U(len(stamps) - 1), batch, stamps, counts, policy)
            out[i] = slot - start if slot >= 0 else -1
    return misses, np.int64(-1)


@njit(**BODY)
def release_overflow(start, sets, overflow_sets, ways, tags, stamps, batch, horizon, out_row, out_slot, listed):
    """Empty the overflow slots that are no longer in use, adding to a list. Returns (listed, whether any row stays)."""
    stay = False
    first = start + sets * ways
    for slot in range(U(first), U(first + overflow_sets * ways)):
        if tags[slot] == 0:
            continue
        if stamps[slot] >= horizon:
            stay = True
            continue
        out_row[U(listed)] = tags[slot] - 1
        out_slot[U(listed)] = slot
        tags[slot] = 0
        stamps[slot] = batch
        listed += 1
    return listed, stay


@njit(**BODY)
def admit(row, start, sets, overflow_sets, ways, tags, stamps, counts, policy, horizon):
    """The slot for a missing row, or -1 when every candidate is in use, and how many overflow sets were searched."""
    slot = victim(tags, stamps, counts, start + np.int64(spread(row, sets)) * ways, ways, policy, horizon)
    if slot >= 0:
        return slot, U(0)
    home = spread_overflow(row, overflow_sets)
    for probe in range(U(min(overflow_sets, PROBES))):
        first = start + sets * ways + np.int64((home + probe) % U(overflow_sets)) * ways
        empty = find_way(tags, U(first), ways, np.int32(0))
        if empty:
            return first + empty - 1, probe + U(1)
    return np.int64(-1), U(0)


@njit(**BODY)
def bring_in(
    pending, misses, values, start, sets, overflow_sets, reach, ways, tags, stamps, counts, policy, batch,
    horizon, out, in_row, in_slot, in_victim, rows_in,
):  # fmt: skip
    """Give every pending id a slot, adding to the list of rows that come in and the rows whose slots they take.

    Returns (rows in, victims, reach of the overflow area, ids that found no room).
    """
    stuck, victims = 0, 0
    for p in range(U(misses)):
        later = values[U(pending[min(p + U(AHEAD), U(misses) - U(1))])]
        prefetch_set(tags, stamps, U(start) + spread(later, sets) * U(ways), ways)
        i = U(pending[p])
        row = values[i]
        slot = find_slot(tags, start, sets, overflow_sets, ways, row, reach)
        if slot < 0:
            slot, searched = admit(row, start, sets, overflow_sets, ways, tags, stamps, counts, policy, horizon)
            if slot < 0:
                stuck += 1
                continue
            reach = max(reach, np.int64(searched))
            in_row[U(rows_in)] = row
            in_slot[U(rows_in)] = slot
            in_victim[U(rows_in)] = tags[U(slot)] - 1
            victims += tags[U(slot)] != 0
            rows_in += 1
            tags[U(slot)] = np.int32(row + 1)
            stamps[U(slot)] = batch
            counts[U(slot) if policy == LFU else U(0)] = np.uint32(1)
        out[i] = slot - start
    return rows_in, victims, reach, stuck


@njit(**BODY)
def stage_tables(
    member, counter, bags, key, table_start, table_features, rows, head, tail, hot, slot_start, sets,
    overflow_sets, ways, tags, stamps, counts, reach, policy, batch, horizon, out, room, order, pending, in_row,
    in_slot, in_victim, out_row, out_slot, rows_in, victims, released, stuck, bad,
):  # fmt: skip
    """Bring every row of the batch into its table's slots and write slots, relative to the table's first, to `out`.

    Lists of table t start at ``room[t]``, with `rows_in` and `released` entries; `victims` counts those among the rows
    that come in. `stuck` counts ids without room, `bad` is the place of a bad id or -1. Tables are taken in `order`.
    """
    while True:
        task = take(counter)
        if task >= len(order):
            return
        t = order[U(task)]
        features = table_features[table_start[t] : table_start[t + 1]]
        begin, end = room[t], room[t + 1]
        waiting = pending[begin:end]
        misses, bad[t] = find_rows(
            features, bags, key, rows[t], head[t], tail[t], hot[t], slot_start[t], sets[t], overflow_sets[t],
            reach[t], ways, tags, stamps, counts, policy, batch, out, waiting,
        )  # fmt: skip
        if bad[t] >= 0:
            continue
        if reach[t]:
            released[t], stay = release_overflow(
                slot_start[t], sets[t], overflow_sets[t], ways, tags, stamps, batch, horizon,
                out_row[begin:end], out_slot[begin:end], released[t],
            )  # fmt: skip
            reach[t] *= stay
        rows_in[t], replaced, reach[t], stuck[t] = bring_in(
            waiting, misses, bags.values, slot_start[t], sets[t], overflow_sets[t], reach[t], ways, tags, stamps,
            counts, policy, batch, horizon, out, in_row[begin:end], in_slot[begin:end], in_victim[begin:end],
            rows_in[t],
        )  # fmt: skip
        victims[t] += replaced


@njit(nogil=True, cache=True)
def stage(
    team, bags, key, table_start, table_features, rows, head, tail, hot, slot_start, sets,
    overflow_sets, ways, tags, stamps, counts, reach, policy, batch, horizon, out, room, order, pending, in_row,
    in_slot, in_victim, out_row, out_slot, rows_in, victims, released, stuck, bad,
):  # fmt: skip
    """`stage_tables` by a team."""
    bags = Bags(*bags)
    counter = np.zeros(1, np.int64)
    given = (
        counter, bags, key, table_start, table_features, rows, head, tail, hot, slot_start, sets,
        overflow_sets, ways, tags, stamps, counts, reach, policy, batch, horizon, out, room, order, pending,
        in_row, in_slot, in_victim, out_row, out_slot, rows_in, victims, released, stuck, bad,
    )  # fmt: skip
    run_team(team, stage_tables, given)


@njit(nogil=True, cache=True)
def compact(room, count, first_row, noise, row, slot, total, group_row, group_slot, table, noise_key):
    """Add the tables' lists to `total` entries: row in the group, slot, table, and the key of the row's noise.

    Rows below 0 are left out. Returns the number of entries.
    """
    total = U(total)
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
def initialize_row(slot, key, bound, weights, row_state, full_state, clock, D, full):
    """Uniform weights in +-bound and zeros for state and clock; `full` is how many floats its weights' state has."""
    for d in range(D):
        weights[slot * D + d] = -bound + (bound + bound) * unit(key, d)
    for place in range(slot * full, (slot + U(1)) * full):
        full_state[place] = np.float32(0.0)
    if len(row_state):
        row_state[slot] = np.float32(0.0)
    if len(clock):
        clock[slot] = np.int32(0)


@njit(parallel=True, nogil=True, cache=True)
def initialize(slots, keys, bounds, tables, absent, weights, row_state, full_state, clock, width, full, chunks):
    """Fill the slots of rows that were never written: uniform weights in +-bound of the row's table, no state."""
    D = U(width)
    for chunk in prange(chunks):
        for i in range(U(len(slots) * chunk // chunks), U(len(slots) * (chunk + 1) // chunks)):
            if not absent[i]:
                continue
            bound = bounds[U(tables[i])]
            initialize_row(U(slots[i]), keys[i], bound, weights, row_state, full_state, clock, D, U(full))


@njit(nogil=True, cache=True)
def locate(row, tables, slot_start, sets, overflow_sets, reach, ways, tags, out):
    """The slot of each (table, row), or -1; changes nothing."""
    for i in range(U(len(row))):
        t = U(tables[i])
        out[i] = find_slot(tags, slot_start[t], sets[t], overflow_sets[t], ways, row[i], reach[t])


@njit(nogil=True, cache=True)
def row_keys(noise, tables, ids):
    """The key of the noise of each (table, id), as `compact` gives it."""
    out = np.empty(len(ids), dtype=np.uint64)
    for i in range(U(len(ids))):
        out[i] = key_of(noise, U(tables[i]), ids[i])
    return out
