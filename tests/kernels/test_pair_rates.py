"""Compare click rates of pairs with a dictionary, and test that invalid arrays are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from stratarec.kernels.trees import CODES
from stratarec.kernels.trees.pair_lookup import look_up, pack_pairs
from stratarec.kernels.trees.pair_rates import PairRates, look_up_pairs, no_pairs, pair_codes

pytestmark = pytest.mark.interpreted

S = 2
EDGES = ((2, 0.5), (2, 2.0), (3, -1.0))


def draw(seed: int, entries: int = 60) -> PairRates:
    """Return rates of a pair of categorical columns, of one of both kinds, and of one of dense
    columns.
    """
    draws = np.random.default_rng(seed)
    codes = np.unique(draws.choice([0, 1, 2, 3, CODES - 1], (entries, 2)), axis=0)
    keys = [(pair, *code) for pair in range(3) for code in codes if draws.random() < 0.7]
    rates = np.array([(*key, draws.random()) for key in keys], np.float32).reshape(-1, 4)
    pairs = np.array([(0, 1, 0.25), (1, 2, 0.5), (2, 3, 0.75)], np.float32)
    return PairRates(pairs, rates, np.array(EDGES, np.float32))


@given(st.integers(0, 1000), st.integers(0, 60), st.integers(0, 20))
def test_rates_match_a_dictionary(seed: int, entries: int, size: int) -> None:
    rates, draws = draw(seed, entries), np.random.default_rng(seed)
    assert rates.is_valid(4, S)
    rows = np.concatenate(
        [
            draws.choice([0, 1, 2, 3, CODES - 1], (size, S)),
            draws.choice([-1, 0, 0.5, 1, 2, 9, np.inf, -np.inf], (size, 2)),
        ],
        axis=1,
    ).astype(np.float32)
    known = {(int(pair), int(first), int(second)): rate for pair, first, second, rate in rates.rates}

    def code(row: np.ndarray[tuple[int], np.dtype[np.float32]], column: int) -> int:
        return (
            int(row[column])
            if column < S
            else sum(row[column] >= edge for place, edge in EDGES if place == column)
        )

    expected = [
        [
            known.get((pair, code(row, int(first)), code(row, int(second))), mean)
            for pair, (first, second, mean) in enumerate(rates.pairs)
        ]
        for row in rows
    ]
    actual = look_up_pairs(rows, rates, rates.keys(), S)
    np.testing.assert_array_equal(actual, np.reshape(expected, (size, 3)).astype(np.float32))
    np.testing.assert_array_equal(packed_rates(rows, rates, S), actual)


def test_without_pairs_there_are_no_columns() -> None:
    rates = no_pairs()
    assert rates.is_valid(0, 0)
    rows = np.zeros((5, 3), np.float32)
    assert look_up_pairs(rows, rates, rates.keys(), 2).shape == (5, 0)
    assert packed_rates(rows, rates, 2).shape == (5, 0)


def test_numbers_that_are_no_codes_have_a_code() -> None:
    """Such as ids beyond the largest code, and features that are not a number."""
    rates = draw(0)
    rows = np.array([[1e30, -1e30, np.nan, np.nan], [CODES, CODES + 2, 0, 0]], np.float32)
    codes = pair_codes(rows, rates, S)
    assert ((codes >= 0) & (codes < CODES)).all()
    expected = look_up_pairs(rows, rates, rates.keys(), S)
    np.testing.assert_array_equal(packed_rates(rows, rates, S), expected)


@njit
def fill_rates(rows, packed, result):
    look_up(rows, packed, result, 2)


def packed_rates(rows: np.ndarray[Any, Any], rates: PairRates, categorical: int) -> np.ndarray[Any, Any]:
    """Return the rates that the kernel adds behind two columns."""
    result = np.full((len(rows), 2 + len(rates.pairs)), -1, np.float32)
    fill_rates(rows, pack_pairs(rates, categorical), result)
    assert (result[:, :2] == -1).all()
    return result[:, 2:]


@pytest.mark.parametrize(
    ("array", "row", "field", "value"),
    [
        *(
            ("pairs", 1, field, value)
            for field, values in enumerate(((-1, 4, 0.5), (-1, 4), (-0.1, 1.1)))
            for value in values
        ),
        *(
            ("rates", 1, field, value)
            for field, values in enumerate(
                ((-1, 3, 0.5), (-1, CODES, 0.5), (-1, CODES, 0.5), (-0.1, 1.1, np.nan))
            )
            for value in values
        ),
        *(
            ("edges", 1, field, value)
            for field, values in enumerate(((1, 3, 4, 2.5), (0.5, 0.0, np.nan)))
            for value in values
        ),
    ],
)
def test_invalid_arrays_are_refused(array: str, row: int, field: int, value: float) -> None:
    rates = draw(1)
    getattr(rates, array)[row, field] = value
    assert not rates.is_valid(4, S)


def test_pairs_that_are_not_sorted_or_occur_twice_are_refused() -> None:
    rates = draw(2)
    assert not rates._replace(rates=rates.rates[::-1]).is_valid(4, S)
    assert not rates._replace(rates=np.repeat(rates.rates, 2, axis=0)).is_valid(4, S)
