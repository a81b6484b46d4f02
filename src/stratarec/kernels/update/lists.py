"""A table's lookups, listed and brought together by row, for Numba kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.bags.cpu import Bags, Features, share
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import U


class Batch(NamedTuple):
    """A batch's share of a group: the features of each table, and how many lookups it has."""

    bags: Bags
    features: Features
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]
    table_lookups: NDArray[np.int64]


class Given(NamedTuple):
    """Flat pooled gradients, floats from one sample to the next; flat gradients of rows, where a feature's start."""

    pooled: NDArray[np.float32]
    stride: int
    rows: NDArray[np.float32]
    start: NDArray[np.int64]


class MemberScratch(NamedTuple):
    """What a member works on; the arrays of all members have one row for each."""

    index_of: NDArray[np.int32]
    slot_of: NDArray[np.int32]
    listed: NDArray
    source_of: NDArray[np.int64]
    scale_of: NDArray[np.float32]
    order: NDArray[np.int32]
    row_of: NDArray[np.uint64]
    count_of: NDArray[np.int32]
    row_sum: NDArray[np.float32]
    dense: NDArray[np.float32]
    touched: NDArray[np.uint8]


# Not a `BODY`, which must not return arrays: see `outline`.
@njit(nogil=True, cache=True)
def batch_of(given):
    """`Batch` of the plain tuples that Python gives."""
    bags, features, (table_start, table_features, table_lookups) = given
    return Batch(Bags(*bags), Features(*features), table_start, table_features, table_lookups)


@njit(**BODY)
def part_of(row, parts):
    """Which of the parts of a table a row belongs to; popular rows, which follow one another, are dealt out."""
    # By a product: a 64-bit division for every lookup made the backward of one giant table 0.98 instead of 0.84 ms.
    return (((U(row) * U(0x9E3779B1)) & U(0xFFFFFFFF)) * U(parts)) >> U(32)


@njit(**BODY)
def list_singles(bags, first, column, part, given, own):
    """As `list_lookups` for one feature of one unweighted id a bag, without scales."""
    number, parts = part
    lookups = U(0)
    for b in range(U(bags.batch)):
        row = bags.values[U(first) + b]
        # What is not of this part is written as well, and over: whose a row is cannot be predicted.
        own.listed[lookups] = row
        own.source_of[lookups] = np.int64(b) * given.stride + column
        lookups += U(part_of(row, parts) == U(number))
    return lookups


@njit(**BODY)
def list_lookups(these, part, scaled, bags, features, given, width, own):
    """List one table's lookups in ascending order of position: row, source (of the gradient) and maybe scale.

    A source below zero lies in the rows' gradient, at its complement. Of several parts only the rows of `part`,
    (number, parts), are listed. Returns the number of lookups.
    """
    number, parts = part
    lookups = U(0)
    for f in these:
        shift = features.key[f] * bags.batch
        origin = shift if bags.singles else bags.offsets[shift]
        for b in range(bags.batch):
            begin, end = shift + b, shift + b + 1
            if not bags.singles:
                begin, end = bags.offsets[begin], bags.offsets[end]
            factor = share(end - begin, features.mean[f])
            for i in range(U(begin), U(end)):
                row = bags.values[i]
                own.listed[lookups] = row
                if features.sequence[f]:
                    own.source_of[lookups] = ~(given.start[f] + (np.int64(i) - origin) * width)
                else:
                    own.source_of[lookups] = b * given.stride + features.column[f]
                    if scaled:
                        own.scale_of[lookups] = factor * bags.weights[i] if bags.weighted else factor
                lookups += U(parts == 1 or part_of(row, parts) == U(number))
    return lookups


@njit(**BODY)
def is_simple(these, bags, features):
    """Whether `these` features of a table are one, pooled, of one unweighted id a bag."""
    return bags.singles and not bags.weighted and len(these) == 1 and not features.sequence[these[0]]


@njit(**BODY)
def list_table(these, part, bags, features, given, width, own):
    """`list_singles` or `list_lookups`: the number of lookups, and whether they have scales."""
    if is_simple(these, bags, features):
        f = these[0]
        return list_singles(bags, features.key[f] * bags.batch, features.column[f], part, given, own), False
    scaled = bags.weighted
    for f in these:
        scaled |= features.mean[f] != 0
    return list_lookups(these, part, scaled, bags, features, given, width, own), scaled


@njit(**BODY)
def group(ids, lookups, limit, own):
    """Number the distinct rows in order of first lookup: ``slot_of[i]``, ``row_of[u]``, ``count_of[u]``.

    The map from row to number is open-addressed, at most half full, and empty again afterwards.
    """
    bits = U(4)
    while (U(1) << bits) < U(2) * lookups:
        bits += U(1)
    mask = (U(1) << bits) - U(1)
    distinct = U(0)
    for i in range(lookups):
        row = U(ids[i])
        # A row is its own place where all of them fit: neighbours then share lines, and nothing collides.
        slot = row if U(limit) <= mask else (row * U(0x9E3779B97F4A7C15)) >> (U(64) - bits)
        u = own.index_of[slot]
        while u >= 0 and own.row_of[U(u)] != row:
            slot = (slot + U(1)) & mask
            u = own.index_of[slot]
        # A branch: written without one this took as long for bags, and up to 1.2 times as long for a giant table.
        if u < 0:
            u = np.int32(distinct)
            own.index_of[slot] = u
            own.row_of[distinct] = row
            own.count_of[distinct] = 0
            distinct += U(1)
        own.count_of[U(u)] += 1
        own.slot_of[i] = u
    # All of it: to empty only what was filled would visit the same places in random order.
    for slot in range(mask + U(1)):
        own.index_of[slot] = -1
    return distinct


@njit(**BODY)
def sort_by_row(lookups, distinct, own):
    """A stable counting sort: each row's lookups lie together in `order`, still in ascending order of position.

    `count_of` comes in as the count of each distinct row and goes out as the end of its share of `order`.
    """
    end_of, running = own.count_of, np.int32(0)
    for u in range(distinct):
        count = end_of[u]
        end_of[u] = running
        running += count
    for i in range(lookups):
        u = U(own.slot_of[i])
        own.order[U(end_of[u])] = i
        end_of[u] += 1
