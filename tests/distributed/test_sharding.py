"""The one rule of who holds which row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.distributed.sharding import Place, Sharding
from stratarec.embedding import EmbeddingBagConfig
from stratarec.errors import ConfigError


def table(rows: int, name: str = "t") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=4, feature_names=(f"{name}1",), sequence_features=(f"{name}s",)
    )


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 4))
def test_every_row_has_one_owner_and_the_parts_of_ranks_are_all_rows(rows: int, shared: int, first: int) -> None:
    sharding = Sharding([table(rows)], {"t": Place(first=first, ranks=shared, travel="rows")}, first + shared + 1)
    numbers = np.arange(rows)
    owners, own = sharding.owner("t", numbers)
    for rank in range(sharding.ranks):
        held = sharding.held(sharding.tables[0], rank)
        assert held == (owners == rank).sum()
        assert (np.sort(own[owners == rank]) == np.arange(held)).all()
        assert (sharding.whole("t", rank, own[owners == rank]) == numbers[owners == rank]).all()
        for config in sharding.configs(rank):
            part = config.numbering
            assert config.num_embeddings == held
            assert (part.first + np.arange(held) * part.stride == sharding.whole("t", rank, np.arange(held))).all()


def test_popular_rows_are_dealt_out_evenly() -> None:
    """Frequency-ranked ids: any rank's share of a Zipf law is near the mean."""
    sharding = Sharding([table(10_000)], {"t": Place(first=0, ranks=4, travel="rows")}, 4)
    weight = 1 / np.arange(20, 10_020)
    owners, _ = sharding.owner("t", np.arange(10_000))
    shares = np.bincount(owners, weights=weight) / weight.sum()
    assert abs(shares - 0.25).max() < 0.01


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"t": Place(first=3)}, "'t' ranks 3 0 2"),
        ({}, "table 't'"),
    ],
)
def test_places_that_do_not_fit_are_refused(places: dict[str, Place], message: str) -> None:
    with refuses(ConfigError, message):
        Sharding([table(4)], places, 3)


def test_a_shared_table_cannot_pool_at_one_owner() -> None:
    with refuses(ConfigError, "rows"):
        Place(first=0, ranks=2)
