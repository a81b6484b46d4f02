"""Places of tables: as even as tables allow, within each rank's memory."""

from __future__ import annotations

import numpy as np
import pytest

from errors import refuses
from stratarec.distributed.table_placement import TableLoad, plan_sharding
from stratarec.errors import ConfigError

MIB = 1 << 20


def load(
    name: str, size: int = MIB, lookups: float = 1000.0, bags: float = 1000.0, distinct: float = 900.0
) -> TableLoad:
    return TableLoad(name=name, width=16, bytes=size, lookups=lookups, bags=bags, distinct=distinct)


def many(count: int = 26) -> list[TableLoad]:
    draws = np.random.default_rng(3)
    return [
        load(f"t{place}", int(size), float(looked), float(looked), float(looked) * 0.6)
        for place, (size, looked) in enumerate(
            zip(draws.pareto(1.2, count) * MIB + 1, draws.integers(500, 4000, count), strict=True)
        )
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_tables_are_dealt_out_evenly(ranks: int) -> None:
    plan = plan_sharding(many(), ranks)
    assert plan.imbalance < 1.15
    assert sum(plan.bytes) == pytest.approx(sum(table.bytes for table in many()), rel=1e-6)
    assert plan.critical == int(np.argmax(plan.costs))


def test_a_table_that_is_most_of_the_work_is_shared_row_by_row() -> None:
    plan = plan_sharding([load("large", lookups=50_000, bags=50_000, distinct=9_000), *many(8)], 4)
    assert (plan.places["large"].first, plan.places["large"].ranks) == (0, 4)
    assert plan.imbalance < 1.1
    whole = plan_sharding([load("large", lookups=50_000, bags=50_000, distinct=9_000), *many(8)], 4, "table")
    assert whole.places["large"].ranks == 1
    assert whole.imbalance > 1.5


def test_a_budget_that_a_rank_misses_names_the_rank() -> None:
    with refuses(ConfigError, "rank 0 memory.dram 1048576"):
        plan_sharding([load("a", 4 * MIB), load("b", 4 * MIB)], 2, budget_bytes=MIB)
