"""Test that a staged batch is used once and in order while its collection is open, and that any
other use is an error and never hangs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from errors import refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError, TrainingError

ROWS, BATCH = 1000, 24


def collection(cache_rows: int = 400, lookahead: int = 1) -> TieredEmbeddingBagCollection:
    """Create one table with a cache and one in memory."""
    return TieredEmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=4, feature_names=("a",)),
            EmbeddingBagConfig(name="b", num_embeddings=ROWS, embedding_dim=4, feature_names=("b",)),
        ],
        tiers=TierConfig(tables={"a": TableTier(cache_rows=cache_rows)}, ways=8, lookahead=lookahead),
    )


def batch(number: int) -> KeyedJagged:
    ids = (torch.arange(2 * BATCH) * 7 + number * 31) % ROWS
    return KeyedJagged(keys=("a", "b"), values=ids, offsets=None, batch_size=BATCH)


def rows_of(module: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.clone() for name in "ab" for part, rows in module.table(name).items()}


def test_a_handle_is_looked_up_once_and_trained_once() -> None:
    module = collection()
    handle = module.stage(batch(0))
    loss = module(handle).pooled.sum()
    with refuses(TrainingError, "batch 0"):
        module(handle)
    loss.backward(retain_graph=True)
    before = rows_of(module)
    with refuses(TrainingError, "batch 0"):
        loss.backward()
    with refuses(TrainingError, "batch 0"):
        module(handle)
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(module).items())
    assert module.step == 1


def test_loading_invalidates_handles(tmp_path) -> None:
    module = collection()
    module(batch(0)).pooled.sum().backward()
    manifest = module.save(tmp_path / "a")
    waiting = module.stage(batch(1))
    for refused in (lambda: module.save(tmp_path / "b"), lambda: module.load(tmp_path / "a", manifest)):
        with refuses(TrainingError, "batch 1"):
            refused()
    loss = module(waiting).pooled.sum()
    before = rows_of(module)
    assert module.load(tmp_path / "a", manifest) == ""
    with refuses(TrainingError, "batch 1"):
        loss.backward()
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(module).items())


# Validation of batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 2, 1, 3, 4])}, "'a' sample 1 2"),
        ({"offsets": torch.tensor([0, 1, 2, 3, 9])}, "'b' sample 1 3 9 0 4"),
        ({"offsets": torch.tensor([-5, 1, 2, 3, 4])}, "'a' sample 0 -5 1"),
        ({"offsets": torch.arange(5, dtype=torch.int16)}, "int16"),
        ({"values": torch.zeros(4)}, "float32"),
        ({"weights": torch.ones(3)}, "float32 3 4"),
        ({"weights": torch.ones(4, dtype=torch.float64)}, "float64"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_invalid_jagged_batches_are_refused(change: dict[str, Any], message: str, training: bool) -> None:
    module = collection()
    good: dict[str, Any] = {
        "keys": ("a", "b"),
        "values": torch.arange(4),
        "offsets": torch.arange(5),
        "batch_size": 2,
    }
    features = KeyedJagged(**{**good, **change})
    before = rows_of(module)
    with torch.set_grad_enabled(training), refuses(ConfigError, message):
        module(features)
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(module).items())
