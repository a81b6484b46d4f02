"""What hot rows leave to caches."""

from __future__ import annotations

import numpy as np
import pytest

from stratarec.planning.candidates import cold_popularity
from stratarec.planning.popularity import Popularity

COUNTS = np.array([400, 200, 100, 50, 20, 10, 10, 10, 0, 30], dtype=np.int64)


@pytest.mark.parametrize("hot", [0, 3, 10])
def test_a_cache_is_asked_for_the_other_rows_as_often_as_before(hot: int) -> None:
    found = cold_popularity(COUNTS, hot)
    chance = 1 - (1 - COUNTS / COUNTS.sum()) ** 25
    chance[:hot] = 0
    assert found.distinct(25) == pytest.approx(chance.sum(), rel=1e-6)
    assert found.used_rows == np.count_nonzero(chance)


def test_rows_that_nobody_asks_for_leave_nothing() -> None:
    assert Popularity.uniform(7).times(0).distinct(100) == 0
