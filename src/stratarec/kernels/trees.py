"""Sums of boosted trees over rows of numbers.

A tree has N inner nodes; node 0 is the root. A node is a row of float32 numbers, because files of weights and their
averages contain only such numbers, and all integers here are exact in float32:

    feature, threshold, left, right, 16 words of 16 bits

If the feature is f >= 0, samples with ``row[f] <= threshold`` go left. If it is ``-1 - f``, the words are a set of
numbers below 256, and samples whose number is in the set go left. A child c >= 0 is a node, and ``-1 - c`` is a leaf.

Shapes: B samples, C columns, M members, T trees of a member, N nodes, N + 1 leaves.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

CATEGORIES, FIELDS = 256, 20
"""Number of values that a set distinguishes, and of numbers in a node."""
_WORD_BITS, _FIRST_WORD = 16, 4
# Number of rows that descend together.
_BLOCK = 64

Floats = NDArray[np.float32]


def sum_trees(rows: Floats, nodes: Floats, leaves: Floats) -> tuple[Floats, bool]:
    """Return the sum of the leaves that each row reaches, ``[B, M]``, and whether all trees are valid.

    Trees may be of any content: a node that does not exist, or that was visited before, is a fault, and the sums are
    then undefined.

    Parameters
    ----------
    rows : ndarray
        ``[B, C]``.
    nodes : ndarray
        ``[M, T, N, 20]``. A tree whose root is the leaf 0 on both sides ends its member.
    leaves : ndarray
        ``[M, T, N + 1]``.
    """
    sums = np.zeros((len(rows), len(nodes)), dtype=np.float64)
    valid = _sum_trees(rows, nodes, leaves, sums)
    return sums.astype(np.float32), bool(valid)


@njit(nogil=True, cache=True)
def _sum_trees(rows, nodes, leaves, sums):
    """Descend one level at a time for a block of rows, whose loads then overlap.

    A loop over the nodes of one row after another took 155 us a row for 1,200 trees, and this takes 36: each load waits
    for the one before it, and a branch to the left or right is predicted wrongly half of the time.
    """
    size, columns, inner = len(rows), np.float32(rows.shape[1]), nodes.shape[2]
    last, none = np.float32(inner), np.float32(-inner - 1)
    place = np.empty(_BLOCK, dtype=np.int64)
    feature, threshold = np.empty(inner, dtype=np.int64), np.empty(inner, dtype=np.float32)
    child = np.empty(2 * inner, dtype=np.int64)
    for m in range(nodes.shape[0]):
        for t in range(nodes.shape[1]):
            tree = nodes[m, t]
            if tree[0, 2] == -1.0 and tree[0, 3] == -1.0:
                break
            for n in range(inner):
                is_known = none <= tree[n, 2] < last and none <= tree[n, 3] < last
                if not (is_known and -columns <= tree[n, 0] < columns):
                    return False
                feature[n], threshold[n] = int(tree[n, 0]), tree[n, 1]
                child[2 * n], child[2 * n + 1] = int(tree[n, 2]), int(tree[n, 3])
            for first in range(0, size, _BLOCK):
                count, waiting = min(_BLOCK, size - first), 1
                place[:count] = 0
                for _ in range(inner):
                    waiting = 0
                    for b in range(count):
                        n = max(place[b], 0)
                        if feature[n] >= 0:
                            right = np.int64(rows[first + b, feature[n]] > threshold[n])
                        else:
                            right, value = np.int64(1), rows[first + b, -1 - feature[n]]
                            if np.float32(0.0) <= value < np.float32(CATEGORIES):
                                number = int(value)
                                word = int(tree[n, _FIRST_WORD + number // _WORD_BITS])
                                right = np.int64(1 - ((word >> (number % _WORD_BITS)) & 1))
                        place[b] = child[2 * n + right] if place[b] >= 0 else place[b]
                        waiting += place[b] >= 0
                    if waiting == 0:
                        break
                if waiting:
                    return False
                for b in range(count):
                    sums[first + b, m] += leaves[m, t, -1 - place[b]]
    return True


def reference_sum_trees(rows: Floats, nodes: Floats, leaves: Floats) -> Floats:
    """Compute `sum_trees` of valid trees in Python, one sample at a time."""
    sums = np.zeros((len(rows), len(nodes)))
    for (b, m), _ in np.ndenumerate(sums):
        for tree, values in zip(nodes[m].tolist(), leaves[m].tolist(), strict=True):
            at = 0
            while at >= 0:
                feature, threshold, left, right, *words = tree[at]
                value = float(rows[b, int(feature if feature >= 0 else -1 - feature)])
                if feature >= 0:
                    goes_left = value <= threshold
                else:
                    number = int(value) if 0 <= value < CATEGORIES else 0
                    bit = int(words[number // _WORD_BITS]) >> (number % _WORD_BITS) & 1
                    goes_left = 0 <= value < CATEGORIES and bool(bit)
                at = int(left if goes_left else right)
            sums[b, m] += values[-1 - at]
    return sums.astype(np.float32)
