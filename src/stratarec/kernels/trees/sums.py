"""Sums of boosted trees over rows of numbers.

A tree has N_t inner nodes and N_t + 1 leaves; its node 0 is the root. A node is a row of float32 numbers, because files
of weights and their averages contain only such numbers, and all integers here are exact in float32:

    feature, threshold, left, right

If the feature is f >= 0, samples with ``row[f] <= threshold`` go left. If it is ``-1 - f``, the threshold is the place
of the first code of a set, and samples whose number is one of its codes go left. Codes are whole numbers below 2^24,
and the last code c of a set is stored as ``-1 - c``. A child c >= 0 is a node of the same tree, which has a larger
number than its parent, and ``-1 - c`` is a leaf.

`pack_trees` validates trees once, and stores for each node which leaves remain possible on either side. Then
`sum_trees` visits all nodes of a tree, for many rows at once, and the one leaf that remains is the result (Lucchese et
al. 2015, QuickScorer).

Shapes: B samples, C columns, M members, T trees of all members, N nodes and N + T leaves of all trees, K codes of all
sets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.trees import CODES

NODE_FIELDS, TREE_FIELDS = 4, 2
"""Number of numbers in a node and in the description of a tree."""
# Leaves are bits of positive int32 numbers.
_MOST_NODES = 30
# Rows that are computed together. Fewer than `_FEW` rows are computed one after another.
_BLOCK, _FEW = 512, 11

U = np.uint64
Floats = NDArray[np.float32]


class TreeArrays(NamedTuple):
    """Trees as they are stored, those of a member one after another. The arrays may have any content."""

    trees: Floats
    """``[T, 2]`` member and number of inner nodes of each tree. A tree without nodes is a constant."""
    nodes: Floats
    """``[N, 4]``."""
    sets: Floats
    """``[K]``."""
    leaves: Floats
    """``[N + T]``."""


class PackedTrees(NamedTuple):
    """Valid trees in the form that `sum_trees` reads. Nodes that compare numbers are before nodes with sets."""

    members: NDArray[np.int32]
    """``[T]`` member of each tree."""
    ends: NDArray[np.int32]
    """``[T, 2]`` end of the nodes that compare numbers, and of all nodes."""
    columns: NDArray[np.int32]
    """``[N]`` places of the numbers that nodes compare."""
    thresholds: Floats
    """``[N]``."""
    places: NDArray[np.int32]
    """``[N, 2]`` first place and end of a node's codes in `sets`; 0 for nodes without a set."""
    kept: NDArray[np.int32]
    """``[N, 2]`` leaves that remain possible to the left and to the right of a node, as bits."""
    signatures: NDArray[np.uint64]
    """``[N]`` the lowest six bits of the codes of a node's set, each as a bit."""
    sets: Floats
    """``[K]`` codes."""


def pack_trees(arrays: TreeArrays, columns: int, members: int) -> PackedTrees | None:
    """Pack trees for `sum_trees`, or return None if a member, node, leaf or set does not exist, if a node or leaf has
    several parents, or if a number that must be whole is not.

    Parameters
    ----------
    arrays : TreeArrays
    columns, members : int
        C and M.
    """
    trees, nodes = len(arrays.trees), len(arrays.nodes)
    packed = PackedTrees(
        np.zeros(trees, np.int32), np.zeros((trees, 2), np.int32), np.zeros(nodes, np.int32),
        np.zeros(nodes, np.float32), np.zeros((nodes, 2), np.int32), np.zeros((nodes, 2), np.int32),
        np.zeros(nodes, np.uint64), np.where(arrays.sets < 0, -1 - arrays.sets, arrays.sets),
    )  # fmt: skip
    if len(arrays.leaves) != nodes + trees:
        return None
    is_valid = _pack_trees(arrays, np.float32(columns), np.float32(members), packed)
    return packed if is_valid else None


