"""Test models: weights are a function of the seed, the loss trains all of them, and padding does
not change them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.models import DLRMConfig, HistoryConfig, ModelConfig, build_model
from stratarec.models.zoo.config import DCNv2Config

ROWS = {"item": 40, "tags": 12, "place": 5}


def schema(dense: int = 2, history: bool = True) -> Schema:
    sparse = [
        SparseFeature(name="item"),
        SparseFeature(name="tags", kind="multi"),
        SparseFeature(name="place"),
    ]
    if history:
        sparse.append(SparseFeature(name="history", kind="history", of="item", max_length=6))
    columns = tuple(DenseFeature(name=f"d{i}") for i in range(dense))
    return Schema(dense=columns, sparse=tuple(sparse), user="u", time="t")


def batch_of(histories: list[list[int]], dense: int = 2) -> Batch:
    torch.manual_seed(len(histories))
    size = len(histories)

    def bags(lists: list[list[int]]) -> JaggedTensor:
        lengths = torch.tensor([0, *(len(bag) for bag in lists)])
        values = torch.tensor([i for bag in lists for i in bag], dtype=torch.int32)
        return JaggedTensor(values=values, offsets=lengths.cumsum(0))

    sparse = KeyedJagged.from_features(
        {
            "item": bags([[i % 40] for i in range(size)]),
            "tags": bags([[i % 12, (i + 5) % 12] if i % 3 else [] for i in range(size)]),
            "place": bags([[i % 5] for i in range(size)]),
            "history": bags(histories),
        }
    )
    values = torch.linspace(-1, 1, size * dense).view(size, dense)
    return Batch(label=(torch.arange(size) % 3 == 0).float(), dense=values, sparse=sparse)


HISTORIES = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10], [11, 12]] * 4
CONFIGS: list[ModelConfig] = [
    DLRMConfig(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)),
    DCNv2Config(embedding_dim=4, structure="stacked", cross_layers=2, deep_mlp=(8,)),
    DCNv2Config(embedding_dim=4, structure="parallel", cross_layers=2, low_rank=3, deep_mlp=(8,)),
]
POOLINGS: list[Any] = ["mean", "target_attention", "transformer"]


def with_history(config: ModelConfig, pooling: Any) -> ModelConfig:
    return type(config)(**{**vars(config), "history": HistoryConfig(pooling=pooling)})  # type: ignore[return-value]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_trains_every_weight_and_every_table(
    config: ModelConfig, pooling: Any, precision: torch.dtype
) -> None:
    model = build_model(with_history(config, pooling), schema(), ROWS, click_rates=[0.3])
    before = {name: view.clone() for name, view in model.embeddings.engine.named_views()}
    batch = batch_of(HISTORIES)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        logits = model(batch)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
    for name, weight in model.network.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0 or "project.bias" in name, name
    for name, view in model.embeddings.engine.named_views():
        assert not torch.equal(view, before[name]), name


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_other_samples_and_padding_never_change_a_score(config: ModelConfig, pooling: Any) -> None:
    model = build_model(with_history(config, pooling), schema(), ROWS).eval()
    with torch.no_grad():
        short = model(batch_of([[1, 2], [], [3]]))
        long = model(batch_of([[1, 2], [], [9, 8, 7, 6, 5, 4]]))
    torch.testing.assert_close(short[:2], long[:2], rtol=1e-6, atol=1e-6)
    assert not torch.isclose(short[2], long[2])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("pooling", POOLINGS[1:])
def test_the_content_of_the_padding_changes_neither_score_nor_gradient(
    config: ModelConfig, pooling: Any
) -> None:
    model = build_model(with_history(config, pooling), schema(), ROWS)
    if pooling == "transformer":
        torch.nn.init.normal_(model.network.poolings[0].position)  # type: ignore[arg-type]
    with torch.no_grad():
        dense, pooled, (history,), _ = model.vectors(
            batch_of(HISTORIES), model.request(batch_of(HISTORIES))
        )
        rows, mask = history.padded()
    results = []
    for filling in (0.0, 1e3):
        padded = torch.where(mask.unsqueeze(-1), rows, filling).requires_grad_()
        model.zero_grad()
        scores = model.network.padded(dense, pooled, padded, mask)
        scores.square().sum().backward()
        assert padded.grad is not None
        assert (padded.grad[~mask] == 0).all()
        weights = [weight.grad.clone() for weight in model.network.parameters() if weight.grad is not None]
        results.append((scores.detach(), padded.grad[mask], *weights))
    for plain, filled in zip(*results, strict=True):
        torch.testing.assert_close(plain, filled, rtol=1e-5, atol=1e-6)
    assert (model.network.poolings[0].padded(pooled[:, :4], rows, mask)[1] == 0).all()  # type: ignore[operator], "an empty history is no zero"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("pooling", POOLINGS[1:])
def test_padded_histories_score_and_train_like_jagged_ones(config: ModelConfig, pooling: Any) -> None:
    model = build_model(with_history(config, pooling), schema(), ROWS)
    results = []
    for padded in (False, True):
        dense, pooled, (history,), _ = model.vectors(
            batch_of(HISTORIES), model.request(batch_of(HISTORIES))
        )
        if padded:
            scores = model.network.padded(dense, pooled, *history.padded())
        else:
            scores = model.network(dense, pooled, [history])
        (gradient,) = torch.autograd.grad(scores.square().sum(), history.rows)
        results.append((scores.detach(), gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_single_sample_scores_as_in_a_batch(pooling: Any) -> None:
    for config in CONFIGS:
        model = build_model(with_history(config, pooling), schema(), ROWS).eval()
        batch = batch_of(HISTORIES)
        with torch.no_grad():
            batch_scores = model(batch)
            for place in (0, 1, 3):
                parts = {}
                for key in batch.sparse.keys:
                    part = batch.sparse[key]
                    first, last = int(part.offsets[place]), int(part.offsets[place + 1])
                    parts[key] = JaggedTensor(
                        values=part.values[first:last], offsets=torch.tensor([0, last - first])
                    )
                alone = batch.replace(
                    label=batch.label[place : place + 1],
                    dense=batch.dense[place : place + 1],
                    sparse=KeyedJagged.from_features(parts),
                )
                torch.testing.assert_close(model(alone)[0], batch_scores[place], rtol=1e-5, atol=1e-6)


def test_the_order_of_a_history_matters_only_to_the_transformer() -> None:
    for pooling in POOLINGS:
        model = build_model(with_history(CONFIGS[0], pooling), schema(), ROWS).eval()
        if pooling == "transformer":
            torch.nn.init.normal_(model.network.poolings[0].position)  # type: ignore[arg-type]
        with torch.no_grad():
            one, other = model(batch_of([[1, 2, 3]])), model(batch_of([[3, 1, 2]]))
        assert torch.allclose(one, other, atol=1e-6) == (pooling != "transformer")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_weights_depend_only_on_the_seed(config: ModelConfig) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(with_history(config, "transformer"), schema(), ROWS, seed=5).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    second = build_model(with_history(config, "transformer"), schema(), ROWS, seed=5).state_dict()
    third = build_model(with_history(config, "transformer"), schema(), ROWS, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)
