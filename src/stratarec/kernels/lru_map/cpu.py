"""Numba bodies of the recency map.

The table has at least twice as many places as there are slots and holds slot + 1, 0 for none; collisions go to the next
place. Removal moves later entries of the run back, so that no tombstones slow the map down in time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.random.cpu import mix
from stratarec.kernels.simd.prefetch import prefetch

AHEAD = 8
U = np.uint64


@njit(nogil=True, cache=True, inline="always")
def home(table, row):
    return mix(row) & U(len(table) - 1)


@njit(nogil=True, cache=True)
def find(table, row_of, rows, slots):
    mask = U(len(table) - 1)
    for i in range(len(rows)):
        prefetch(table, np.int64(home(table, rows[min(i + AHEAD, len(rows) - 1)])))
        place = home(table, rows[i])
        slots[i] = -1
        while table[place] != 0:
            slot = table[place] - 1
            if row_of[U(slot)] == rows[i]:
                slots[i] = slot
                break
            place = (place + U(1)) & mask


@njit(nogil=True, cache=True, inline="always")
def unlink(older, newer, slot):
    newer[older[slot]] = newer[slot]
    older[newer[slot]] = older[slot]


@njit(nogil=True, cache=True, inline="always")
def link_newest(older, newer, slot):
    head = len(older) - 1
    before = older[head]
    # A ring through the head: no end is a case of its own.
    older[slot], newer[slot] = before, head
    newer[before] = slot
    older[head] = slot


@njit(nogil=True, cache=True)
def touch(older, newer, slots):
    for slot in slots:
        unlink(older, newer, slot)
        link_newest(older, newer, slot)


@njit(nogil=True, cache=True)
def insert(table, row_of, older, newer, free, count, rows, slots):
    mask = U(len(table) - 1)
    for i in range(len(rows)):
        slot = free[len(free) - 1 - count[0]]
        count[0] += 1
        place = home(table, rows[i])
        while table[place] != 0:
            place = (place + U(1)) & mask
        table[place] = slot + 1
        row_of[slot] = rows[i]
        link_newest(older, newer, slot)
        slots[i] = slot


@njit(nogil=True, cache=True)
def oldest(newer, slots):
    slot = newer[len(newer) - 1]
    for i in range(len(slots)):
        slots[i] = slot
        slot = newer[slot]


@njit(nogil=True, cache=True)
def remove(table, row_of, older, newer, free, count, slots):
    mask = U(len(table) - 1)
    for slot in slots:
        hole = home(table, row_of[slot])
        while table[hole] != slot + 1:
            hole = (hole + U(1)) & mask
        place = (hole + U(1)) & mask
        while table[place] != 0:
            wanted = home(table, row_of[table[place] - 1])
            # An entry may fill the hole unless its home lies between the hole and itself.
            if ((place - wanted) & mask) >= ((place - hole) & mask):
                table[hole] = table[place]
                hole = place
            place = (place + U(1)) & mask
        table[hole] = 0
        unlink(older, newer, slot)
        row_of[slot] = -1
        count[0] -= 1
        free[len(free) - 1 - count[0]] = slot
