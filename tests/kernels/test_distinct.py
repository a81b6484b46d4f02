"""Distinct ids and their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stratarec.kernels.unique import number_distinct, reference

DRAWS = np.random.default_rng(3)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [5] * 9,
        list(range(40, 0, -1)),
        (300 * DRAWS.random(500) ** 3).astype(int).tolist(),
        # One slot of the table for many, and the ends of the range.
        [1 << 20, 0, 3 << 20, 1 << 20, 2**31 - 1, 0],
    ],
)
def test_numbers_are_those_of_the_reference(ids: list[int], dtype: torch.dtype) -> None:
    given = torch.tensor(ids, dtype=dtype)
    found, places = number_distinct(given)
    assert (found.tolist(), places.tolist()) == reference.number_distinct(given)


def test_large_ids_are_told_apart() -> None:
    given = torch.from_numpy(DRAWS.integers(0, 2**40, 3000).repeat(2))
    found, places = number_distinct(given)
    assert (found.tolist(), places.tolist()) == reference.number_distinct(given)
