"""First weights of rows: within a bound that is given, or that follows from the rows of the table."""

from __future__ import annotations

import math

import pytest

from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError

ROWS = 500


def collection(initial: float, tiered: bool) -> TieredEmbeddingBagCollection:
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=("f",), initial=initial)
    tiers = TierConfig(tables={"t": TableTier(cache_rows=64)}, ways=4) if tiered else None
    return TieredEmbeddingBagCollection([table], tiers=tiers)


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize(("initial", "bound"), [(0.0, ROWS**-0.5), (1e-4, 1e-4)])
def test_first_weights_are_uniform_within_a_bound(initial: float, bound: float, tiered: bool) -> None:
    found = collection(initial, tiered)
    rows = found.rows("t", 0, ROWS)["weight"]
    assert rows.abs().max() <= bound
    assert rows.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("initial", [-1e-4, math.inf, math.nan])
def test_bounds_that_are_none_are_refused(initial: float) -> None:
    with pytest.raises(ConfigError, match=rf"table 't': initial is {initial}, expected a finite number of 0 or more"):
        collection(initial, False)
