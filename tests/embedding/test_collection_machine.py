"""Test that a tiered collection has the rows of the same tables in memory after any sequence of
operations.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from store_conformance import FailingStore, make_failing
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import (
    EmbeddingBagConfig,
    Embeddings,
    Prefetcher,
    StagedBatch,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import StorageError, TrainingError

ROWS = {"item": 300, "user": 200, "page": 20}
KEYS = ("page", "history", "user", "item")
TABLES = (
    EmbeddingBagConfig(
        name="item",
        num_embeddings=300,
        embedding_dim=4,
        feature_names=("item",),
        sequence_features=("history",),
    ),
    EmbeddingBagConfig(
        name="user", num_embeddings=200, embedding_dim=4, feature_names=("user",), pooling="mean"
    ),
    EmbeddingBagConfig(name="page", num_embeddings=20, embedding_dim=4, feature_names=("page",)),
)
BATCH = 6


def batch(seed: int) -> KeyedJagged:
    """Return bags of 0 to 2 ids from a skewed distribution."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 3, (len(KEYS), BATCH))
    limits = [ROWS["item" if key == "history" else key] for key in KEYS]
    ids = [
        np.minimum(generator.zipf(1.3, int(lengths[place].sum())) - 1, limit - 1)
        for place, limit in enumerate(limits)
    ]
    return KeyedJagged(
        keys=KEYS,
        values=torch.from_numpy(np.concatenate(ids)),
        offsets=torch.from_numpy(np.cumsum([0, *lengths.reshape(-1)])),
        batch_size=BATCH,
    )


def loss_of(output: Embeddings) -> Tensor:
    return output.pooled.square().sum() + output.sequences["history"].values.square().sum()


