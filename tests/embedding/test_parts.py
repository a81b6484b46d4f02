"""Test the first weights of rows.

A table that holds some rows of a larger table has their first weights and their rounding.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig, RowPart
from stratarec.embedding.tiers import TableTier, TierConfig

ROWS, WIDTH, STRIDE = 101, 8, 3


def make_collection(part: RowPart | None, tiers: TierConfig | None) -> TieredEmbeddingBagCollection:
    rows = ROWS if part is None else -(-(ROWS - part.first) // part.stride)
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=WIDTH, sequence_features=("s",), part=part
    )
    return TieredEmbeddingBagCollection([table], seed=3, tiers=tiers)


def tiers_of(home: str, codec: str, path: Path) -> TierConfig:
    tier = TableTier(home=home, codec=CodecConfig(kind=codec), cache_rows=8)  # type: ignore[arg-type]
    return TierConfig(tables={"t": tier}, ways=8, log_path=path if home == "log" else None)


def train(collection: TieredEmbeddingBagCollection, ids: torch.Tensor) -> torch.Tensor:
    features = KeyedJagged(keys=("s",), values=ids, offsets=torch.tensor([0, len(ids)]), batch_size=1)
    rows = collection(features).sequences["s"].values
    (rows * rows).sum().backward()
    return rows.detach().clone()


@pytest.mark.parametrize("first", range(STRIDE))
def test_a_resident_part_starts_as_its_rows_of_the_full_table(first: int) -> None:
    part = make_collection(RowPart(first=first, stride=STRIDE, rows=ROWS), None).table("t")["weight"]
    assert torch.equal(part, make_collection(None, None).table("t")["weight"][first::STRIDE])


@pytest.mark.parametrize("home", ["dram", "log"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_cached_part_trains_and_rounds_as_its_rows_of_the_full_table(
    home: str, codec: str, first: int, tmp_path: Path
) -> None:
    """Each batch fills the cache, so the part and the full table evict the same rows at the same
    steps.
    """
    full = make_collection(None, tiers_of(home, codec, tmp_path / "whole"))
    part = make_collection(
        RowPart(first=first, stride=STRIDE, rows=ROWS), tiers_of(home, codec, tmp_path / "part")
    )
    draws = torch.Generator().manual_seed(1)
    for _ in range(12):
        ids = torch.randperm(len(range(first, ROWS, STRIDE)), generator=draws)[:8]
        assert torch.equal(train(part, ids), train(full, first + ids * STRIDE))
    assert torch.equal(part.table("t")["weight"], full.table("t")["weight"][first::STRIDE])
    full.close()
    part.close()


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize(("initial", "bound"), [(0.0, 500**-0.5), (1e-4, 1e-4)])
def test_first_weights_are_uniform_within_a_bound(initial: float, bound: float, tiered: bool) -> None:
    """The bound is given, or follows from the number of rows."""
    table = EmbeddingBagConfig(
        name="t", num_embeddings=500, embedding_dim=4, feature_names=("f",), initial=initial
    )
    tiers = TierConfig(tables={"t": TableTier(cache_rows=64)}, ways=4) if tiered else None
    rows = TieredEmbeddingBagCollection([table], tiers=tiers).rows("t", 0, 500)["weight"]
    assert rows.abs().max() <= bound
    assert rows.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
