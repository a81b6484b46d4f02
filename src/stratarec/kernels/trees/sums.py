"""Sums of boosted trees over rows of numbers.

A tree has N_t inner nodes and N_t + 1 leaves; its node 0 is the root. A node is a row of float32
numbers, because files of weights and their averages contain only such numbers, and all integers
here are exact in float32:

    feature, threshold, left, right

If the feature is f >= 0, samples with ``row[f] <= threshold`` go left. If it is ``-1 - f``, the
threshold is the place of the first code of a set, and samples whose number is one of its codes go
left. Codes are whole numbers below 2^24, and the last code c of a set is stored as ``-1 - c``. A
child c >= 0 is a node of the same tree, which has a larger number than its parent, and ``-1 - c``
is a leaf.

`pack_trees` validates trees once, and stores for each node which leaves remain possible on either
side. Then `sum_trees` visits all nodes of a tree, for many rows at once, and the one leaf that
remains is the result (Lucchese et al. 2015, QuickScorer).

Shapes: B samples, C columns, M members, T trees of all members, N nodes and N + T leaves of all
trees, K codes of all sets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import float_bits
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
    """Trees in the layout of a checkpoint, ordered by member. The arrays may have any content."""

    trees: Floats
    """``[T, 2]`` member and number of inner nodes of each tree; 0 nodes is a constant."""
    nodes: Floats
    """``[N, 4]``."""
    sets: Floats
    """``[K]``."""
    leaves: Floats
    """``[N + T]``."""


class PackedTrees(NamedTuple):
    """Valid trees in the form that `sum_trees` reads. Nodes that compare numbers are before nodes
    with sets.
    """

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
    reachable: NDArray[np.int32]
    """``[N, 2]`` leaves that remain possible to the left and to the right of a node, as bits."""
    signatures: NDArray[np.uint64]
    """``[N]`` the lowest six bits of the codes of a node's set, each as a bit."""
    sets: Floats
    """``[K]`` codes."""


def pack_trees(arrays: TreeArrays, columns: int, members: int) -> PackedTrees | None:
    """Pack trees for `sum_trees`, or return None if a member, node, leaf or set does not exist, if
    a node or leaf has several parents, or if a number that must be whole is not.

    Parameters
    ----------
    arrays : TreeArrays
        Trees, which may come from an untrusted file.
    columns, members : int
        C and M.
    """
    size, nodes, is_last = len(arrays.nodes), arrays.nodes, arrays.sets < 0
    sets = np.where(is_last, -1 - arrays.sets, arrays.sets)
    children = nodes[:, 2:]
    if not (
        len(arrays.leaves) == size + len(arrays.trees)
        and _are_whole(sets, 0, CODES)
        and (is_last.any() or not len(sets))
        and _are_whole(arrays.trees, 0, np.array([members, _MOST_NODES + 1]))
        and arrays.trees[:, 1].sum(dtype=np.float64) == size
        and _are_whole(nodes[:, 0], -columns, columns)
    ):
        return None
    sizes, is_set = arrays.trees[:, 1].astype(np.int64), nodes[:, 0] < 0
    firsts = np.cumsum(sizes) - sizes
    tree_of = np.repeat(np.arange(len(sizes)), sizes)
    number, inner = np.arange(size) - firsts[tree_of], sizes[tree_of, None]
    if not (_are_whole(nodes[is_set, 1], 0, len(sets)) and _are_whole(children, -inner - 1, inner)):
        return None
    children = children.astype(np.int64)
    # A tree of n nodes has 2n children: if all differ, they are all leaves and all nodes except the
    # root.
    is_node, distinct = children >= 0, np.unique(64 * tree_of[:, None] + children)
    if len(distinct) < 2 * size or (is_node & (children <= number[:, None])).any():
        return None
    below = np.where(is_node, 0, 1 << np.where(is_node, 0, -1 - children)).astype(np.int32)
    for place in range(_MOST_NODES - 1, -1, -1):  # children have larger numbers than their parents
        at = firsts[sizes > place] + place
        child = np.where(is_node[at], children[at] + firsts[tree_of[at], None], at[:, None])
        below[at] = np.where(is_node[at], below[child, 0] | below[child, 1], below[at])
    # End of the set that contains each code; 0 if none of the later codes is the last of a set.
    set_ends = np.minimum.accumulate(np.where(is_last, np.arange(len(sets)) + 1, len(sets) + 1)[::-1])[::-1]
    set_ends = np.where(set_ends > len(sets), 0, set_ends)
    places, signatures = np.zeros((size, 2), np.int32), np.zeros(size, np.uint64)
    starts = nodes[is_set, 1].astype(np.int64)
    places[is_set] = np.stack([starts, set_ends[starts]], axis=1)
    bits = np.append(U(1) << (sets.astype(np.uint64) & U(63)), U(0))
    signatures[is_set] = np.bitwise_or.reduceat(bits, places[is_set].ravel())[::2] * (
        starts < set_ends[starts]
    )
    order = np.argsort(2 * tree_of + is_set, kind="stable")
    column = nodes[:, 0].astype(np.int32)
    middles = firsts + np.bincount(tree_of[~is_set], minlength=len(sizes))
    return PackedTrees(
        members=arrays.trees[:, 0].astype(np.int32),
        ends=np.stack([middles, firsts + sizes], axis=1).astype(np.int32),
        columns=np.where(is_set, -1 - column, column)[order],
        thresholds=nodes[order, 1],
        places=places[order],
        # The root also removes bits without a leaf.
        reachable=np.where(number[:, None] == 0, below, ~below[:, ::-1])[order],
        signatures=signatures[order],
        sets=sets,
    )


