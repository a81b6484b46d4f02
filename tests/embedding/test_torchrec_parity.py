"""The same model on TorchRec/FBGEMM and on ours: the same losses; and conversion both ways."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig, TieredEmbeddingBagCollection
from stratarec.embedding.torchrec import from_torchrec, to_torchrec
from stratarec.jagged import InverseJagged, JaggedTensor, KeyedJagged

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
TABLES = [
    EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=8, feature_names=(f"f{i}",))
    for i, rows in enumerate((5, 100, 3000))
]


def batch_of(draws: np.random.Generator, size: int) -> KeyedJagged:
    features = {}
    for table in TABLES:
        lengths = torch.from_numpy(draws.integers(0, 4, size))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = (table.num_embeddings * draws.random(int(offsets[-1])) ** 3).astype(np.int64)
        features[table.feature_names[0]] = JaggedTensor(values=torch.from_numpy(ids), offsets=offsets)
    return KeyedJagged.from_features(features)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("rowwise_adagrad", "EXACT_ROWWISE_ADAGRAD"), ("sgd", "EXACT_SGD")],
)
def test_losses_agree_over_200_steps(kind: str, theirs: str) -> None:
    ours = TieredEmbeddingBagCollection(
        TABLES,
        optimizer=RowOptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-8),  # type: ignore[arg-type]
    )
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.num_embeddings, t.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in TABLES],
        optimizer=getattr(EmbOptimType, theirs),
        learning_rate=0.1,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    for table, weight in zip(TABLES, peer.split_embedding_weights(), strict=True):
        weight.copy_(ours.table(table.name)["weight"])
    networks = (network(), network())
    optimizers = [torch.optim.Adagrad(net.parameters(), lr=0.05) for net in networks]
    draws = np.random.default_rng(0)
    worst, losses = 0.0, []
    for _ in range(200):
        features = batch_of(draws, 64)
        label = torch.from_numpy((draws.random(64) < 0.3).astype(np.float32))
        pooled = (ours(features).pooled, peer(features.values, features.bag_offsets()))
        pair = []
        for net, optimizer, vectors in zip(networks, optimizers, pooled, strict=True):
            loss = functional.binary_cross_entropy_with_logits(net(vectors).squeeze(-1), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pair.append(loss.item())
        worst, losses = max(worst, abs(pair[0] - pair[1])), [*losses, pair[0]]
    assert worst < 1e-5
    assert len(set(losses)) == 200


def test_configs_and_batches_convert_both_ways() -> None:
    for table in TABLES:
        assert from_torchrec(to_torchrec(table)) == table
    sequence = EmbeddingBagConfig(name="s", num_embeddings=3, embedding_dim=2, sequence_features=("x",))
    assert from_torchrec(to_torchrec(sequence)) == sequence
    features = batch_of(np.random.default_rng(0), 6)
    back = from_torchrec(to_torchrec(features))
    assert back.keys == features.keys
    assert back.batch_size == 6
    assert torch.equal(back.values, features.values)
    assert torch.equal(back.bag_offsets(), features.bag_offsets())


def test_groups_become_inverse_indices_that_torchrec_expands_to_the_same_embeddings() -> None:
    draws = np.random.default_rng(1)
    pair = batch_of(draws, 4).select(["f0", "f2"])
    inverses = [torch.from_numpy(draws.integers(0, 4, 9).astype(np.int32)) for _ in range(2)]
    groups = (
        InverseJagged(unique=pair, inverse=inverses[0]),
        InverseJagged(unique=batch_of(draws, 4).select(["f1"]), inverse=inverses[1]),
    )
    converted = to_torchrec(groups)
    back = from_torchrec(converted)
    assert [group.keys for group in back] == [("f0", "f2"), ("f1",)]
    for one, other in zip(groups, back, strict=True):
        assert torch.equal(one.inverse, other.inverse.int())
        assert torch.equal(one.expand().values, other.expand().values)
        assert torch.equal(one.expand().bag_offsets(), other.expand().bag_offsets())

    peer = torchrec.EmbeddingBagCollection(tables=[to_torchrec(table) for table in TABLES])
    features = {key: group.expand()[key] for group in groups for key in group.keys}
    plain = KeyedJagged.from_features({table.feature_names[0]: features[table.feature_names[0]] for table in TABLES})
    expected, found = peer(to_torchrec(plain)).to_dict(), peer(converted).to_dict()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
