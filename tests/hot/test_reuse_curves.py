"""Hit-rate curves of one pass against caches that are replayed."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from recipes import log_config
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.tables.cache import Directory
from stratarec.embedding.tiers import TableTier
from stratarec.hot.reuse import TableReuse, measure_reuse
from stratarec.kernels.bags import BagBatch, GroupLayout

SAMPLES, BATCH = 60_000, 300


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Values by Zipf's law, and rare ones that share a few rows."""
    draws = np.random.default_rng(0)
    weight = np.arange(1, 30_001) ** -0.9
    values = draws.choice(30_000, SAMPLES, p=weight / weight.sum())
    frame = pl.DataFrame({"label": draws.integers(0, 2, SAMPLES), "item": values, "one": np.ones(SAMPLES, np.int64)})
    schema = Schema(sparse=(SparseFeature(name="item"), SparseFeature(name="one")))
    limits = VocabularyConfig(min_count=2, tail_buckets=8)
    return prepare(log_config(tmp_path_factory.mktemp("zipf"), schema, frame, vocabulary=limits))


@pytest.fixture(scope="module")
def measured(dataset: Dataset) -> dict[str, TableReuse]:
    return {table.table: table for table in measure_reuse(dataset, batch_size=BATCH)}


def replayed(dataset: Dataset, policy: str, slots: int) -> float:
    """Hits of the item's table among the different rows of each batch, by the directory that training has."""
    rows = dataset.table_rows()["item"]
    config = EmbeddingBagConfig(name="item", num_embeddings=rows, embedding_dim=4, feature_names=("item",))
    cache = Directory([config], {"item": TableTier(cache_rows=slots)}, policy=policy, ways=32, seed=0)
    zero, two = np.zeros(1, np.int64), np.arange(2, dtype=np.int64)
    group = GroupLayout(
        width=4, base=zero, rows=np.array([cache.slots]), column=zero, mean=zero, sequence=zero, table_start=two,
        table_features=zero,
    )  # fmt: skip
    uses = misses = 0
    for number, batch in enumerate(Loader(dataset, "train", LoaderConfig(batch_size=BATCH)).batches(0)):
        values = batch.sparse["item"].values.numpy().astype(np.int32)
        bags = BagBatch(
            values=values, offsets=np.array([0, len(values)]), weights=None, batch=1, key=zero
        )  # fmt: skip
        staging = cache.assign(group, bags, np.empty(len(values), np.int32), number, number - 1)
        assert not staging.stuck.any()
        uses += len(np.unique(values))
        misses += int(staging.rows_in.sum())
    return 1 - misses / uses


@pytest.mark.parametrize("policy", ["lru", "rank"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_curves_are_those_of_replayed_caches(
    dataset: Dataset, measured: dict[str, TableReuse], policy: str, share: float
) -> None:
    found = measured["item"]
    assert found.exact
    # One set in sixteen is an overflow area.
    slots = int(share * found.rows)
    rate = float(np.interp(slots * 15 / 16, found.sizes, found.hits[policy]))
    assert rate == pytest.approx(replayed(dataset, policy, slots), abs=0.01)