@njit(nogil=True, cache=True)
def _is_whole(number, low, end):
    return low <= number < end and number == np.floor(number)


@njit(nogil=True, cache=True)
def _pack_trees(arrays, columns, members, packed):
    end, zero = 0, np.float32(0.0)
    # End of the set that contains each code.
    set_ends, set_end = np.zeros(len(arrays.sets), dtype=np.int32), 0
    for place in range(len(arrays.sets) - 1, -1, -1):
        if not _is_whole(packed.sets[place], zero, np.float32(CODES)):
            return False
        set_end = place + 1 if arrays.sets[place] < 0 else set_end
        set_ends[place] = set_end
    if len(set_ends) and not set_end:
        return False
    # Leaves to the left and to the right of each node, as bits; 0 if the node is not part of the tree.
    below = np.empty((_MOST_NODES, 2), dtype=np.int32)
    for t in range(len(arrays.trees)):
        member, size = arrays.trees[t]
        if not (_is_whole(member, zero, members) and _is_whole(size, zero, np.float32(_MOST_NODES + 1))):
            return False
        first, inner = end, int(size)
        if first + inner > len(arrays.nodes):
            return False
        packed.members[t] = int(member)
        tree = arrays.nodes[first : first + inner]
        last, none = np.float32(inner), np.float32(-inner - 1)
        below[:] = 0
        below[0] = 1
        leaves = np.int32(0)
        for n in range(inner):
            if not (below[n, 0] and _is_whole(tree[n, 0], -columns, columns)):
                return False
            if tree[n, 0] < 0 and not _is_whole(tree[n, 1], zero, np.float32(len(set_ends))):
                return False
            for side in range(2):
                child = tree[n, 2 + side]
                if not _is_whole(child, none, last):
                    return False
                if child > n and not below[int(child), 0]:
                    below[int(child)] = 1
                elif child < 0 and not (leaves >> int(-1 - child)) & 1:
                    leaves |= np.int32(1 << int(-1 - child))
                else:
                    return False
        for n in range(inner - 1, -1, -1):
            for side in range(2):
                child = int(tree[n, 2 + side])
                below[n, side] = below[child, 0] | below[child, 1] if child >= 0 else 1 << (-1 - child)
        for is_set in range(2):
            for n in range(inner):
                if (tree[n, 0] < 0) == is_set:
                    column = int(tree[n, 0])
                    packed.columns[end] = -1 - column if is_set else column
                    packed.thresholds[end] = tree[n, 1]
                    if is_set:
                        packed.places[end, 0] = int(tree[n, 1])
                        packed.places[end, 1] = set_ends[int(tree[n, 1])]
                        for place in range(packed.places[end, 0], packed.places[end, 1]):
                            packed.signatures[end] |= np.uint64(1) << (np.uint64(packed.sets[place]) & np.uint64(63))
                    for side in range(2):
                        # The root also removes bits without a leaf.
                        packed.kept[end, side] = below[n, side] if n == 0 else ~below[n, 1 - side]
                    end += 1
            packed.ends[t, is_set] = end
    return end == len(arrays.nodes)


