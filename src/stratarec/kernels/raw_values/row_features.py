"""Features of a few rows of raw values, from values to pooled vectors, in one compiled call.

For one row, each call of a library takes longer than its work, so all steps are here. A few values
are computed without releasing Python's lock: another thread would take the lock at once, and to get
it back takes longer than the work.

Shapes: F sparse features, D dense features, N rows, I values that are integers, T texts, V
vocabularies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.bags import share
from stratarec.kernels.random import HASH_SEED
from stratarec.kernels.random.cpu import mix
from stratarec.kernels.raw_values.text_hash import hash_text
from stratarec.kernels.raw_values.value_index import IndexArrays, TextValues, find_ids, prefetch_keys
from stratarec.kernels.runtime.python_lock import release_lock, take_lock
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.prefetch import prefetch_row

U = np.uint64
# Number of values whose features are computed without releasing Python's lock.
_FEW = 256
_LARGEST = float(np.finfo(np.float32).max)


class RowPlan(NamedTuple):
    """Features, vocabularies and tables of an export, which are the same for all rows.

    Values are given in an order of features in which integers are before texts; they are at
    *places* of this order.
    """

    sparse: NDArray[np.int64]
    """``[F, 6]``: the feature at a place, its vocabulary, the first element of its table in
    `weights`, the width of the table (0 if it is not pooled), its first column in the pooled
    output, and whether it is pooled by the mean."""
    dense: NDArray[np.float64]
    """``[D, 3]`` of each feature: whether its logarithm is used, mean and deviation."""
    vocabularies: IndexArrays
    """Values of vocabularies."""
    weights: NDArray[np.float32]
    """Elements of tables."""
    columns: int
    """Number of columns of the pooled output."""


class RowValues(NamedTuple):
    """Raw values of N rows. Those of a feature follow one another, row by row."""

    rows: int
    """N."""
    numbers: NDArray[np.float64]
    """``[D * N]``, NaN where missing."""
    logarithms: NDArray[np.float64]
    """``[D * N]`` ``log1p`` of absolute numbers."""
    limit: float
    """Largest absolute number."""
    integers: int
    """I."""
    texts: int
    """T."""
    words: NDArray[np.int64]
    """``[I + T + F * N]``: integers (or the bits of unsigned ones), the number of bytes of each
    text, and the number of values of each feature in each row; the last part is left out if all are
    1."""
    content: NDArray[np.uint8]
    """Bytes of all texts, and at least one byte."""


class RowFeatures(NamedTuple):
    """Features of N rows."""

    dense: NDArray[np.float32]
    """``[N, D]``."""
    pooled: NDArray[np.float32]
    """``[N, columns]``."""
    ids: NDArray[np.int32]
    """``[I + T]`` ids of all features, feature after feature."""
    offsets: NDArray[np.int64]
    """``[F * N + 1]`` first id of each feature in each row, and the end of the last one."""


def compute_features(plan: RowPlan, values: RowValues) -> RowFeatures | None:
    """Return the features of rows, or None if a number is beyond the limit. Tables must have a row
    for each id.
    """
    rows, ids = values.rows, values.integers + values.texts
    features = RowFeatures(
        np.empty((rows, len(plan.dense)), np.float32),
        np.empty((rows, plan.columns), np.float32),
        np.empty(ids, np.int32),
        np.empty(len(plan.sparse) * rows + 1, np.int64),
    )
    fits = _compute(
        plan.sparse, plan.dense, tuple(plan.vocabularies), plan.weights, tuple(values), tuple(features)
    )
    return features if fits else None


@njit(cache=True, error_model="numpy")
def _compute(sparse, dense, vocabularies, weights, values, features):
    values, features = RowValues(*values), RowFeatures(*features)
    are_many = len(features.ids) + len(values.numbers) > _FEW
    state = release_lock() if are_many else np.int64(0)
    fits = _standardize(dense, values, features.dense)
    _fill_offsets(sparse, values, features.offsets)
    texts = TextValues(values.content, np.empty(values.texts + 1, np.int64))
    hashes = np.empty(values.integers + values.texts, np.uint64)
    _hash(values, texts, hashes)
    _fill_ids(sparse, IndexArrays(*vocabularies), weights, values, texts, hashes, features)
    _pool(sparse, weights, values.rows, features)
    if are_many:
        take_lock(state)
    return fits


@njit(**BODY)
def _standardize(dense, values, out):
    """Compute `transform` of the data layer; return whether all numbers are within the limit."""
    for d in range(len(dense)):
        is_log, mean, deviation = dense[d]
        for n in range(values.rows):
            number = values.numbers[d * values.rows + n]
            if abs(number) > values.limit:
                return False
            if is_log:
                size = values.logarithms[d * values.rows + n]
                number = -size if number < 0 else size
            number = (number - mean) / deviation
            out[n, d] = 0.0 if number != number else min(max(number, -_LARGEST), _LARGEST)
    return True


@njit(**BODY)
def _fill_offsets(sparse, values, offsets):
    rows, first = values.rows, values.integers + values.texts
    offsets[0] = 0
    for place in range(len(sparse)):
        for n in range(rows):
            count = values.words[first + place * rows + n] if len(values.words) > first else np.int64(1)
            offsets[sparse[place, 0] * rows + n + 1] = count
    for bag in range(len(sparse) * rows):
        offsets[bag + 1] += offsets[bag]


@njit(**BODY)
def _hash(values, texts, hashes):
    """Set the offsets of texts, and the hashes of integers and texts."""
    for at in range(values.integers):
        hashes[at] = mix(U(values.words[at]) + U(HASH_SEED))
    texts.offsets[0] = 0
    for t in range(values.texts):
        first = texts.offsets[t]
        texts.offsets[t + 1] = end = first + values.words[values.integers + t]
        hashes[values.integers + t] = hash_text(texts.content, first, end)


@njit(**BODY)
def _fill_ids(sparse, index, weights, values, texts, hashes, features):
    """Find the ids of all values.

    Each step is done for all features before the next one, so that reads of different values from
    memory overlap.
    """
    rows = values.rows
    for step in range(3):
        done = np.int64(0)
        for place in range(len(sparse)):
            feature, vocabulary, start, width = sparse[place, :4]
            first, end = features.offsets[feature * rows], features.offsets[(feature + 1) * rows]
            block_hashes, ids = hashes[done : done + end - first], features.ids[first:end]
            if step < 2:
                prefetch_keys(index, vocabulary, block_hashes, step)
            else:
                find_ids(index, vocabulary, block_hashes, texts, done - values.integers, ids)
                for n in range(len(ids) if width else 0):
                    prefetch_row(weights, U(start + ids[n] * width), U(width))
            done += end - first


@njit(**BODY)
def _pool(sparse, weights, rows, features):
    """Pool rows as `kernels.pooling` does, with the same bits."""
    for place in range(len(sparse)):
        feature, _, start, width, column, mean = sparse[place]
        for n in range(rows if width else 0):
            first, end = features.offsets[feature * rows + n], features.offsets[feature * rows + n + 1]
            factor, out = share(end - first, mean), features.pooled[n, column : column + width]
            for d in range(U(width)):
                out[d] = np.float32(0.0)
            for i in range(U(first), U(end)):
                source = U(start + features.ids[i] * width)
                for d in range(U(width)):
                    out[d] += weights[source + d]
            if factor != np.float32(1.0):
                for d in range(U(width)):
                    out[d] *= factor
