"""Compare several labels on one network, with a shared bottom or mixtures of experts, with the
formula.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models.test_models import CONFIGS, HISTORIES, ROWS, batch_of, schema
from torch import Tensor, nn

from stratarec.data.schema import Schema
from stratarec.models import HeadsConfig, ModelConfig, build_model
from stratarec.models.heads import MMoE
from stratarec.models.layers import MLP
from stratarec.training.steps.loss import Objective

LABELS = ("click", "like", "buy")


def schema_of(labels: Any = LABELS) -> Schema:
    return Schema(**{**vars(schema()), "label": "label", "labels": tuple(labels)})


def with_heads(config: ModelConfig, kind: Any) -> ModelConfig:
    heads = HeadsConfig(kind=kind, tower_mlp=(16,), experts=2, expert_mlp=(16, 16))
    return type(config)(**{**vars(config), "heads": heads})  # type: ignore[return-value]


def mlp(layers: Any, value: Tensor) -> Tensor:
    for layer in layers:
        value = (layer.weight @ value + layer.bias).relu() if isinstance(layer, nn.Linear) else value
    return value


def test_a_mixture_of_experts_matches_the_formula() -> None:
    torch.manual_seed(0)
    heads = MMoE(6, 3, HeadsConfig(kind="mmoe", tower_mlp=(3,), experts=2, expert_mlp=(5, 4)), MLP)
    inputs = torch.randn(7, 6)
    result = heads(inputs)
    for x, logits in zip(inputs, result, strict=True):
        experts = [mlp(expert, x) for expert in heads.experts]
        for k, (body, out) in enumerate(heads.towers):  # type: ignore[misc]
            gate = torch.exp(heads.gates[k].weight @ x)  # type: ignore[operator]
            mixed = sum(share * expert for share, expert in zip(gate / gate.sum(), experts, strict=True))
            torch.testing.assert_close(logits[k], (out.weight @ mlp(body, mixed) + out.bias)[0])


@pytest.mark.parametrize("kind", ["shared_bottom", "mmoe"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_every_label_trains_its_own_and_the_shared_part(
    config: ModelConfig, kind: Any, precision: torch.dtype
) -> None:
    model = build_model(with_heads(config, kind), schema_of(), ROWS, click_rates=[0.3, 0.01, 0.5])
    for tower, rate in zip(model.network.score.out.towers, (0.3, 0.01, 0.5), strict=True):  # type: ignore[union-attr]
        assert tower[-1].bias.item() == pytest.approx(math.log(rate / (1 - rate)))  # type: ignore[index, operator]
    batch = batch_of(HISTORIES)
    label = torch.stack([batch.label, 1 - batch.label, torch.full_like(batch.label, math.nan)], 1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        logits = model(batch)
    assert logits.shape == (batch.size, 3)
    assert logits.dtype == torch.float32
    Objective((1.0, 0.5, 1.0)).mean(logits, batch.replace(label=label)).backward()
    trained = {name: weight.grad.abs().sum() > 0 for name, weight in model.network.named_parameters()}  # type: ignore[union-attr]
    idle = {name for name in trained if name.startswith(("score.out.towers.2.", "score.out.gates.2."))}
    assert idle
    assert not any(trained[name] for name in idle), "a label that nothing is known of was trained"
    # A ReLU layer this small may be dead; every other layer has some gradient.
    assert sum(trained[name] for name in trained if name not in idle) > 0.8 * len(set(trained) - idle)


def test_the_loss_is_the_weighted_sum_of_masked_means() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 3, generator=draws, requires_grad=True)
    label = torch.randint(0, 2, (20, 3), generator=draws).float()
    label[torch.rand(20, 3, generator=draws) < 0.4] = math.nan
    label[:, 2] = math.nan
    weight = torch.rand(20, generator=draws)
    batch = batch_of([[]] * 20).replace(label=label, weight=weight)
    factors = (1.0, 0.25, 3.0)
    expected = torch.zeros(())
    for place in range(2):
        known = ~label[:, place].isnan()
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits[known, place], label[known, place], reduction="none"
        )
        expected = expected + factors[place] * (weight[known] * loss).sum() / weight[known].sum()
    objective = Objective(factors)
    actual = objective.mean(logits, batch)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*grads)
    assert grads[0].isfinite().all()
    # Two processes with a part of the batch each.
    parts = [batch.replace(label=label[rows], weight=weight[rows]) for rows in (slice(0, 7), slice(7, 20))]
    sums = [
        objective.sums(logits[rows], part)
        for rows, part in zip((slice(0, 7), slice(7, 20)), parts, strict=True)
    ]
    weights = [sum(each) for each in zip(*(objective.weights(part) for part in parts), strict=True)]
    torch.testing.assert_close(sum(objective.joined(each, weights) for each in sums), expected)
