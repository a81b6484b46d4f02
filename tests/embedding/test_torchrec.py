"""Test conversion to and from TorchRec.

If TorchRec is absent, a stand-in replaces its classes; if it is present, losses must be equal.
"""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.torchrec_tables import to_torchrec
from errors import refuses
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig
from stratarec.embedding.torchrec import from_torchrec
from stratarec.errors import ConfigError
from stratarec.models import DLRMConfig, build_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchrec
    except ImportError:
        torchrec = None

ROWS = {"f0": 5, "f1": 100, "f2": 3000}
RATE, EPS = 0.1, 1e-8


class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


@dataclass
class EmbeddingConfig:
    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)


@dataclass
class TorchRecBagConfig(EmbeddingConfig):
    pooling: PoolingType = PoolingType.SUM


class KeyedJaggedTensor:
    """The methods that the conversion calls, as TorchRec documents them."""

    def __init__(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys = keys
        self._values = values
        self._offsets = offsets
        self._weights = weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def stride(self) -> int:
        return (len(self._offsets) - 1) // len(self._keys)

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def inverse_indices_or_none(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if torchrec is None:
        module: Any = ModuleType("torchrec")
        module.PoolingType = PoolingType
        module.EmbeddingConfig = EmbeddingConfig
        module.EmbeddingBagConfig = TorchRecBagConfig
        module.KeyedJaggedTensor = KeyedJaggedTensor
        monkeypatch.setitem(sys.modules, "torchrec", module)


def features(draws: np.random.Generator, size: int, weighted: bool = False) -> KeyedJagged:
    bags = {}
    for name, rows in ROWS.items():
        offsets = torch.from_numpy(np.concatenate([[0], draws.integers(0, 4, size).cumsum()]))
        ids = torch.from_numpy((rows * draws.random(int(offsets[-1])) ** 3).astype(np.int64))
        bags[name] = JaggedTensor(values=ids, offsets=offsets, weights=ids + 0.5 if weighted else None)
    return KeyedJagged.from_features(bags)


@pytest.mark.parametrize("names", ["feature_names", "sequence_features"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_tables_convert_both_ways(names: str, pooling: Any) -> None:
    pooling = pooling if names == "feature_names" else "sum"
    options: Any = {names: ("x", "y"), "pooling": pooling}
    table = EmbeddingBagConfig(name="t", num_embeddings=7, embedding_dim=8, **options)
    converted = to_torchrec(table)
    assert (converted.name, converted.num_embeddings, converted.embedding_dim) == ("t", 7, 8)
    assert converted.feature_names == ["x", "y"]
    assert from_torchrec(converted) == table


@pytest.mark.parametrize("weighted", [False, True])
def test_batches_convert_both_ways_and_share_their_values(weighted: bool) -> None:
    batch = features(np.random.default_rng(0), 6, weighted)
    back = from_torchrec(to_torchrec(batch))
    assert (back.keys, back.batch_size) == (batch.keys, 6)
    assert back.values.data_ptr() == batch.values.data_ptr()
    assert torch.equal(back.bag_offsets(), batch.bag_offsets())
    assert back.weights is batch.weights is None or torch.equal(back.weights, batch.weights)


def test_values_without_an_equivalent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ConfigError, "int"):
        from_torchrec(3)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with refuses(ConfigError, "torchrec"):
        from_torchrec(3)


@pytest.mark.skipif(torchrec is None, reason="torchrec is not installed: `make bench` installs it")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_dlrm_has_the_same_losses_as_on_torchrec(pooling: Any) -> None:
    schema = Schema(
        dense=tuple(DenseFeature(name=f"d{number}") for number in range(3)),
        sparse=tuple(SparseFeature(name=name, kind="multi") for name in ROWS),
    )
    rule = RowOptimizerConfig(kind="adagrad", learning_rate=RATE, eps=EPS)
    config = DLRMConfig(embedding_dim=8, bottom_mlp=(16,), top_mlp=(16,), pooling=pooling)
    model = build_model(config, schema, ROWS, optimizer=rule, seed=3)
    peer = torchrec.EmbeddingBagCollection(tables=[to_torchrec(table) for table in model.embeddings.tables])
    with torch.no_grad():
        for table in model.embeddings.tables:
            peer.embedding_bags[table.name].weight.copy_(model.embeddings.table(table.name)["weight"])
    losses: list[list[float]] = [[], []]
    for place, network in enumerate((model.network, copy.deepcopy(model.network))):
        optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
        rows = torch.optim.Adagrad(peer.parameters(), lr=RATE, eps=EPS)
        draws = np.random.default_rng(0)
        for _ in range(200):
            batch = features(draws, 64)
            dense = torch.from_numpy(draws.normal(size=(64, 3)).astype(np.float32))
            label = torch.from_numpy((draws.random(64) < 0.3).astype(np.float32))
            vectors = peer(to_torchrec(batch)).values() if place else model.embeddings(batch).pooled
            loss = functional.binary_cross_entropy_with_logits(network(dense, vectors), label)
            optimizer.zero_grad()
            rows.zero_grad()
            loss.backward()
            optimizer.step()
            rows.step()
            losses[place].append(loss.item())
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)
    assert len(set(losses[0])) == 200
