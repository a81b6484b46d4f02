"""Numba kernels of the swap: slot by slot, write back the row and read the row that replaces it.

So a slot is brought into the L1 cache once for both, and lists, counts and marks need no separate
passes. No row is fetched and evicted in the same batch, so entries are independent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.cache.cpu import initialize_row
from stratarec.kernels.codec.cpu import (
    IS_CACHED,
    batch_key,
    decode_row,
    encode_row,
    prefetch_lines,
    prefetch_slot,
)
from stratarec.kernels.random.cpu import key_of
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take
from stratarec.kernels.simd.bits import set_bit, test_bit
from stratarec.kernels.simd.prefetch import prefetch

U = np.uint64
# Number of entries to prefetch ahead.
AHEAD = 12
# Entries that a thread processes at a time: few enough for all threads to end together, and enough
# that the first rows of a piece, which are prefetched late, do not matter.
PIECE_ROWS = 128


class SwapLists(NamedTuple):
    """Rows to fetch: table t has ``count[t]`` entries from ``room[t]`` on, processed in pieces."""

    room: NDArray[np.int64]
    count: NDArray[np.int64]
    row: NDArray[np.int64]
    slot: NDArray[np.int64]
    victim: NDArray[np.int64]


class Rows(NamedTuple):
    """Per table: first row in the group, noise keys, and bound of initial weights."""

    first: NDArray[np.int64]
    noise: tuple
    bound: NDArray[np.float32]


@njit(**BODY)
def prefetch_swap(form, slots, home, slot, row, victim):
    records, written, changed = home
    size = U(form.record_bytes)
    prefetch_slot(form, slots, U(slot))
    # Of the 165 ns that a cold row takes, 47 are for the cache lines of its record.
    prefetch_lines(records, U(row) * size, size, U(64))
    prefetch(written, row >> 3)
    if victim >= 0:
        prefetch_lines(records, U(victim) * size, size, U(64))
        prefetch(written, victim >> 3)
        prefetch(changed, victim >> 3)


# Separate passes for lists, encoding, marking and decoding took 11.9 ms for 41,600 rows; this takes
# 6.2.
@njit(**BODY)
def swap_row(form, slots, home, t, rows, entry, key_of_batch):
    """Write back the victim, if there is one, and read the row; return whether the codec can
    represent the victim.

    `entry` is (slot, row, victim).
    """
    records, written, changed = home
    slot, row, victim = entry
    size, valid = U(form.record_bytes), True
    # The victim is written first, because the row overwrites its floats.
    if victim >= 0:
        place = U(rows.first[t] + victim)
        valid = encode_row(
            form, slots, slot, records, place * size, key_of(rows.noise, t, victim), key_of_batch
        )
        # Atomically, because rows of two threads may share a byte.
        set_bit(written, place)
        set_bit(changed, place)
    place = U(rows.first[t] + row)
    if test_bit(written, place):
        decode_row(form, records, place * size, slots, slot)
    else:
        D, full = U(form.width), U(form.full_state) * U(form.width)
        initialize_row(slot, key_of(rows.noise, t, row), rows.bound[t], slots, D, full)
    return valid


@njit(**BODY)
def swap_pieces(member, counter, form, slots, home, lists, pieces, rows, batch_number, refused):
    """Process pieces of the tables' lists; table t has pieces ``pieces[t]:pieces[t + 1]``.

    ``refused[piece]`` is set to an entry whose victim the codec cannot represent, if there is one.
    """
    key_of_batch = batch_key(batch_number)
    while True:
        piece = take(counter)
        if piece >= pieces[-1]:
            return
        t = U(0)
        while pieces[t + U(1)] <= piece:
            t += U(1)
        first = U(lists.room[t] + (piece - pieces[t]) * PIECE_ROWS)
        last = min(first + U(PIECE_ROWS), U(lists.room[t] + lists.count[t]))
        row = lists.row
        slot = lists.slot
        victim = lists.victim
        origin = rows.first[t]
        for i in range(first, min(first + U(AHEAD), last)):
            prefetch_swap(form, slots, home, slot[i], origin + row[i], origin + victim[i])
        for i in range(first, last):
            j = min(i + U(AHEAD), last - U(1))
            prefetch_swap(form, slots, home, slot[j], origin + row[j], origin + victim[j])
            if not swap_row(form, slots, home, t, rows, (U(slot[i]), row[i], victim[i]), key_of_batch):
                refused[U(piece)] = i
                break


@njit(nogil=True, cache=IS_CACHED)
def swap(team, form, slots, home, lists, rows, batch_number):
    """Swap all listed rows; return the first entry whose victim the codec cannot store, or -1."""
    lists = SwapLists(*lists)
    count = lists.count
    pieces = np.zeros(len(count) + 1, np.int64)
    for t in range(len(count)):
        pieces[t + 1] = pieces[t] + (count[t] + PIECE_ROWS - 1) // PIECE_ROWS
    # One entry per piece, so that the result does not depend on the timing of threads.
    refused = np.full(pieces[-1], -1)
    arguments = (
        stack_array(1, np.int64),
        form,
        slots,
        home,
        lists,
        pieces,
        Rows(*rows),
        batch_number,
        refused,
    )
    run_team(team, swap_pieces, arguments)
    for entry in refused:
        if entry >= 0:
            return entry
    return np.int64(-1)
