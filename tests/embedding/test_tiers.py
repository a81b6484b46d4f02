"""Test tables with a cache. With float32 homes they match tables in memory bit for bit, for any
cache and lookahead.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from errors import refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    Prefetcher,
    RowOptimizerConfig,
    StagedBatch,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import HomeKind, TableTier, TierConfig
from stratarec.errors import ConfigError

STEPS = 100
ROWS = {"item": 20_000, "user": 20_000}
TABLES = (
    EmbeddingBagConfig(
        name="item",
        num_embeddings=ROWS["item"],
        embedding_dim=8,
        feature_names=("item",),
        sequence_features=("history",),
    ),
    EmbeddingBagConfig(
        name="user",
        num_embeddings=ROWS["user"],
        embedding_dim=8,
        feature_names=("user", "friend"),
        pooling="mean",
    ),
    EmbeddingBagConfig(name="page", num_embeddings=40, embedding_dim=8, feature_names=("page",)),
)
KEYS = {
    "item": ROWS["item"],
    "user": ROWS["user"],
    "friend": ROWS["user"],
    "page": 40,
    "history": ROWS["item"],
}
SAMPLES = 24


def batches(steps: int = STEPS, seed: int = 0) -> list[KeyedJagged]:
    """Return batches with bags of 0 to 3 ids from a skewed distribution."""
    generator = np.random.default_rng(seed)
    results = []
    for _ in range(steps):
        lengths = generator.integers(0, 4, (len(KEYS), SAMPLES))
        ids = [
            np.minimum(generator.zipf(1.2, int(lengths[place].sum())) - 1, rows - 1)
            for place, rows in enumerate(KEYS.values())
        ]
        results.append(
            KeyedJagged(
                keys=tuple(KEYS),
                values=torch.from_numpy(np.concatenate(ids).astype(np.int32)),
                offsets=torch.from_numpy(np.cumsum([0, *lengths.reshape(-1)]).astype(np.int64)),
                batch_size=SAMPLES,
            )
        )
    return results


def tiers(
    share: float, codec: CodecConfig | None = None, home: HomeKind = "dram", **options: object
) -> TierConfig:
    frequent = 0.2 if home == "log" else 0.0
    tables = {
        name: TableTier(
            home=home,
            codec=codec or CodecConfig(),
            cache_rows=int(size * share),
            dram_rows=int(size * frequent),
        )
        for name, size in ROWS.items()
    }
    return TierConfig(tables=tables, **{"ways": 8, **options})


def cached_tables(model: Model) -> list[CachedTables]:
    return [tables for tables in model.tables.engine.tables if isinstance(tables, CachedTables)]


class Model(nn.Module):
    def __init__(self, config: TierConfig | None, kind: str) -> None:
        super().__init__()
        kind, _, rows = kind.partition(" of ")
        changed = {"rows": "all", "weight_decay": 0.02} if rows else {}
        optimizer = RowOptimizerConfig(kind=kind, learning_rate=0.05, **changed)
        self.tables = TieredEmbeddingBagCollection(TABLES, optimizer=optimizer, seed=5, tiers=config)
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(4 * 8 + 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: KeyedJagged | StagedBatch) -> Tensor:
        result = self.tables(features)
        history = result.sequences["history"]
        lengths = history.offsets.diff()
        pooled = torch.segment_reduce(history.values, "sum", lengths=lengths, initial=0.0)
        return self.network(torch.cat([result.pooled, pooled], dim=1)).squeeze(1)


def train(model: Model, data: list[KeyedJagged], lookahead: int, pause: int = 0) -> list[float]:
    dense = torch.optim.SGD(model.network.parameters(), lr=0.1)
    losses = []
    pausing = (lambda place: (place + 1) % pause == 0) if pause else (lambda place: False)
    with Prefetcher(
        model.tables.engine, iter(data), lambda item, _: item, depth=lookahead, pause_after=pausing
    ) as source:
        for place, (features, handle) in enumerate(source):
            dense.zero_grad()
            target = (features.values[:SAMPLES] % 2).float()
            loss = nn.functional.binary_cross_entropy_with_logits(model(handle), target)
            loss.backward()
            dense.step()
            losses.append(loss.item())
            assert not pausing(place) or source.drained
    return losses


def all_rows(model: Model) -> dict[str, Tensor]:
    parts = {
        f"{table.name}.{part}": view.clone()
        for table in TABLES
        for part, view in model.tables.table(table.name).items()
    }
    return parts | {name: value.clone() for name, value in model.network.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.fixture(scope="module")
def in_memory() -> dict[str, dict[str, Tensor]]:
    results = {}
    for kind in ("sgd", "rowwise_adagrad", "adagrad", "rowwise_adam", "adam", "adam of all rows"):
        model = Model(None, kind)
        train(model, batches(), 0)
        results[kind] = all_rows(model)
    return results


HOMES, SHARES, LOOKAHEADS = ("dram", "mapped", "log"), (0.01, 0.03, 1.0), (0, 1, 2, 4)


# Each combination of home, cache share and lookahead.
@pytest.mark.parametrize(
    ("home", "share", "lookahead"),
    [
        (HOMES[(i + j) % 3], share, ahead)
        for i, share in enumerate(SHARES)
        for j, ahead in enumerate(LOOKAHEADS)
    ],
)
def test_cached_tables_match_tables_in_memory_bit_for_bit(in_memory, tmp_path, home, share, lookahead):
    model = Model(tiers(share, home=home, mapped_path=tmp_path, log_path=tmp_path), "rowwise_adagrad")
    train(model, batches(), lookahead)
    assert_same(in_memory["rowwise_adagrad"], all_rows(model))
    model.tables.close()
    moved = [tables.traffic for tables in cached_tables(model)]
    assert share == 1.0 or all(traffic.rows_out > 0 for traffic in moved), (
        "nothing was evicted: no test of eviction"
    )


def test_a_bad_id_in_one_table_changes_no_row(in_memory):
    model = Model(tiers(0.01), "rowwise_adagrad")
    data = batches()
    train(model, data[:40], 0)
    wrong = batches(1, seed=3)[0]
    # The other table still assigns slots to its rows and evicts others for them.
    first = list(KEYS).index("friend") * SAMPLES
    wrong.values[wrong.bag_offsets()[first] : wrong.bag_offsets()[first + SAMPLES]] += ROWS["user"]
    for _ in range(2):
        with refuses(ConfigError, "table"):
            model(wrong)
    train(model, data[40:], 0)
    assert_same(in_memory["rowwise_adagrad"], all_rows(model))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp16"])
def test_a_codec_gives_the_same_bits_in_every_run(kind):
    def run(pause: int) -> dict[str, Tensor]:
        model = Model(tiers(0.01, CodecConfig(kind=kind)), "rowwise_adagrad")
        train(model, batches(), 2, pause)
        return all_rows(model)

    first = run(0)
    assert_same(first, run(0))
    # A pause for an evaluation or a checkpoint does not change which rows are evicted.
    assert_same(first, run(7))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam of all rows"])
def test_reading_changes_nothing_and_returns_every_row(kind):
    plain, cached = Model(None, kind), Model(tiers(0.01), kind)
    data = batches()
    train(plain, data, 0)
    train(cached, data, 0)
    before = all_rows(cached)
    state = [tables.directory.state.tags.copy() for tables in cached_tables(cached)]
    with torch.no_grad():
        for features in batches(5, seed=9):
            assert torch.equal(plain(features), cached(features))
    assert_same(before, all_rows(cached))
    for tables, tags in zip(cached_tables(cached), state, strict=True):
        assert (tables.directory.state.tags == tags).all()


def test_records_of_rows_with_missed_steps_are_not_exported_as_stored():
    model = Model(tiers(0.01, CodecConfig(kind="int8")), "adam of all rows")
    train(model, batches(40), 0)
    for tables in cached_tables(model):
        name, rows = tables.configs[0].name, tables.configs[0].num_embeddings
        there = tables.store.written(np.arange(rows)) & (tables.directory.locate(np.arange(rows)) < 0)
        records, home = tables.read_records(name, 0, rows)
        clocks = np.ascontiguousarray(records[:, tables.codec.layout.clock_at :]).view(np.int32)[:, 0]
        assert (clocks[home] == 40).all()
        assert (clocks[there & ~home] < 40).all()
        assert (there & ~home).any()
    # Reading the rows applies the missed steps.
    assert (model.tables.rows("item", 0, ROWS["item"])["clock"] == 40).all()


def singles(values: Tensor) -> KeyedJagged:
    """Return a batch with one id per bag."""
    values = values.clone()
    for place, rows in enumerate(KEYS.values()):
        values[place * SAMPLES : (place + 1) * SAMPLES] %= rows
    return KeyedJagged(keys=tuple(KEYS), values=values, offsets=None, batch_size=SAMPLES)


def test_rows_of_batches_in_flight_wait_when_they_do_not_fit_together():
    """Three batches of 24 new rows each share 32 slots.

    Staging must wait for the earlier batches instead of failing.
    """
    config = TierConfig(tables={"item": TableTier(cache_rows=64)}, ways=8)
    plain, cached = Model(None, "sgd"), Model(config, "sgd")
    data = []
    for step in range(30):
        values = torch.arange(5 * SAMPLES, dtype=torch.int32) + step * 31
        data.append(singles(values))
    train(plain, data, 0)
    train(cached, data, 3)
    assert_same(all_rows(plain), all_rows(cached))


def test_staging_ahead_waits_for_the_backward_pass_of_rows_to_evict():
    model, data = Model(tiers(0.01), "sgd"), batches(3)
    engine = model.tables.engine
    handles = [engine.stage_ahead(features, 1, lambda: False) for features in data[:2]]
    first = model(handles[0]).sum()
    thread = threading.Thread(target=engine.stage_ahead, args=(data[2], 1, lambda: False))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive(), "batch 2 was staged before batch 0 had been trained"
    first.backward()
    thread.join(30)
    assert not thread.is_alive()


def test_two_forward_passes_before_two_backward_passes_keep_their_rows():
    plain, cached = Model(None, "sgd"), Model(tiers(0.01), "sgd")
    data = batches()
    for model in (plain, cached):
        for left, right in zip(data[::2], data[1::2], strict=True):
            losses = [model(features).sum() for features in (left, right)]
            for loss in losses:
                loss.backward()
    assert_same(all_rows(plain), all_rows(cached))


def test_an_error_while_staging_ahead_is_raised_when_the_batch_is_requested():
    model = Model(tiers(0.01), "sgd")
    data = batches(4)
    data[2].values[0] = ROWS["item"]
    with refuses(ConfigError, "item id 20000"):
        train(model, data, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adam", "adam", "adam of all rows"])
def test_every_optimizer_under_rank_matches_tables_in_memory_bit_for_bit(in_memory, kind):
    model = Model(tiers(0.01, policy="rank"), kind)
    train(model, batches(), 1)
    assert_same(in_memory[kind], all_rows(model))
