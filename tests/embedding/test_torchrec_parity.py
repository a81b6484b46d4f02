"""The same model on TorchRec/FBGEMM and on ours: the same losses; and conversion both ways."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedTensor, KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig
from stratarec.embedding.torchrec import from_torchrec, to_torchrec
from stratarec.models import CTRModel, DLRMConfig, build_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed: `make bench` installs it")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = {"f0": 5, "f1": 100, "f2": 3000}
DENSE = 3
STEPS, BATCH, RATE, EPS = 200, 64, 0.1, 1e-8
SCHEMA = Schema(
    dense=tuple(DenseFeature(name=f"d{i}") for i in range(DENSE)),
    sparse=tuple(SparseFeature(name=name, kind="multi") for name in ROWS),
)


def batch_of(draws: np.random.Generator, size: int) -> Batch:
    features = {}
    for name, rows in ROWS.items():
        lengths = torch.from_numpy(draws.integers(0, 4, size))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = (rows * draws.random(int(offsets[-1])) ** 3).astype(np.int64)
        features[name] = JaggedTensor(values=torch.from_numpy(ids), offsets=offsets)
    return Batch(
        label=torch.from_numpy((draws.random(size) < 0.3).astype(np.float32)),
        dense=torch.from_numpy(draws.normal(size=(size, DENSE)).astype(np.float32)),
        sparse=KeyedJagged.from_features(features),
    )


def model_of(kind: Any, pooling: Any, rate: float = RATE, decay: float = 0.0) -> CTRModel:
    return build_model(
        DLRMConfig(embedding_dim=8, bottom_mlp=(16,), top_mlp=(16,), pooling=pooling),
        SCHEMA,
        ROWS,
        optimizer=RowOptimizerConfig(kind=kind, learning_rate=rate, eps=EPS, weight_decay=decay, decay="decoupled"),
        seed=3,
    )


def losses(network: nn.Module, pool: Callable[[KeyedJagged], Tensor], step: Callable[[], None]) -> list[float]:
    """Losses of the same `STEPS` batches; `step` updates the tables after each backward."""
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
    draws = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        batch = batch_of(draws, BATCH)
        loss = functional.binary_cross_entropy_with_logits(network(batch.dense, pool(batch.sparse)), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
        found.append(loss.item())
    return found


def assert_same_losses(model: CTRModel, network: nn.Module, pool: Any, step: Callable[[], None]) -> None:
    """`network` starts as a copy of our model's; our tables and the peer's start alike."""
    ours = losses(model.network, lambda features: model.embeddings(features).pooled, lambda: None)
    theirs = losses(network, pool, step)
    assert len(set(ours)) == STEPS
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "theirs", "pooling"),
    [
        ("rowwise_adagrad", "EXACT_ROWWISE_ADAGRAD", "sum"),
        ("rowwise_adagrad", "EXACT_ROWWISE_ADAGRAD", "mean"),
        ("adagrad", "EXACT_ADAGRAD", "mean"),
        ("sgd", "EXACT_SGD", "sum"),
    ],
)
def test_a_dlrm_on_fbgemm_has_the_same_losses(kind: str, theirs: str, pooling: str) -> None:
    model = model_of(kind, pooling)
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (table.num_embeddings, table.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for table in model.embeddings.tables
        ],
        optimizer=getattr(EmbOptimType, theirs),
        learning_rate=RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM if pooling == "sum" else PoolingMode.MEAN,
    )
    for table, weight in zip(model.embeddings.tables, peer.split_embedding_weights(), strict=True):
        weight.copy_(model.embeddings.table(table.name)["weight"])
    assert_same_losses(
        model,
        copy.deepcopy(model.network),
        lambda features: peer(features.values, features.bag_offsets()),
        lambda: None,
    )


def test_a_dlrm_on_torchrec_has_the_same_losses() -> None:
    model = model_of("adagrad", "mean")
    peer = torchrec.EmbeddingBagCollection(tables=[to_torchrec(table) for table in model.embeddings.tables])
    with torch.no_grad():
        for table in model.embeddings.tables:
            peer.embedding_bags[table.name].weight.copy_(model.embeddings.table(table.name)["weight"])
    optimizer = torch.optim.Adagrad(peer.parameters(), lr=RATE, eps=EPS)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    assert_same_losses(model, copy.deepcopy(model.network), lambda features: peer(to_torchrec(features)).values(), step)


@pytest.mark.parametrize(("pooling", "decay"), [("sum", 0.0), ("mean", 0.01)])
def test_a_dlrm_under_rowwise_adam_follows_its_formula(pooling: str, decay: float) -> None:
    """FBGEMM has PARTIAL_ROWWISE_ADAM for GPUs alone, so its formula stands in: the first moment a weight, the second
    a row (mean square of the gradient), both corrected by the number of steps of the whole table, decay decoupled,
    and rows that a batch does not look up left alone, moments included."""
    # At ten times this rate the training of both is chaotic: rounding grows to 1e-2 in the loss within 100 steps.
    model = model_of("rowwise_adam", pooling, rate=0.01, decay=decay)
    rule = model.embeddings.engine.optimizer
    bags = {
        table.feature_names[0]: nn.EmbeddingBag(
            table.num_embeddings, table.embedding_dim, mode=pooling, include_last_offset=True, sparse=True,
            _weight=model.embeddings.table(table.name)["weight"].clone(),
        )
        for table in model.embeddings.tables
    }  # fmt: skip
    first = {name: torch.zeros_like(bag.weight) for name, bag in bags.items()}
    second = {name: torch.zeros(len(bag.weight), 1) for name, bag in bags.items()}
    steps = itertools.count(1)

    def pool(features: KeyedJagged) -> Tensor:
        return torch.cat([bag(features[name].values, features[name].offsets) for name, bag in bags.items()], dim=1)

    def step() -> None:
        number = next(steps)
        for name, bag in bags.items():
            assert bag.weight.grad is not None
            total = bag.weight.grad.coalesce()
            rows, gradient = total.indices()[0], total.values()
            first[name][rows] = rule.beta1 * first[name][rows] + (1 - rule.beta1) * gradient
            mean_square = gradient.square().mean(1, keepdim=True)
            second[name][rows] = rule.beta2 * second[name][rows] + (1 - rule.beta2) * mean_square
            moment = first[name][rows] / (1 - rule.beta1**number)
            scale = (second[name][rows] / (1 - rule.beta2**number)).sqrt() + rule.eps
            with torch.no_grad():
                bag.weight[rows] -= rule.learning_rate * (moment / scale + decay * bag.weight[rows])
            bag.weight.grad = None

    assert_same_losses(model, copy.deepcopy(model.network), pool, step)


def test_configs_and_batches_convert_both_ways() -> None:
    for name in ROWS:
        table = EmbeddingBagConfig(name=f"t{name}", num_embeddings=ROWS[name], embedding_dim=8, feature_names=(name,))
        assert from_torchrec(to_torchrec(table)) == table
    sequence = EmbeddingBagConfig(name="s", num_embeddings=3, embedding_dim=2, sequence_features=("x",))
    assert from_torchrec(to_torchrec(sequence)) == sequence
    features = batch_of(np.random.default_rng(0), 6).sparse
    back = from_torchrec(to_torchrec(features))
    assert back.keys == features.keys
    assert back.batch_size == 6
    assert torch.equal(back.values, features.values)
    assert torch.equal(back.bag_offsets(), features.bag_offsets())


def test_groups_become_inverse_indices_that_torchrec_expands_to_the_same_embeddings() -> None:
    draws = np.random.default_rng(1)
    pair = batch_of(draws, 4).sparse.select(["f0", "f2"])
    inverses = [torch.from_numpy(draws.integers(0, 4, 9).astype(np.int32)) for _ in range(2)]
    groups = (
        InverseJagged(unique=pair, inverse=inverses[0]),
        InverseJagged(unique=batch_of(draws, 4).sparse.select(["f1"]), inverse=inverses[1]),
    )
    converted = to_torchrec(groups)
    back = from_torchrec(converted)
    assert [group.keys for group in back] == [("f0", "f2"), ("f1",)]
    for one, other in zip(groups, back, strict=True):
        assert torch.equal(one.inverse, other.inverse.int())
        assert torch.equal(one.expand().values, other.expand().values)
        assert torch.equal(one.expand().bag_offsets(), other.expand().bag_offsets())

    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=(name,))
        for name, rows in ROWS.items()
    ]
    peer = torchrec.EmbeddingBagCollection(tables=[to_torchrec(table) for table in tables])
    features = {key: group.expand()[key] for group in groups for key in group.keys}
    plain = KeyedJagged.from_features({name: features[name] for name in ROWS})
    expected, found = peer(to_torchrec(plain)).to_dict(), peer(converted).to_dict()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
