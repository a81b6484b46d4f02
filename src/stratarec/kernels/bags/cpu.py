"""A batch and its features as Numba kernels take them, and the kernels that read ids alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY

U = np.uint64


class Bags(NamedTuple):
    """`BagBatch`, with placeholders where `singles` (every bag holds one id) or not `weighted`."""

    values: NDArray
    offsets: NDArray[np.int64]
    singles: bool
    weights: NDArray[np.float32]
    weighted: bool
    batch: int


class Features(NamedTuple):
    """Parallel arrays: place among the batch's keys, first row and rows of its table, first output column, and kind."""

    key: NDArray[np.int64]
    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    column: NDArray[np.int64]
    mean: NDArray[np.int64]
    sequence: NDArray[np.int64]


@njit(**BODY)
def share(length, mean):
    """What a lookup of a bag of `length` counts for."""
    return np.float32(1.0) / np.float32(length) if mean and length > 1 else np.float32(1.0)


@njit(**BODY)
def span(bags, key):
    """First and last (not included) lookup of the feature that is number `key` of the batch."""
    begin, end = key * bags.batch, (key + 1) * bags.batch
    if not bags.singles:
        begin, end = bags.offsets[begin], bags.offsets[end]
    return begin, end


@njit(nogil=True, cache=True)
def first_outside(bags, filled, key, rows, sequence):
    """The place of an id that is looked up and not below its feature's `rows`; or -1."""
    bags = Bags(*bags)
    for f in range(len(key)):
        begin, end = span(bags, key[f])
        if bags.singles and len(filled) and not sequence[f]:
            end = begin + filled[f]
        limit, wrong = U(rows[f]), 0
        # Without a branch in it the loop is vectorised.
        for i in range(U(begin), U(end)):
            wrong += U(bags.values[i]) >= limit
        if wrong:
            for i in range(begin, end):
                if U(bags.values[i]) >= limit:
                    return i
    return -1


@njit(nogil=True, cache=True)
def mark_rows(bags, key, base, bits):
    """Set the bit of every row that the batch looks up."""
    bags = Bags(*bags)
    for f in range(len(key)):
        begin, end = span(bags, key[f])
        for i in range(U(begin), U(end)):
            row = U(base[f] + bags.values[i])
            bits[row >> U(3)] |= np.uint8(1) << np.uint8(row & U(7))


@njit(nogil=True, cache=True)
def first_falling(offsets, total):
    """The first place i at which offsets[i], offsets[i + 1] fall or do not lie in [0, total]; or -1."""
    last = len(offsets) - 1
    falls = np.int64(offsets[0] < 0) + np.int64(offsets[last] > total)
    # Without a branch in it the loop is vectorised: batches are nearly always right.
    for i in range(U(last)):
        falls += offsets[i] > offsets[i + U(1)]
    if falls == 0:
        return -1
    for i in range(last):
        if offsets[i] < 0 or offsets[i] > offsets[i + 1] or offsets[i + 1] > total:
            return i
    return last
