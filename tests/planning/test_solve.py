"""Compare the mixed-integer program with brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.planning.solve import GAP, Groups, solve

candidate = st.tuples(
    st.floats(0, 1e-2), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**12)
)
tables = st.lists(st.lists(candidate, min_size=1, max_size=5), min_size=1, max_size=4)
budget = st.none() | st.integers(0, 10**10)


@settings(deadline=None, max_examples=75)
@given(tables=tables, budgets=st.tuples(budget, budget, budget), data=st.data())
def test_the_optimum_matches_brute_force(
    tables: list[list[tuple[float, int, int, int]]], budgets: tuple[int | None, ...], data: st.DataObject
) -> None:
    """Problems include groups, whose bytes and costs count once for all of their candidates."""
    costs = [np.array([each[0] for each in table]) for table in tables]
    sizes = [np.array([each[1:] for each in table], dtype=np.int64) for table in tables]

    shared = data.draw(st.lists(candidate, max_size=2))
    groups = Groups(
        member=[
            np.array(
                data.draw(
                    st.lists(st.integers(-1, len(shared) - 1), min_size=len(table), max_size=len(table))
                )
            )
            for table in tables
        ],
        sizes=np.array([each[1:] for each in shared], dtype=np.int64).reshape(len(shared), 3),
        costs=np.array([each[0] for each in shared]),
    )

    def total(choice: tuple[int, ...]) -> float:
        fees = groups.costs[groups.used(choice)].sum()
        return float(fees + sum(cost[index] for cost, index in zip(costs, choice, strict=True)))

    def fits(choice: tuple[int, ...]) -> bool:
        used = groups.sizes[groups.used(choice)].sum(axis=0)
        used = used + sum(size[index] for size, index in zip(sizes, choice, strict=True))
        return all(limit is None or use <= limit for use, limit in zip(used, budgets, strict=True))

    every = [
        choice for choice in itertools.product(*(range(len(table)) for table in tables)) if fits(choice)
    ]
    result = solve(costs, sizes, budgets, groups)
    if not every:
        assert result is None
        return
    assert result is not None
    assert fits(tuple(result))
    assert total(tuple(result)) <= min(map(total, every)) * (1 + GAP) + 1e-12


def test_a_budget_can_be_met_exactly() -> None:
    costs = [np.array([0.0, 1.0])] * 3
    sizes = [np.array([[1 << 40], [(1 << 40) - 1]])] * 3
    assert solve(costs, sizes, [3 << 40]) == [0, 0, 0]


@pytest.mark.parametrize("over", [1, 1000])
def test_a_terabyte_budget_is_never_exceeded_by_a_byte(over: int) -> None:
    costs = [np.array([0.0, 1.0])] * 3
    sizes = [np.array([[1 << 40], [(1 << 40) - over]])] * 3
    result = solve(costs, sizes, [(3 << 40) - over])
    assert result is not None
    assert sum(result) == 1
