"""Test that every row has one owner and that tables are distributed within the ranks' budgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.distributed.sharding import Place, Sharding, TableLoad, plan_sharding
from stratarec.embedding import EmbeddingBagConfig
from stratarec.errors import ConfigError


def table(rows: int, name: str = "t") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=4,
        feature_names=(f"{name}1",),
        sequence_features=(f"{name}s",),
    )


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 4))
def test_every_row_has_one_owner_and_the_ranks_have_all_rows(rows: int, shared: int, first: int) -> None:
    sharding = Sharding(
        [table(rows)], {"t": Place(first=first, ranks=shared, travel="rows")}, first + shared + 1
    )
    numbers = np.arange(rows)
    owners, own = sharding.owner("t", numbers)
    for rank in range(sharding.ranks):
        count = sharding.rows_on(sharding.tables[0], rank)
        assert count == (owners == rank).sum()
        assert (np.sort(own[owners == rank]) == np.arange(count)).all()
        for config in sharding.configs(rank):
            part = config.numbering
            assert config.num_embeddings == count
            assert (part.first + np.arange(count) * part.stride == numbers[owners == rank]).all()


def test_popular_rows_are_distributed_evenly() -> None:
    """With ids ranked by frequency, any rank's share of a Zipf distribution is near the mean."""
    sharding = Sharding([table(10_000)], {"t": Place(first=0, ranks=4, travel="rows")}, 4)
    weight = 1 / np.arange(20, 10_020)
    owners, _ = sharding.owner("t", np.arange(10_000))
    shares = np.bincount(owners, weights=weight) / weight.sum()
    assert abs(shares - 0.25).max() < 0.01


@pytest.mark.parametrize(
    ("places", "message"), [({"t": Place(first=3)}, "'t' ranks 3 0 2"), ({}, "table 't'")]
)
def test_invalid_places_are_refused(places: dict[str, Place], message: str) -> None:
    with refuses(ConfigError, message):
        Sharding([table(4)], places, 3)


def test_a_sharded_table_cannot_pool_at_one_owner() -> None:
    with refuses(ConfigError, "rows"):
        Place(first=0, ranks=2)


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
def test_many_tables_are_distributed_evenly(ranks: int) -> None:
    plan = plan_sharding(many(), ranks)
    assert plan.imbalance < 1.15
    assert sum(plan.bytes) == pytest.approx(sum(table.bytes for table in many()), rel=1e-6)
    assert plan.critical == int(np.argmax(plan.costs))


def test_a_table_with_most_of_the_work_is_sharded_by_row() -> None:
    plan = plan_sharding([load("large", lookups=50_000, bags=50_000, distinct=9_000), *many(8)], 4)
    assert (plan.places["large"].first, plan.places["large"].ranks) == (0, 4)
    assert plan.imbalance < 1.1
    by_table = plan_sharding(
        [load("large", lookups=50_000, bags=50_000, distinct=9_000), *many(8)], 4, "table"
    )
    assert by_table.places["large"].ranks == 1
    assert by_table.imbalance > 1.5


def test_a_budget_that_a_rank_exceeds_names_the_rank() -> None:
    with refuses(ConfigError, "rank 0 memory.dram 1048576"):
        plan_sharding([load("a", 4 * MIB), load("b", 4 * MIB)], 2, budget_bytes=MIB)
