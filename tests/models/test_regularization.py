"""Dropout and batch normalization: what they compute, what their masks depend on, and that they leave no path out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.test_deduplicated import KEYS, ROWS, batch, numbered, schema
from torch import nn
from torch.nn import functional

from stratarec.models import DLRMConfig, ModelConfig, build_model
from stratarec.models.layers import MLP, BatchNorm, Dropout, dropouts, seed_dropout, statistics
from stratarec.models.zoo.dcn import DCNv2Config

DLRM = DLRMConfig(embedding_dim=8, bottom_mlp=(8,), top_mlp=(16, 8), dropout=0.4, batch_norm=True)
DCN = DCNv2Config(embedding_dim=8, deep_mlp=(16,), dropout=0.4, batch_norm=True)


def names(mlp: MLP) -> list[str]:
    return [type(layer).__name__ for layer in mlp]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_mean_and_its_gradient_has_its_mask(kind: torch.dtype) -> None:
    layer, inputs = Dropout(0.3), torch.ones(200, 500, dtype=kind, requires_grad=True)
    found = layer(inputs)
    assert found.dtype == kind
    assert found.unique().tolist() == pytest.approx([0.0, torch.tensor(1 / 0.7, dtype=kind).item()], rel=1e-4)
    assert float((found == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    found.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, found)
    assert torch.equal(layer.eval()(inputs), inputs)


def test_masks_are_a_function_of_their_key_and_layer() -> None:
    layers, inputs = [Dropout(0.5), Dropout(0.5)], torch.ones(64)

    def masks(*key: int) -> list[torch.Tensor]:
        torch.rand(3)  # whatever others draw
        seed_dropout(layers, *key)
        return [layer(inputs) for layer in layers]

    first = masks(1, 2, 0)
    masks(7, 7, 7)
    assert all(map(torch.equal, first, masks(1, 2, 0)))
    others = [masks(1, 2, 0)[1], masks(0, 2, 0)[0], masks(1, 3, 0)[0], masks(1, 2, 1)[0], layers[0](inputs)]
    assert not any(torch.equal(first[0], other) for other in others)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_batch_norm_is_torchs(kind: torch.dtype) -> None:
    mine, theirs = BatchNorm(5), nn.BatchNorm1d(5)
    with torch.no_grad():
        for weights in zip(mine.parameters(), theirs.parameters(), strict=True):
            drawn = torch.rand(5)
            for weight in weights:
                weight.copy_(drawn)
    for size in (7, 2, 30):
        inputs = torch.randn(size, 5).to(kind)
        assert torch.equal(mine(inputs), theirs(inputs))
    assert torch.equal(mine.eval()(inputs), theirs.eval()(inputs))
    assert torch.equal(mine.running_mean, theirs.running_mean)
    assert torch.equal(mine.running_var, theirs.running_var)


def test_a_batch_of_one_sample_is_normalized_by_running_statistics_and_leaves_them() -> None:
    layer = BatchNorm(3)
    layer(torch.randn(20, 3) * 2 + 1)
    kept, one = [each.clone() for each in statistics(layer)], torch.randn(1, 3)
    assert torch.equal(layer(one), layer.eval()(one))
    assert all(map(torch.equal, statistics(layer), kept))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("config", [DLRM, replace(DLRM, dropout=0.0), replace(DLRM, batch_norm=False), DCN])
def test_training_on_distinct_values_is_training_on_expanded_batches(config: ModelConfig, precision: str) -> None:
    pair = [build_model(config, schema(), ROWS, seed=3) for _ in range(2)]
    # Of 40 samples, normalized, a rounded sum that crosses zero shows.
    tolerance, of_gradients = (1e-4, 4e-4) if precision == "float32" else (5e-2, 0.35)
    for step in range(3):
        grouped = numbered(batch(seed=step))
        losses, gradients = [], []
        for model, given in zip(pair, (grouped, grouped.expanded(KEYS)), strict=True):
            model.zero_grad()
            seed_dropout(dropouts(model.network), 0, step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = functional.binary_cross_entropy_with_logits(model(given), given.label)
            loss.backward()
            losses.append(loss.item())
            gradients.append(nn.utils.parameters_to_vector(weight.grad for weight in model.network.parameters()))
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        assert float((gradients[0] - gradients[1]).norm()) <= of_gradients * float(gradients[1].norm())
        for one, other in zip(*(statistics(model.network) for model in pair), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
