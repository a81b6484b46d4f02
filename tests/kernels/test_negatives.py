"""Test negatives of clicks: only allowed clicks are drawn, all with the same probability, and
pieces do not change the draws.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.kernels.negatives import draw_negatives, reference_candidates

Log = tuple[np.ndarray, np.ndarray, np.ndarray]


def random_log(seed: int, clicks: int, users: int, splits: int) -> Log:
    draws = np.random.default_rng(seed)
    times = np.sort(draws.integers(0, clicks, clicks)) // 3 * 3
    return (
        times,
        draws.integers(0, users, clicks).astype(np.uint64),
        draws.integers(0, splits, clicks).astype(np.int8),
    )


def draw(
    log: Log, first: int, last: int, window: int, negatives: int, number: int | None = None
) -> np.ndarray:
    number = first if number is None else number
    return draw_negatives(*log, clicks=(first, last), window=window, count=negatives, key=7, number=number)


@pytest.mark.interpreted
@settings(deadline=None)  # the first call compiles
@given(
    seed=st.integers(0, 1 << 30),
    clicks=st.integers(1, 60),
    users=st.integers(1, 5),
    splits=st.integers(1, 3),
    window=st.integers(0, 25),
)
def test_only_following_clicks_of_other_users_in_the_same_split_are_drawn(
    seed: int, clicks: int, users: int, splits: int, window: int
) -> None:
    log = random_log(seed, clicks, users, splits)
    drawn = draw(log, 0, clicks, window, 3)
    for click in range(clicks):
        allowed = reference_candidates(*log, click, window)
        assert set(drawn[click]) <= (set(allowed) or {-1})
    for cut in range(0, clicks, 7):
        np.testing.assert_array_equal(drawn[cut:], draw(log, cut, clicks, window, 3))


@pytest.mark.parametrize("own", [2, 300])
def test_every_candidate_is_equally_likely(own: int) -> None:
    # With 300 clicks of the same user in the window most draws fail, and the window is searched
    # instead.
    users = np.array([1] + [1] * own + [2, 3, 4, 5, 6], dtype=np.uint64)
    log = np.arange(len(users)), users, np.zeros(len(users), dtype=np.int8)
    drawn = np.concatenate(
        [draw(log, 0, 1, len(users), 4, number=number) for number in range(5000)]
    ).ravel()
    counts = np.bincount(drawn - own - 1, minlength=5)
    expected = drawn.size / 5
    assert ((counts - expected) ** 2 / expected).sum() < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


@pytest.mark.interpreted
def test_no_clicks_and_no_negatives_are_allowed() -> None:
    empty = np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int8)
    assert draw(empty, 0, 0, 10, 2).shape == (0, 2)
    assert draw(random_log(0, 5, 2, 1), 0, 5, 10, 0).shape == (5, 0)
