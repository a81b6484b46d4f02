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
    size, inner = len(rows), nodes.shape[2]
    for m in range(nodes.shape[0]):
        for t in range(nodes.shape[1]):
            tree = nodes[m, t]
            if tree[0, 2] == -1.0 and tree[0, 3] == -1.0:
                break
            # Rows are the inner loop, because a tree fits the L1 cache.
            for b in range(size):
                at = np.float32(0.0)
                for _ in range(inner):
                    if not np.float32(0.0) <= at < np.float32(inner):
                        break
                    node = tree[int(at)]
                    column = node[0] if node[0] >= np.float32(0.0) else np.float32(-1.0) - node[0]
                    if not column < np.float32(rows.shape[1]):
                        return False
                    value = rows[b, int(column)]
                    if node[0] >= np.float32(0.0):
                        left = value <= node[1]
                    else:
                        left = False
                        if np.float32(0.0) <= value < np.float32(CATEGORIES):
                            number = int(value)
                            word = int(node[_FIRST_WORD + number // _WORD_BITS])
                            left = (word >> (number % _WORD_BITS)) & 1 == 1
                    at = node[2] if left else node[3]
                if not np.float32(-inner - 1) <= at < np.float32(0.0):
                    return False
                sums[b, m] += leaves[m, t, int(np.float32(-1.0) - at)]
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
