"""Numba bodies of the swap: a row goes home and the one that takes its slot comes in, slot by slot.

A slot is in the first cache once for both, and nothing is listed, counted or marked apart. No row comes in and goes out
in the same batch, so entries are independent of each other.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.bits import set_bit, test_bit
from stratarec.kernels.cache.cpu import initialize_row
from stratarec.kernels.codec.cpu import decode_row, encode_row, prefetch_lines, prefetch_slot, write_key_of
from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.random.cpu import key_of
from stratarec.kernels.team import BODY, run_team, take

U = np.uint64
# Entries ahead of the one in use.
AHEAD = 12


@njit(**BODY)
def prefetch_swap(form, slots, home, slot, row, victim):
    weights, row_state, full_state, clock = slots
    records, written, changed = home
    size = U(form[-1])
    prefetch_slot(form, weights, row_state, full_state, clock, U(slot))
    prefetch_lines(records, U(row) * size, size, U(64))
    prefetch(written, row >> 3)
    if victim >= 0:
        prefetch_lines(records, U(victim) * size, size, U(64))
        prefetch(written, victim >> 3)
        prefetch(changed, victim >> 3)


@njit(**BODY)
def swap_row(form, slots, home, slot, first_row, row, victim, t, noise, bound, write_key):
    """Send the victim home, if there is one, and bring the row in; returns whether the codec can hold the victim."""
    weights, row_state, full_state, clock = slots
    records, written, changed = home
    size, held = U(form[-1]), True
    if victim >= 0:
        place = U(first_row + victim)
        key = key_of(noise, t, victim)
        held = encode_row(form, weights, row_state, full_state, clock, slot, records, place * size, key, write_key)
        set_bit(written, place)
        set_bit(changed, place)
    place = U(first_row + row)
    if test_bit(written, place):
        decode_row(form, records, place * size, weights, row_state, full_state, clock, slot)
    else:
        key = key_of(noise, t, row)
        D = U(form[4])
        initialize_row(slot, key, bound, weights, row_state, full_state, clock, D, D * U(form[6]))
    return held


@njit(**BODY)
def swap_pieces(
    member, counter, form, slots, home, room, count, pieces, piece_rows, in_row, in_slot, in_victim, first_row,
    noise, bound, write, refused,
):  # fmt: skip
    """Take pieces of the tables' lists; table t has those from ``pieces[t]`` on. `refused` has one entry a piece."""
    write_key = write_key_of(write)
    while True:
        piece = take(counter)
        if piece >= pieces[-1]:
            return
        t = U(0)
        while pieces[t + U(1)] <= piece:
            t += U(1)
        first = U(room[t] + (piece - pieces[t]) * piece_rows)
        last = min(first + U(piece_rows), U(room[t] + count[t]))
        origin = first_row[t]
        for i in range(first, min(first + U(AHEAD), last)):
            prefetch_swap(form, slots, home, in_slot[i], origin + in_row[i], origin + in_victim[i])
        for i in range(first, last):
            j = min(i + U(AHEAD), last - U(1))
            prefetch_swap(form, slots, home, in_slot[j], origin + in_row[j], origin + in_victim[j])
            held = swap_row(
                form, slots, home, U(in_slot[i]), origin, in_row[i], in_victim[i], t, noise, bound[t],
                write_key,
            )  # fmt: skip
            if not held:
                refused[U(piece)] = i
                break


@njit(nogil=True, cache=True)
def swap(
    team, form, slots, home, room, count, piece_rows, in_row, in_slot, in_victim, first_row, noise,
    bound, write,
):  # fmt: skip
    """All lists; returns the first entry whose victim the codec cannot hold, or -1."""
    pieces = np.zeros(len(count) + 1, np.int64)
    for t in range(len(count)):
        pieces[t + 1] = pieces[t] + (count[t] + piece_rows - 1) // piece_rows
    refused = np.full(pieces[-1], -1)
    given = (
        np.zeros(1, np.int64), form, slots, home, room, count, pieces, piece_rows, in_row, in_slot, in_victim,
        first_row, noise, bound, write, refused,
    )  # fmt: skip
    run_team(team, swap_pieces, given)
    for entry in refused:
        if entry >= 0:
            return entry
    return np.int64(-1)