def rows_of(module: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.clone() for name in ROWS for part, rows in module.table(name).items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert torch.equal(rows, other[name]), name


class CollectionMachine(RuleBasedStateMachine):
    """Compare a tiered collection with the same tables in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.handles: list[tuple[StagedBatch, KeyedJagged]] = []
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.saved: list[tuple[Path, Any, dict[str, Tensor]]] = []
        self.previous: Path | None = None
        self.made = 0

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.plain = TieredEmbeddingBagCollection(TABLES)
        self.make(data)

    def make(self, data: st.DataObject) -> None:
        self.made += 1
        draw = data.draw
        tables = {
            name: TableTier(
                home=draw(st.sampled_from(["dram", "mapped", "log"])),
                cache_rows=draw(st.sampled_from([64, 96, 400])),
                dram_rows=draw(st.sampled_from([0, 30])),
            )
            for name in draw(st.sampled_from([("item",), ("user", "item")]))
        }
        path = self.folder / f"rows-{self.made}"
        tiers = TierConfig(
            tables=tables,
            policy=draw(st.sampled_from(["lru", "rank"])),
            ways=8,
            mapped_path=path,
            log_path=path,
        )
        self.module = TieredEmbeddingBagCollection(TABLES, tiers=tiers)
        self.stores: list[FailingStore] = []
        for group in self.module.engine.tables:
            if isinstance(group, CachedTables) and group.store.kind == "log":
                store = make_failing(group)
                self.stores.append(store)
        self.previous = None

    def open(self) -> bool:
        return self.module.engine.health.state == "open"

    # Steps

    @precondition(open)
    @rule(seed=st.integers(0, 10**6))
    def stage(self, seed: int) -> None:
        if len(self.handles) < 3:
            self.try_to_stage(seed)

    def try_to_stage(self, seed: int) -> None:
        features = batch(seed)
        under_way = len(self.handles) + len(self.losses)
        try:
            self.handles.append((self.module.stage(features), features))
        except TrainingError as error:
            if not (under_way and "do not fit level 0 together" in str(error)):
                raise

    @precondition(open)
    @rule(seed=st.integers(0, 10**6))
    def step(self, seed: int) -> None:
        features = batch(seed)
        if self.handles:
            with pytest.raises(TrainingError, match="but not looked up"):
                self.module(features)
        elif not self.losses:
            loss_of(self.module(features)).backward()
            loss_of(self.plain(features)).backward()

    @precondition(lambda self: self.open() and self.handles)
    @rule(place=st.integers(0, 2))
    def look_up(self, place: int) -> None:
        handle, features = self.handles[min(place, len(self.handles) - 1)]
        if handle is not self.handles[0][0]:
            with pytest.raises(TrainingError, match="which was staged first"):
                self.module(handle)
            return
        self.handles.pop(0)
        actual, expected = self.module(handle), self.plain(features)
        assert torch.equal(actual.pooled, expected.pooled)
        assert torch.equal(actual.sequences["history"].values, expected.sequences["history"].values)
        self.losses.append((loss_of(actual), loss_of(expected)))

    @precondition(lambda self: self.open() and self.losses)
    @rule(place=st.integers(0, 5), drop=st.booleans())
    def go_back(self, place: int, drop: bool) -> None:
        losses = self.losses.pop(min(place, len(self.losses) - 1))
        if not drop:
            for loss in losses:
                loss.backward()

    @precondition(lambda self: self.handles)
    @rule()
    def release(self) -> None:
        self.handles.pop(0)[0].release()

    @precondition(lambda self: self.open() and not self.handles and not self.losses)
    @rule(
        seed=st.integers(0, 10**6),
        depth=st.integers(0, 3),
        count=st.integers(1, 6),
        leave=st.integers(1, 6),
    )
    def train_ahead(self, seed: int, depth: int, count: int, leave: int) -> None:
        source = iter([batch(seed + place) for place in range(count)])
        with Prefetcher(self.module.engine, source, lambda features, _: features, depth=depth) as ahead:
            for place, (features, handle) in enumerate(ahead):
                if place == leave:
                    break
                for output in (self.module(handle), self.plain(features)):
                    loss_of(output).backward()
        assert not len(self.module.engine.in_flight)

    @precondition(open)
    @rule(seed=st.integers(0, 10**6))
    def read(self, seed: int) -> None:
        with torch.no_grad():
            assert torch.equal(self.module(batch(seed)).pooled, self.plain(batch(seed)).pooled)

    # Failures

    @precondition(lambda self: self.open() and self.stores and len(self.handles) < 3)
    @rule(
        seed=st.integers(0, 10**6),
        operation=st.sampled_from(["read", "write"]),
        share=st.sampled_from([0.0, 0.5, 1.0]),
        interrupt=st.booleans(),
    )
    def fail(self, seed: int, operation: str, share: float, interrupt: bool) -> None:
        error = KeyboardInterrupt() if interrupt else StorageError("no space")
        self.stores[0].fail(operation, error, share=share)
        try:
            self.try_to_stage(seed)
        except (StorageError, KeyboardInterrupt) as found:
            failed = found
        else:
            failed = None
        assert failed in (None, error)
        assert self.open() == (failed is None or not interrupt)
        self.stores[0].forget()

    @precondition(lambda self: not self.open())
    @rule(seed=st.integers(0, 10**6))
    def nothing_works(self, seed: int) -> None:
        with pytest.raises(TrainingError, match=r"incomplete|closed"):
            self.module(batch(seed))
        with pytest.raises(TrainingError, match=r"incomplete|closed"):
            self.module.save(self.folder / "never")
        assert not (self.folder / "never").exists()

    # Checkpoints

    @precondition(open)
    @rule()
    def save(self) -> None:
        path = self.folder / f"saved-{len(self.saved)}"
        if self.handles:
            with pytest.raises(TrainingError, match="staged and not looked up"):
                self.module.save(path, self.previous)
            return
        manifest = self.module.save(path, self.previous)
        state = {name: value.clone() for name, value in self.plain.state_dict().items()}
        self.saved.append((path, manifest, state))
        self.previous = path

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), anew=st.booleans())
    def load(self, data: st.DataObject, anew: bool) -> None:
        path, manifest, state = data.draw(st.sampled_from(self.saved))
        for handle, _ in self.handles:
            handle.release()
        self.handles = []
        if anew or self.module.engine.health.state == "closed":
            self.module.close()
            self.make(data)
        self.module.load(path, manifest)
        self.previous = path
        self.plain.load_state_dict(state)
        self.losses = []

    @rule()
    def close(self) -> None:
        if self.saved:
            self.module.close()
            self.handles = []
            self.losses = []

    @invariant()
    def rows_are_those_in_memory(self) -> None:
        if hasattr(self, "module") and self.open():
            assert_same(rows_of(self.plain), rows_of(self.module))

    def teardown(self) -> None:
        self.handles = []
        self.losses = []
        if hasattr(self, "module"):
            self.module.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# Hypothesis does not shrink failures here because shrinking takes minutes; a failure prints its
# steps.
CollectionMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestCollection = CollectionMachine.TestCase


def test_collections_on_different_threads_are_independent(tmp_path: Path) -> None:
    plain = TieredEmbeddingBagCollection(TABLES)
    for seed in range(60):
        loss_of(plain(batch(seed))).backward()
    expected, actual = rows_of(plain), {}

    def train(number: int) -> None:
        tiers = TierConfig(
            tables={"item": TableTier(home="log" if number % 2 else "dram", cache_rows=64)},
            ways=4,
            log_path=tmp_path / str(number),
        )
        module = TieredEmbeddingBagCollection(TABLES, tiers=tiers)
        source = iter([batch(seed) for seed in range(60)])
        with Prefetcher(module.engine, source, lambda features, _: features, depth=number) as ahead:
            for _, handle in ahead:
                loss_of(module(handle)).backward()
        actual[number] = rows_of(module)
        module.close()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(actual) == 4
    for rows in actual.values():
        assert_same(expected, rows)
