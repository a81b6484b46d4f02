"""A table's lookups, listed and brought together by row, for Numba kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.bags.cpu import Bags, Features, share
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import U

DIGIT_BITS = 11
"""Of a radix sort's digit at most: as many lines as it has values are written at once."""
_FEW = 24


class Batch(NamedTuple):
    """A batch's share of a group, and the features of each table."""

    bags: Bags
    features: Features
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]


class Given(NamedTuple):
    """Flat pooled gradients, floats from one sample to the next; flat gradients of rows, where a feature's start."""

    pooled: NDArray[np.float32]
    stride: int
    rows: NDArray[np.float32]
    start: NDArray[np.int64]


class MemberScratch(NamedTuple):
    """What a member works on; the arrays of all members have one row for each."""

    listed: NDArray
    source_of: NDArray[np.int64]
    scale_of: NDArray[np.float32]
    keys: NDArray[np.uint64]
    counters: NDArray[np.int32]
    order: NDArray[np.int32]
    row_of: NDArray[np.uint64]
    end_of: NDArray[np.int32]
    row_sum: NDArray[np.float32]
    dense: NDArray[np.float32]
    touched: NDArray[np.uint8]
    squares: NDArray[np.float64]
    """The memory of `keys`, whose second half is free once they are sorted."""


def batch_given(layout, bags):
    """A batch as `batch_of` takes it: plain tuples reach compiled code in a third of the time that named ones need."""
    return bags.compiled, layout.features(bags), (layout.table_start, layout.table_features)


# Not a `BODY`, which must not return arrays: see `outline`.
@njit(nogil=True, cache=True)
def batch_of(given):
    """`Batch` of the plain tuples that Python gives."""
    bags, features, (table_start, table_features) = given
    return Batch(Bags(*bags), Features(*features), table_start, table_features)


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
def digits_of(lookups, limit):
    """Passes of a radix sort of numbers below `limit`, and the bits of each: those that are estimated to be fastest."""
    bits = U(1)
    while bits < U(40) and (U(1) << bits) < U(limit):
        bits += U(1)
    passes, digit, least = U(1), bits, ~U(0)
    for tried in range(U(1), U(9)):
        each = (bits + tried - U(1)) // tried
        # A lookup moves in 2 ns, a counter is emptied and summed in about 1.
        cost = tried * (U(2) * lookups + (U(1) << each))
        if cost < least and each <= U(DIGIT_BITS):
            passes, digit, least = tried, each, cost
    return passes, digit


@njit(**BODY)
def move_by_digit(lookups, shift, digit, halves, sides, own):
    """A pass of the radix sort by the digit that begins at bit `shift`, of which there are counts; counts the next one.

    `halves` are where `keys` come from and go to, `sides` which counters are this pass's and which the next one's.
    """
    values, (source, target), (side, other) = U(1) << digit, halves, sides
    mask, running = values - U(1), np.int32(0)
    for each in range(values):
        own.counters[other + each] = 0
        count = own.counters[side + each]
        own.counters[side + each] = running
        running += count
    for i in range(lookups):
        key = own.keys[source + i]
        place = side + ((key >> shift) & mask)
        own.keys[target + U(own.counters[place])] = key
        own.counters[place] += 1
        own.counters[other + ((key >> (shift + digit)) & mask)] += 1


@njit(**BODY)
def sort_few(ids, lookups, shift, own):
    """`keys` by insertion: what is counted in a radix sort costs more than a handful of lookups."""
    for i in range(lookups):
        key, place = U(ids[i]) << shift | i, i
        while place > 0 and own.keys[place - U(1)] > key:
            own.keys[place] = own.keys[place - U(1)]
            place -= U(1)
        own.keys[place] = key


@njit(**BODY)
def sort_many(ids, lookups, limit, shift, own):
    """`keys` by a radix sort, which ends in their first half."""
    passes, digit = digits_of(lookups, limit)
    half, side, mask = U(len(own.keys)) // U(2), U(0), (U(1) << digit) - U(1)
    source, target = (half, U(0)) if passes % U(2) else (U(0), half)
    for each in range(mask + U(1)):
        own.counters[each] = 0
    for i in range(lookups):
        row = U(ids[i])
        own.keys[source + i] = row << shift | i
        own.counters[row & mask] += 1
    for number in range(passes):
        other = U(1 << DIGIT_BITS) - side
        move_by_digit(lookups, shift + number * digit, digit, (source, target), (side, other), own)
        source, target, side = target, source, other


@njit(**BODY)
def sort_by_row(ids, lookups, limit, own):
    """Bring lookups of a row together: `order` is by row, then by position; gives the number of distinct rows.

    Of each of them, in ascending order, ``row_of[u]``, and ``end_of[u]`` where its share of `order` ends. A key is a
    row and, in its last bits, a position.
    """
    shift = U(1)
    while (U(1) << shift) < lookups:
        shift += U(1)
    if lookups <= U(_FEW):
        sort_few(ids, lookups, shift, own)
    else:
        sort_many(ids, lookups, limit, shift, own)
    distinct, mask = U(0), (U(1) << shift) - U(1)
    own.keys[lookups] = ~U(0)
    for i in range(lookups):
        key = own.keys[i]
        own.order[i] = key & mask
        # Written for every lookup, kept for a row's last one: without a branch.
        own.row_of[distinct] = key >> shift
        own.end_of[distinct] = i + U(1)
        distinct += U(key >> shift != own.keys[i + U(1)] >> shift)
    return distinct
