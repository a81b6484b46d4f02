"""Test tables that share a store, and the planner's predictions for the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from errors import refuses
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.stores.ssd_layout import DEAD_SHARE
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.planning.bytes import SHARED_BYTES, BatchDemand, RowShape, cached_bytes, ssd_bytes


def ssd_stores_of(module: TieredEmbeddingBagCollection) -> list[SsdRecords]:
    stores = [tables.store for tables in module.engine.tables if isinstance(tables, CachedTables)]
    return [store for store in stores if isinstance(store, SsdRecords)]


def test_locations_of_a_billion_rows_take_the_planned_memory(tmp_path: Path) -> None:
    rows, codec, optimizer = 10**9, CodecConfig(kind="int8"), RowOptimizerConfig(kind="sgd")
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=(name,))
        for name in "abcd"
    ]
    tiers = TierConfig(
        tables={name: TableTier(home="log", codec=codec, cache_rows=64) for name in "abcd"},
        ways=4,
        log_path=tmp_path,
    )
    module = TieredEmbeddingBagCollection(configs, optimizer=optimizer, tiers=tiers)
    shape = RowShape.of(16, optimizer)
    planned = cached_bytes(
        shape,
        rows,
        home="log",
        codec=codec,
        slots=64,
        traffic=BatchDemand(lookups=0, distinct=0, batches=1),
    )["dram"]["locations"]
    actual = sum(store.rows * store.layout.location_type.itemsize for store in ssd_stores_of(module))
    assert actual == 4 * planned == 16 * 10**9
    module.close()


def test_logs_share_their_budget_as_planned(tmp_path: Path) -> None:
    """Records of 2,100 bytes take a block of 4,096 each, and records of 20 bytes waste almost
    nothing.

    A log of 50 rows needs as much spare space as the larger ones.
    """
    configs = [
        EmbeddingBagConfig(name="wide", num_embeddings=100_000, embedding_dim=525, feature_names=("w",)),
        EmbeddingBagConfig(name="thin", num_embeddings=1_000_000, embedding_dim=5, feature_names=("t",)),
        EmbeddingBagConfig(name="small", num_embeddings=50, embedding_dim=3, feature_names=("s",)),
    ]
    blocks = [ssd_bytes(4 * table.embedding_dim, table.num_embeddings) for table in configs]
    assert blocks[0] == 100_000 * 4096
    planned = [size + int(DEAD_SHARE * size) + SHARED_BYTES["block"]["dead space"] for size in blocks]
    tiers = TierConfig(
        tables={table.name: TableTier(home="log", cache_rows=64) for table in configs},
        log_path=tmp_path,
        log_budget_bytes=sum(planned),
    )
    optimizer = RowOptimizerConfig(kind="sgd")
    module = TieredEmbeddingBagCollection(configs, optimizer=optimizer, tiers=tiers)
    given = [store.config.budget_bytes for store in ssd_stores_of(module)]
    assert given == pytest.approx(planned, abs=3)
    assert sum(given) <= sum(planned)
    module.close()
    tiers = replace(tiers, log_budget_bytes=10 << 20)
    with refuses(ConfigError, "memory.block.budget 10485760 3 stores 12582912"):
        TieredEmbeddingBagCollection(configs, optimizer=optimizer, tiers=tiers)