@njit(nogil=True, cache=True)
def sum_trees(rows, trees, leaves, sums):
    """Add the leaves that each row reaches to ``sums``, ``[B, M]`` float64.

    `rows` are ``[B, C]`` float32, `trees` are packed for C columns and M members, and `leaves` are ``[N + T]``. For all
    rows of a block, the leaves on the other side of each node are removed.

    With AVX-512, 313 trees take 0.9 us a row for 2,048 rows. To descend one level at a time took 9.2 and, for one row,
    36 us, because each row has its own node, and the processor cannot predict whether it compares a number.
    """
    size, columns = rows.shape
    few = size % _BLOCK if size % _BLOCK < _FEW else 0
    block = np.empty((columns, min(size - few, _BLOCK)), dtype=np.float32)
    possible, in_set = np.empty(_BLOCK, dtype=np.int32), np.empty(_BLOCK, dtype=np.int32)
    power = np.empty(_BLOCK, dtype=np.float32)
    bits = power.view(np.int32)
    for first in range(0, size - few, _BLOCK):
        count = min(_BLOCK, size - first)
        for b in range(count):
            for c in range(columns):
                block[c, b] = rows[first + b, c]
        end = 0
        for t in range(len(trees.members)):
            m, first_node, first_leaf = trees.members[t], end, end + t
            middle, end = trees.ends[t]
            possible[:count] = -1 if end > first_node else 1
            for n in range(first_node, middle):
                column, threshold = block[trees.columns[n]], trees.thresholds[n]
                left, right = trees.kept[n]
                for b in range(count):
                    possible[b] &= left if column[b] <= threshold else right
            for n in range(middle, end):
                column, (start, stop) = block[trees.columns[n]], trees.places[n]
                left, right = trees.kept[n]
                in_set[:count] = 0
                for place in range(start, stop):
                    code = trees.sets[place]
                    for b in range(count):
                        in_set[b] |= np.int32(column[b] == code)
                for b in range(count):
                    possible[b] &= left if in_set[b] else right
            values = leaves[first_leaf:]
            # The exponent of a power of two is the number of its bit.
            for b in range(count):
                power[b] = possible[b]
            for b in range(count):
                sums[first + b, m] += values[(bits[b] >> 23) - 127]
    for b in range(size - few, size):
        _sum_row(rows[b], trees, leaves, sums[b], power)


@njit(**BODY)
def _sum_row(row, trees, leaves, sums, power):
    """Compute the sums of one row, for which vectors are over nodes instead of rows."""
    end, bits = 0, power.view(np.int32)
    for t in range(len(trees.members)):
        first_node, first_leaf = end, end + t
        middle, end = trees.ends[t]
        possible = np.int32(-1) if end > first_node else np.int32(1)
        for n in range(U(first_node), U(middle)):
            goes_left = row[U(trees.columns[n])] <= trees.thresholds[n]
            possible &= trees.kept[n, 0] if goes_left else trees.kept[n, 1]
        for n in range(U(middle), U(end)):
            number, in_set = row[U(trees.columns[n])], np.int32(0)
            is_code = np.float32(0.0) <= number < np.float32(CODES)
            place_of_bit = np.uint64(np.int64(number) if is_code else 0) & np.uint64(63)
            if (trees.signatures[n] >> place_of_bit) & np.uint64(1):
                for place in range(U(trees.places[n, 0]), U(trees.places[n, 1])):
                    in_set |= np.int32(trees.sets[place] == number)
            possible &= trees.kept[n, 0] if in_set else trees.kept[n, 1]
        power[0] = possible
        sums[trees.members[t]] += leaves[first_leaf + (bits[0] >> 23) - 127]


def reference_sum_trees(rows: Floats, arrays: TreeArrays, members: int) -> Floats:
    """Return the sums of `sum_trees` for valid trees, computed in Python, one sample at a time."""
    sums, sets = np.zeros((len(rows), members)), arrays.sets.tolist()
    for b, row in enumerate(rows.tolist()):
        first = 0
        for t, (member, size) in enumerate(arrays.trees.astype(int).tolist()):
            tree, at = arrays.nodes[first : first + size].tolist(), 0 if size else -1
            while at >= 0:
                feature, threshold, left, right = tree[at]
                value = row[int(feature if feature >= 0 else -1 - feature)]
                if feature >= 0:
                    goes_left = value <= threshold
                else:
                    place = int(threshold)
                    while sets[place] not in (value, -1 - value) and sets[place] >= 0:
                        place += 1
                    goes_left = value >= 0 and sets[place] in (value, -1 - value)
                at = int(left if goes_left else right)
            sums[b, member] += arrays.leaves[first + t - 1 - at]
            first += size
    return sums.astype(np.float32)
