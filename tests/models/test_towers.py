"""Test towers: without modules nothing changes, invalid towers are refused, and outputs follow
their formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.test_models import HISTORIES, ROWS, batch_of, schema
from torch.nn import functional

from stratarec.models import DLRMConfig, HistoryConfig, ModelConfig, TowersConfig, build_model
from stratarec.models.towers import DotTower, TowerNetwork
from stratarec.models.zoo.config import DCNv2Config

PLAN = (("place",), ("history", "item"), ("tags",))
CONFIGS: list[ModelConfig] = [
    DLRMConfig(embedding_dim=8, bottom_mlp=(8,), top_mlp=(8,)),
    DCNv2Config(embedding_dim=8, cross_layers=2, deep_mlp=(8,)),
]


def towers(config: ModelConfig, compression: float, pooling: Any = "mean", plan: Any = PLAN) -> ModelConfig:
    changed = TowersConfig(plan=plan, compression=compression)
    return replace(config, towers=changed, history=HistoryConfig(pooling=pooling))


@pytest.mark.parametrize("pooling", ["mean", "target_attention", "transformer"])
@pytest.mark.parametrize("config", CONFIGS)
def test_towers_without_modules_match_the_model_without_towers(config: ModelConfig, pooling: Any) -> None:
    plain = build_model(towers(config, 1.0, pooling, PLAN), schema(), ROWS)
    without = build_model(replace(config, history=HistoryConfig(pooling=pooling)), schema(), ROWS)
    assert isinstance(plain.network, TowerNetwork)
    weights = dict(plain.network.named_parameters())
    for name, weight in without.network.named_parameters():
        mine = name.replace("poolings.0", "towers.1.poolings.0") if "poolings" in name else name
        weight.data.copy_(weights[mine])
    for _ in range(3):
        losses = []
        for model in (plain, without):
            batch = batch_of(HISTORIES)
            model.network.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(batch), batch.label)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert torch.equal(plain.embeddings.table("item")["weight"], without.embeddings.table("item")["weight"])


@pytest.mark.parametrize("compression", [1.5, 2.0, 3.5, 8.0])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_tower_outputs_at_most_its_share_and_every_weight_is_trained(
    config: ModelConfig, compression: float
) -> None:
    model = build_model(towers(config, compression), schema(), ROWS)
    network = model.network
    assert isinstance(network, TowerNetwork)
    for tower, features in zip(network.all_towers, PLAN, strict=True):
        assert 1 <= tower.columns <= len(features) * 8 / compression
    # vectors reach the last layers only as products, dense features also directly
    if config.kind == "dlrm":
        vectors = 1 + sum(max(tower.score.vectors, 1) for tower in network.all_towers)
        numbers = sum(tower.columns - 8 * tower.score.vectors for tower in network.all_towers)
        first = next(layer for layer in network.score.top.modules() if isinstance(layer, torch.nn.Linear))
        assert first.in_features == 8 + vectors * (vectors - 1) // 2 + numbers
    batch = batch_of(HISTORIES)
    before = {name: model.embeddings.table(name)["weight"].clone() for name in ROWS}
    functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0 or "top.1" in name, name
    assert all(not torch.equal(before[name], model.embeddings.table(name)["weight"]) for name in ROWS)


@pytest.mark.parametrize(
    ("count", "width", "compression"), [(13, 16, 2.0), (13, 16, 4.0), (3, 8, 1.0), (1, 8, 2.0), (3, 8, 4.0)]
)
def test_the_output_of_a_dot_tower_follows_its_formula(count: int, width: int, compression: float) -> None:
    torch.manual_seed(0)
    module = DotTower(TowersConfig(plan=PLAN, compression=compression), count, width)
    vectors = torch.randn(5, count, width)
    output = module(torch.zeros(5, 0), vectors)
    low = torch.tril_indices(count, count, -1)
    products = torch.einsum("bfd,bgd->bfg", vectors, vectors)[:, low[0], low[1]]
    expected = []
    if module.map is not None:
        expected.append(module.map(vectors.flatten(1)))
    if module.numbers:
        given = torch.cat([products, vectors.flatten(1)], dim=1) if module.expanded else products
        expected.append(given if module.selection is None else module.selection(given))
    assert module.expanded == (count * width / compression < width)
    torch.testing.assert_close(output, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
    assert output.shape[1] == module.vectors * width + module.numbers <= count * width / compression


@pytest.mark.parametrize("pooling", ["mean", "target_attention"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_padded_network_is_the_same_function(config: ModelConfig, pooling: Any) -> None:
    model = build_model(towers(config, 2.0, pooling), schema(), ROWS).eval()
    batch = batch_of(HISTORIES)
    with torch.no_grad():
        dense, pooled, histories, _ = model.vectors(batch, model.request(batch))
        sequences = [part for history in histories for part in history.padded()]
        torch.testing.assert_close(
            model.network.padded(dense, pooled, *sequences), model.network(dense, pooled, histories)
        )
