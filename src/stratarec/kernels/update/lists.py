"""List a table's lookups and sort them by row, for Numba kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.bags import Bags, Features, share
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import U

# Largest number of bits of a digit of the radix sort: a pass writes to as many cache lines at once
# as the digit has values.
DIGIT_BITS = 11
# Up to so many lookups are sorted by insertion.
_FEW = 24


class Batch(NamedTuple):
    """Lookups of a batch in one group of tables, its features, and the features of each table."""

    bags: Bags
    features: Features
    table_start: NDArray[np.int64]
    table_features: NDArray[np.int64]


class GradientArrays(NamedTuple):
    """Flat pooled gradients and their floats per sample; flat gradients of sequences and the start
    of each feature.
    """

    pooled: NDArray[np.float32]
    stride: int
    rows: NDArray[np.float32]
    start: NDArray[np.int64]


class MemberScratch(NamedTuple):
    """Scratch arrays of one thread of a team. The arrays of the whole team have one row per thread.

    `squares` uses the same memory as `keys`: the second half of `keys` is free once the keys are
    sorted.
    """

    listed: NDArray
    """Row of each lookup of the table."""
    source_of: NDArray[np.int64]
    """Position of the gradient of each lookup."""
    scale_of: NDArray[np.float32]
    """Factor of the gradient of each lookup."""
    keys: NDArray[np.uint64]
    """Keys that are sorted, and the buffer of the radix sort."""
    counters: NDArray[np.int32]
    order: NDArray[np.int32]
    """Lookups in order of their rows."""
    row_of: NDArray[np.uint64]
    """Distinct rows, ascending."""
    end_of: NDArray[np.int32]
    """End of the lookups of each distinct row in `order`."""
    row_sum: NDArray[np.float32]
    """Summed gradient of one row."""
    dense: NDArray[np.float32]
    """Summed gradients of all rows of a small table, ``[rows * D]``."""
    touched: NDArray[np.uint8]
    """Whether each row of a small table has a lookup."""
    squares: NDArray[np.float64]
    """Sum of squares of each distinct row, at its first lookup."""


def batch_arrays(layout, bags):
    """Return the argument of `batch_of`: plain tuples reach compiled code in a third of the time of
    named ones.
    """
    return bags.compiled, layout.features(bags), (layout.table_start, layout.table_features)


# It counts references, because it returns arrays: see `outline`.
@njit(**{**BODY, "_nrt": True})
def batch_of(arrays):
    """Return the `Batch` with the given fields, which come from `batch_arrays`."""
    bags, features, (table_start, table_features) = arrays
    return Batch(Bags(*bags), Features(*features), table_start, table_features)


@njit(**BODY)
def part_of(row, parts):
    """Return the part of a table that has a row; neighbours, often popular, are spread."""
    # By a multiplication: dividing 64 bits for every lookup made the backward pass of one giant
    # table take 0.98 ms, not 0.84.
    return (((U(row) * U(0x9E3779B1)) & U(0xFFFFFFFF)) * U(parts)) >> U(32)


@njit(**BODY)
def list_singles(bags, first, column, part, gradients, scratch):
    """Do the work of `list_lookups` for one unweighted id per bag, without scales."""
    number, parts = part
    lookups = U(0)
    for b in range(U(bags.batch)):
        row = bags.values[U(first) + b]
        # Rows of other parts are written too, then overwritten, because a branch could not be
        # predicted.
        scratch.listed[lookups] = row
        scratch.source_of[lookups] = np.int64(b) * gradients.stride + column
        lookups += U(part_of(row, parts) == U(number))
    return lookups


@njit(**BODY)
def list_lookups(these, part, scaled, bags, features, gradients, width, scratch):
    """List the lookups of one table in ascending order of position: row, source of the gradient,
    and scale if `scaled`.

    A source below zero is the bitwise complement of a position in the gradients of sequences. Only
    rows of `part`, which is (number, parts), are listed. Returns the number of lookups.
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
                scratch.listed[lookups] = row
                if features.sequence[f]:
                    scratch.source_of[lookups] = ~(gradients.start[f] + (np.int64(i) - origin) * width)
                else:
                    scratch.source_of[lookups] = b * gradients.stride + features.column[f]
                    if scaled:
                        scratch.scale_of[lookups] = factor * bags.weights[i] if bags.weighted else factor
                lookups += U(parts == 1 or part_of(row, parts) == U(number))
    return lookups


@njit(**BODY)
def is_simple(these, bags, features):
    """Whether a table has a single feature, pooled and with one unweighted id per bag."""
    return bags.singles and not bags.weighted and len(these) == 1 and not features.sequence[these[0]]


