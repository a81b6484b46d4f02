"""Compare the numbers that trees compare with those of a loop over samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stratarec.kernels.trees.columns import FittedTrees, Samples, compute_trees, reference_columns
from stratarec.kernels.trees.pair_lookup import pack_pairs
from stratarec.kernels.trees.pair_rates import PairRates, look_up_pairs, no_pairs
from stratarec.kernels.trees.sums import TreeArrays, pack_trees, reference_sum_trees

pytestmark = pytest.mark.interpreted


def columns_of(samples: Samples, rates: Any, pairs: PairRates) -> Any:
    """Return the columns that are computed before trees are fitted."""
    none, sparse = (
        TreeArrays(*(np.zeros(shape, np.float32) for shape in ((0, 2), (0, 4), 0, 0))),
        len(rates),
    )
    trees = pack_trees(none, 2 * sparse + samples.dense.shape[1] + len(pairs.pairs), 2)
    assert trees is not None
    columns, logits = compute_trees(
        samples, FittedTrees(rates, pack_pairs(pairs, sparse), trees, none.leaves, 2)
    )
    assert not logits.any()
    return columns


@pytest.mark.parametrize(
    ("size", "dense", "sparse"), [(0, 2, 3), (1, 2, 3), (40, 2, 3), (5, 0, 3), (5, 2, 0)]
)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_columns_match_the_reference(size: int, dense: int, sparse: int, kind: type) -> None:
    draws = np.random.default_rng(size)
    lengths = draws.integers(0, 4, (sparse + 1) * size)  # a batch with one more feature
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    samples = Samples(
        draws.normal(size=(size, dense)).astype(np.float32),
        draws.integers(0, 12, int(offsets[-1])).astype(kind),
        offsets,
        np.array([(sparse - place, place == 1) for place in range(sparse)], np.int64).reshape(-1, 2),
    )
    rates = draws.random((sparse, 9)).astype(np.float32)
    expected = reference_columns(samples, rates)
    assert expected.shape == (size, 2 * sparse + dense)
    np.testing.assert_array_equal(columns_of(samples, rates, no_pairs()), expected)
    if sparse:
        of_pairs = np.array([(0, 3, code, 0.1 * code) for code in range(9)], np.float32)
        pairs = PairRates(np.array([(0, 1, 0.25)], np.float32), of_pairs, np.zeros((0, 2), np.float32))
        actual = columns_of(samples, rates, pairs)
        np.testing.assert_array_equal(actual[:, :-1], expected)
        np.testing.assert_array_equal(actual[:, -1:], look_up_pairs(expected, pairs, pairs.keys(), sparse))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 30])
def test_logits_are_the_sums_of_trees_over_columns(size: int) -> None:
    draws = np.random.default_rng(size)
    samples = Samples(
        draws.normal(size=(size, 2)).astype(np.float32),
        draws.integers(0, 12, size).astype(np.int32),
        np.arange(size + 1),
        np.zeros((1, 2), np.int64),
    )
    # Two trees: of a number, and of a set of codes with a rate below.
    nodes = np.array([(1, 0.0, -1, -2), (-1, 0, 1, -1), (3, 0.5, -2, -3)], np.float32)
    arrays = TreeArrays(
        np.array([(0, 1), (1, 2)], np.float32), nodes, np.array([3, 5, -1 - 8], np.float32),
        np.array([1, 2, 4, 8, 16], np.float32),
    )  # fmt: skip
    trees, rates = pack_trees(arrays, 4, 2), draws.random((1, 9)).astype(np.float32)
    assert trees is not None
    _, logits = compute_trees(
        samples, FittedTrees(rates, pack_pairs(no_pairs(), 1), trees, arrays.leaves, 2)
    )
    np.testing.assert_array_equal(logits, reference_sum_trees(reference_columns(samples, rates), arrays, 2))
