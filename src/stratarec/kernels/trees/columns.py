"""The numbers that boosted trees compare, and the logits of trees, in one compiled call each.

Shapes: B samples, D dense features, S sparse features, R codes with a click rate, P pairs of
columns, M members.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.python_lock import release_lock, take_lock
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.trees.pair_lookup import PackedPairs, look_up
from stratarec.kernels.trees.sums import PackedTrees, empty_block, sum_trees

Floats = NDArray[np.float32]
Int64s = NDArray[np.int64]
# Number of rows whose logits are computed without releasing Python's lock.
_FEW = 2


class Samples(NamedTuple):
    """Features of a batch."""

    dense: Floats
    """``[B, D]``."""
    ids: NDArray[np.int32] | Int64s
    """Ids of sparse features."""
    offsets: Int64s
    """Offsets of bags: sample b of the feature with key k has ``ids[offsets[k * B + b]:offsets[k *
    B + b + 1]]``.
    """
    keys: Int64s
    """``[S, 2]`` key of each feature that trees compare, and whether it is a list."""


class FittedTrees(NamedTuple):
    """Boosted trees, and the click rates that they compare."""

    rates: Floats
    """``[S, R]`` click rates of codes."""
    pairs: PackedPairs
    """Click rates of P pairs of columns."""
    trees: PackedTrees
    leaves: Floats
    """Values of the leaves of all trees, one tree after another."""
    members: int
    """M, the number of members of the ensemble that are trees."""


def compute_trees(samples: Samples, fitted: FittedTrees) -> tuple[Floats, Floats]:
    """Return the numbers that trees compare, and the logits of the members that are trees, ``[B,
    M]``.

    The numbers are codes, dense features, click rates of codes and click rates of pairs, ``[B, S +
    D + S + P]``. The code of a feature is its id plus 1, or 0 if there is none. Of a list, code and
    rate are its length. Codes from R on have the rate of code 0.
    """
    rates, pairs, trees, leaves, members = fitted
    size, width = samples.dense.shape
    rows = np.empty((size, 2 * len(samples.keys) + width + len(pairs.columns)), dtype=np.float32)
    sums = np.zeros((size, members))
    _compute(tuple(samples), rates, tuple(pairs), tuple(trees), leaves, rows, empty_block(rows), sums)
    return rows, sums.astype(np.float32)


@njit(cache=True)
def _compute(samples, rates, pairs, trees, leaves, rows, block, sums):
    state = release_lock() if len(rows) > _FEW else np.int64(0)
    _fill(samples, rates, pairs, rows)
    sum_trees(rows, PackedTrees(*trees), leaves, block, sums)
    if len(rows) > _FEW:
        take_lock(state)


@njit(**BODY)
def _fill(samples, rates, pairs, rows):
    dense, ids, offsets, keys = samples
    sparse, width = len(keys), dense.shape[1]
    for b in range(len(rows)):
        for d in range(width):
            rows[b, sparse + d] = dense[b, d]
    for s in range(sparse):
        key, is_list = keys[s]
        for b in range(len(rows)):
            first, end = offsets[key * len(rows) + b], offsets[key * len(rows) + b + 1]
            code = end - first if is_list or first == end else np.int64(ids[first]) + 1
            rows[b, s] = code
            rows[b, sparse + width + s] = (
                code if is_list else rates[s, code if code < rates.shape[1] else 0]
            )
    look_up(rows, PackedPairs(*pairs), rows, 2 * sparse + width)


def reference_columns(samples: Samples, rates: Floats) -> Floats:
    """Return the numbers that trees compare, without pairs, computed one at a time."""
    size, rows = len(samples.dense), []
    for b, dense in enumerate(samples.dense):
        codes, code_rates = [], []
        for (key, is_list), of_code in zip(samples.keys, rates, strict=True):
            bag = samples.ids[samples.offsets[key * size + b] : samples.offsets[key * size + b + 1]]
            codes.append(len(bag) if is_list or not len(bag) else int(bag[0]) + 1)
            code_rates.append(
                codes[-1] if is_list else of_code[codes[-1] if codes[-1] < len(of_code) else 0]
            )
        rows.append([*codes, *dense, *code_rates])
    return np.array(rows, dtype=np.float32).reshape(size, 2 * len(samples.keys) + samples.dense.shape[1])
