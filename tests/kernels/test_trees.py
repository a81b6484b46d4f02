"""Compare sums of trees with the reference, and test that invalid trees are refused instead of read
out of range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from stratarec.kernels.trees import CODES
from stratarec.kernels.trees.sums import (
    NODE_FIELDS,
    PackedTrees,
    TreeArrays,
    empty_block,
    pack_trees,
    reference_sum_trees,
    sum_trees,
)

M, T, N, COLUMNS, K = 2, 10, 7, 3, 900

pytestmark = pytest.mark.interpreted


def draw(seed: int, trees: int = T) -> tuple[np.ndarray[Any, Any], TreeArrays]:
    """Return rows, and complete binary trees with thresholds and sets."""
    draws, inner = np.random.default_rng(seed), trees * N
    nodes = np.zeros((trees, N, NODE_FIELDS))
    nodes[:, :, 0] = draws.integers(-COLUMNS, COLUMNS, (trees, N))
    thresholds = draws.normal(scale=100, size=(trees, N))
    nodes[:, :, 1] = np.where(nodes[:, :, 0] < 0, draws.integers(0, K, (trees, N)), thresholds)
    places, codes = np.arange(N), draws.choice([0, 1, CODES - 1, *range(100, 300)], K)
    for side in (0, 1):
        child = 2 * places + 1 + side
        nodes[:, :, 2 + side] = np.where(child < N, child, N - child - 1)
    arrays = (
        np.stack([np.arange(trees) * M // max(trees, 1), np.full(trees, N)], axis=1),
        nodes.reshape(inner, NODE_FIELDS),
        np.where(draws.random(K) < 0.02, -1 - codes, codes),
        draws.normal(size=inner + trees),
    )
    arrays[2][-1] = -1 - codes[-1]
    rows = draws.integers(-20, 300, (140, COLUMNS)) + draws.choice([0.0, 0.5], (140, COLUMNS))
    rows[:10, 0] = [np.nan, 0, CODES - 1, CODES, -1, 1e30, -1e30, 255.5, -0.5, -2]
    return rows.astype(np.float32), TreeArrays(*(array.astype(np.float32) for array in arrays))


@njit
def add_sums(rows, packed, leaves, block, sums):
    sum_trees(rows, packed, leaves, block, sums)


def sums_of(rows: Any, packed: PackedTrees, leaves: Any, members: int) -> Any:
    sums = np.zeros((len(rows), members), dtype=np.float64)
    add_sums(rows, packed, leaves, empty_block(rows), sums)
    return sums.astype(np.float32)


@pytest.mark.parametrize("trees", [0, 1, 3, T])
def test_sums_match_the_reference(trees: int) -> None:
    rows, arrays = draw(trees, trees)
    packed = pack_trees(arrays, COLUMNS, M)
    assert packed is not None
    sums = sums_of(rows, packed, arrays.leaves, M)
    np.testing.assert_allclose(sums, reference_sum_trees(rows, arrays, M), rtol=1e-6, atol=1e-6)
    assert sums.any() == bool(trees)
    for few in (0, 1, 8, 15):
        np.testing.assert_array_equal(sums_of(rows[:few], packed, arrays.leaves, M), sums[:few])


BAD = (np.nan, np.inf, -np.inf, 1e30, -1e30, float(N), -float(N) - 2, 0.0, 0.5)


@pytest.mark.parametrize(
    ("array", "field", "value"),
    [
        (array, field, value)
        for array, fields in (("nodes", (0, 1, 2, 3)), ("trees", (0, 1)), ("sets", (0,)))
        for field in fields
        for value in BAD
        if np.isfinite(value) or array != "sets"
    ],
)
def test_invalid_trees_terminate(array: str, field: int, value: float) -> None:
    """A node may not exist or lead to itself.

    Files with numbers that are not finite are refused before trees are used.
    """
    rows, arrays = draw(1)
    for end in (1, None):
        changed = getattr(arrays, array)[:end]
        (changed if array == "sets" else changed[:, field])[...] = value
        packed = pack_trees(arrays, COLUMNS, M)
        if (array, field) in (("nodes", 2), ("nodes", 3)) or (
            array == "trees" and not 0 <= value < (M, N + 1)[field]
        ):
            assert packed is None
        if value == 0.5 and (array, field) != ("nodes", 1):  # not a whole number
            assert packed is None
        if packed is not None:
            assert np.isfinite(sums_of(rows, packed, arrays.leaves, M)).all()


@pytest.mark.parametrize("child", [(1, 1), (-1, -8), (0, 2), (2, 0)])
def test_a_node_or_leaf_with_two_parents_is_refused(child: tuple[int, int]) -> None:
    arrays = draw(1)[1]
    place, value = child
    arrays.nodes[place, 2] = value
    assert pack_trees(arrays, COLUMNS, M) is None


@pytest.mark.parametrize("name", ["nodes", "leaves"])
@pytest.mark.parametrize("end", [-1, 0])
def test_arrays_that_are_too_short_are_refused(name: str, end: int) -> None:
    arrays = draw(1)[1]
    assert pack_trees(arrays._replace(**{name: getattr(arrays, name)[:end]}), COLUMNS, M) is None


def test_a_constant_and_an_uneven_tree() -> None:
    nodes = np.zeros((30, NODE_FIELDS))
    nodes[:, 1] = np.arange(30)
    nodes[:, 2], nodes[:, 3] = -1 - np.arange(30), np.append(np.arange(1, 30), -31)
    trees = np.array([[0, 0], [0, 30]])
    arrays = TreeArrays(
        *(array.astype(np.float32) for array in (trees, nodes, np.zeros(0), np.arange(1, 33)))
    )
    rows = np.arange(-2, 33, dtype=np.float32)[:, None]
    packed = pack_trees(arrays, 1, 1)
    assert packed is not None
    sums = sums_of(rows, packed, arrays.leaves, 1)
    np.testing.assert_array_equal(sums, reference_sum_trees(rows, arrays, 1))
    assert sums[0, 0] == 3
    assert sums[-1, 0] == 33
