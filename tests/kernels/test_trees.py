"""Compare sums of trees with the reference, and test that invalid trees are refused instead of read out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stratarec.kernels.trees import FIELDS, pack_trees, reference_sum_trees, sum_trees

Array = np.ndarray[Any, Any]
M, T, N, COLUMNS = 2, 5, 7, 3

pytestmark = pytest.mark.interpreted


def draw(seed: int, trees: int = T) -> tuple[Array, Array, Array]:
    """Return rows, and complete binary trees with thresholds and sets."""
    draws = np.random.default_rng(seed)
    nodes = np.full((M, T, N, FIELDS), -1, dtype=np.float32)
    nodes[:, :trees, :, 0] = draws.integers(-COLUMNS, COLUMNS, (M, trees, N))
    nodes[:, :trees, :, 1] = draws.normal(scale=100, size=(M, trees, N))
    places = np.arange(N)
    for side in (0, 1):
        child = 2 * places + 1 + side
        nodes[:, :trees, :, 2 + side] = np.where(child < N, child, N - child - 1)
    nodes[:, :trees, :, 4:] = draws.integers(0, 1 << 16, (M, trees, N, FIELDS - 4))
    leaves = draws.normal(size=(M, T, N + 1)).astype(np.float32)
    leaves[:, trees:] = 0
    rows = draws.integers(-20, 300, (140, COLUMNS)) + draws.choice([0.0, 0.5], (140, COLUMNS))
    rows[:9, 0] = [np.nan, 0, 255, 256, -1, 1e30, -1e30, 255.5, -0.5]
    return rows.astype(np.float32), nodes, leaves


@pytest.mark.parametrize("trees", [0, 1, 3, T])
def test_sums_match_the_reference(trees: int) -> None:
    rows, nodes, leaves = draw(trees, trees)
    packed = pack_trees(nodes, COLUMNS)
    assert packed is not None
    sums = sum_trees(rows, packed, leaves)
    np.testing.assert_allclose(sums, reference_sum_trees(rows, nodes, leaves), rtol=1e-6, atol=1e-6)
    assert sums.any() == bool(trees)
    for few in (0, 1, 8, 15):  # sets of few rows are tested in another way
        np.testing.assert_array_equal(sum_trees(rows[:few], packed, leaves), sums[:few])


BAD = (np.nan, np.inf, -np.inf, 1e30, -1e30, float(N), -float(N) - 2, 0.0, 0.5)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in (0, 2, 3, 4) for value in BAD if field < 4 or np.isfinite(value)]
)
def test_invalid_trees_terminate(field: int, value: float) -> None:
    """A node may not exist or lead to itself.

    Files with numbers that are not finite are refused before trees are used.
    """
    rows, nodes, leaves = draw(1)
    nodes[0, 0, :, field] = value
    for _ in range(2):
        packed = pack_trees(nodes, COLUMNS)
        if field in (2, 3):
            assert packed is None
        if packed is not None:
            assert np.isfinite(sum_trees(rows, packed, leaves)).all()
        nodes[0, 0, :, 0] = value


@pytest.mark.parametrize("child", [(1, 1), (-1, -8), (0, 2), (2, 0)])
def test_a_node_or_leaf_with_two_parents_is_refused(child: tuple[int, int]) -> None:
    nodes = draw(1)[1]
    place, value = child
    nodes[0, 0, place, 2] = value
    assert pack_trees(nodes, COLUMNS) is None


def test_a_constant_and_an_uneven_tree() -> None:
    nodes, leaves = np.full((1, 2, 30, FIELDS), -1, np.float32), np.arange(62, dtype=np.float32).reshape(1, 2, 31) + 1
    nodes[0, 0, 0, :4] = 0, np.finfo(np.float32).max, -1, -2
    nodes[0, 1, :, 0], nodes[0, 1, :, 1] = 0, np.arange(30)
    nodes[0, 1, :, 2], nodes[0, 1, :, 3] = -1 - np.arange(30), np.append(np.arange(1, 30), -31)
    rows = np.arange(-2, 33, dtype=np.float32)[:, None]
    packed = pack_trees(nodes, 1)
    assert packed is not None
    np.testing.assert_array_equal(sum_trees(rows, packed, leaves), reference_sum_trees(rows, nodes, leaves))