@njit(**BODY)
def list_table(these, part, bags, features, gradients, width, scratch):
    """List the lookups of a table; return their number, and whether they have scales."""
    if is_simple(these, bags, features):
        f = these[0]
        return list_singles(
            bags, features.key[f] * bags.batch, features.column[f], part, gradients, scratch
        ), False
    scaled = bags.weighted
    for f in these:
        scaled |= features.mean[f] != 0
    return list_lookups(these, part, scaled, bags, features, gradients, width, scratch), scaled


@njit(**BODY)
def digits_of(lookups, limit):
    """Return passes and bits of a digit that sort numbers below `limit` in the least time."""
    bits = U(1)
    while bits < U(40) and (U(1) << bits) < U(limit):
        bits += U(1)
    passes, digit, least = U(1), bits, ~U(0)
    for count in range(U(1), U(9)):
        size = (bits + count - U(1)) // count
        # Moving a lookup takes 2 ns; clearing a counter and adding it up takes about 1 ns.
        cost = count * (U(2) * lookups + (U(1) << size))
        if cost < least and size <= U(DIGIT_BITS):
            passes, digit, least = count, size, cost
    return passes, digit


@njit(**BODY)
def move_by_digit(lookups, shift, digit, halves, sides, scratch):
    """Run a pass of the radix sort by the digit at bit `shift`, whose values are counted, and count
    the next digit.

    `halves` are the positions of source and target in `keys`; `sides` are the counters of this pass
    and of the next one.
    """
    values, (source, target), (side, other) = U(1) << digit, halves, sides
    mask, running = values - U(1), np.int32(0)
    for value in range(values):
        scratch.counters[other + value] = 0
        count = scratch.counters[side + value]
        scratch.counters[side + value] = running
        running += count
    for i in range(lookups):
        key = scratch.keys[source + i]
        place = side + ((key >> shift) & mask)
        scratch.keys[target + U(scratch.counters[place])] = key
        scratch.counters[place] += 1
        scratch.counters[other + ((key >> (shift + digit)) & mask)] += 1


@njit(**BODY)
def sort_few(ids, lookups, shift, scratch):
    """Do the work of `sort_many` by insertion, which is faster for few lookups."""
    for i in range(lookups):
        key, place = U(ids[i]) << shift | i, i
        while place > 0 and scratch.keys[place - U(1)] > key:
            scratch.keys[place] = scratch.keys[place - U(1)]
            place -= U(1)
        scratch.keys[place] = key


@njit(**BODY)
def sort_many(ids, lookups, limit, shift, scratch):
    """Write the sorted keys of `ids` (below `limit`) to ``scratch.keys`` by a radix sort.

    A key is ``id << shift | position``. The second half of ``scratch.keys`` is used as a buffer.
    """
    passes, digit = digits_of(lookups, limit)
    half, side, mask = U(len(scratch.keys)) // U(2), U(0), (U(1) << digit) - U(1)
    source, target = (half, U(0)) if passes % U(2) else (U(0), half)
    for value in range(mask + U(1)):
        scratch.counters[value] = 0
    for i in range(lookups):
        row = U(ids[i])
        scratch.keys[source + i] = row << shift | i
        scratch.counters[row & mask] += 1
    for number in range(passes):
        other = U(1 << DIGIT_BITS) - side
        move_by_digit(lookups, shift + number * digit, digit, (source, target), (side, other), scratch)
        source, target, side = target, source, other


@njit(**BODY)
def sort_by_row(ids, lookups, limit, scratch):
    """Sort lookups into `order`, by row and then by position; return the number of distinct rows.

    Distinct rows are numbered in ascending order: row u is ``row_of[u]``, and its lookups in
    `order` end at ``end_of[u]``. A key is a row, followed by a position in its last bits.
    """
    shift = U(1)
    while (U(1) << shift) < lookups:
        shift += U(1)
    if lookups <= U(_FEW):
        sort_few(ids, lookups, shift, scratch)
    else:
        sort_many(ids, lookups, limit, shift, scratch)
    distinct, mask = U(0), (U(1) << shift) - U(1)
    scratch.keys[lookups] = ~U(0)
    for i in range(lookups):
        key = scratch.keys[i]
        scratch.order[i] = key & mask
        # Written for every lookup: the last lookup of a row overwrites the others without a branch.
        scratch.row_of[distinct] = key >> shift
        scratch.end_of[distinct] = i + U(1)
        distinct += U(key >> shift != scratch.keys[i + U(1)] >> shift)
    return distinct