def _are_whole(numbers: Floats, low: Any, end: Any) -> bool:
    return bool(((low <= numbers) & (numbers < end) & (numbers == np.floor(numbers))).all())


def empty_block(rows: Floats) -> Floats:
    """Return memory for `sum_trees` of `rows`."""
    return np.empty((rows.shape[1], min(len(rows), _BLOCK)), dtype=np.float32)


@njit(**BODY)
def sum_trees(rows, trees, leaves, block, sums):
    """Add the leaves that each row reaches to ``sums``, ``[B, M]`` float64.

    `rows` are ``[B, C]`` float32, `trees` are packed for C columns and M members, `leaves` are ``[N
    + T]``, and `block` is memory from `empty_block`. For all rows of a block, the leaves on the
    other side of each node are removed.

    With AVX-512, 313 trees take 0.9 us a row for 2,048 rows. To descend one level at a time took
    9.2 and, for one row, 36 us, because each row has its own node, and the processor cannot predict
    whether it compares a number.
    """
    size, columns = rows.shape
    few = size % _BLOCK if size % _BLOCK < _FEW else 0
    possible = stack_array(_BLOCK, np.int32)
    in_set = stack_array(_BLOCK, np.int32)
    power = stack_array(_BLOCK, np.float32)
    for first in range(0, size - few, _BLOCK):
        count = min(_BLOCK, size - first)
        for b in range(count):
            for c in range(columns):
                block[c, b] = rows[first + b, c]
        end = 0
        for t in range(len(trees.members)):
            m, first_node, first_leaf = trees.members[t], end, end + t
            middle, end = trees.ends[t]
            for b in range(count):
                possible[b] = -1 if end > first_node else 1
            for n in range(first_node, middle):
                column, threshold = block[trees.columns[n]], trees.thresholds[n]
                left, right = trees.reachable[n]
                for b in range(count):
                    possible[b] &= left if column[b] <= threshold else right
            for n in range(middle, end):
                column, (start, stop) = block[trees.columns[n]], trees.places[n]
                left, right = trees.reachable[n]
                for b in range(count):
                    in_set[b] = 0
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
                sums[first + b, m] += values[(float_bits(power[b]) >> 23) - 127]
    for b in range(size - few, size):
        _sum_row(rows[b], trees, leaves, sums[b])


@njit(**BODY)
def _sum_row(row, trees, leaves, sums):
    """Compute the sums of one row, for which vectors are over nodes instead of rows."""
    end = 0
    for t in range(len(trees.members)):
        first_node, first_leaf = end, end + t
        middle, end = trees.ends[t]
        possible = np.int32(-1) if end > first_node else np.int32(1)
        for n in range(U(first_node), U(middle)):
            goes_left = row[U(trees.columns[n])] <= trees.thresholds[n]
            possible &= trees.reachable[n, 0] if goes_left else trees.reachable[n, 1]
        for n in range(U(middle), U(end)):
            number, in_set = row[U(trees.columns[n])], np.int32(0)
            is_code = np.float32(0.0) <= number < np.float32(CODES)
            place_of_bit = np.uint64(np.int64(number) if is_code else 0) & np.uint64(63)
            if (trees.signatures[n] >> place_of_bit) & np.uint64(1):
                for place in range(U(trees.places[n, 0]), U(trees.places[n, 1])):
                    in_set |= np.int32(trees.sets[place] == number)
            possible &= trees.reachable[n, 0] if in_set else trees.reachable[n, 1]
        sums[trees.members[t]] += leaves[first_leaf + (float_bits(np.float32(possible)) >> 23) - 127]


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
