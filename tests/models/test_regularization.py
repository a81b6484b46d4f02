"""Test dropout and batch normalization: their results, what their masks depend on, and that every
path applies them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratarec.models.layers import BatchNorm, Dropout, seed_dropout, statistics


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_mean_and_its_gradient_has_its_mask(kind: torch.dtype) -> None:
    layer, inputs = Dropout(0.3), torch.ones(200, 500, dtype=kind, requires_grad=True)
    result = layer(inputs)
    assert result.dtype == kind
    assert result.unique().tolist() == pytest.approx(
        [0.0, torch.tensor(1 / 0.7, dtype=kind).item()], rel=1e-4
    )
    assert float((result == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    result.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, result)
    assert torch.equal(layer.eval()(inputs), inputs)


@pytest.mark.parametrize("rate", [0.3, [0.3, 0.5]])
def test_dropout_built_on_the_meta_device_works_on_the_host(rate: float | list[float]) -> None:
    with torch.device("meta"):
        layer = Dropout(rate)
    assert layer(torch.ones(2, 8)).shape == (2, 8)


def test_masks_are_a_function_of_their_key_and_layer() -> None:
    layers, inputs = [Dropout(0.5), Dropout(0.5)], torch.ones(64)

    def masks(*key: int) -> list[torch.Tensor]:
        torch.rand(3)  # other random draws must not matter
        seed_dropout(layers, *key)
        return [layer(inputs) for layer in layers]

    first = masks(1, 2, 0)
    masks(7, 7, 7)
    assert all(map(torch.equal, first, masks(1, 2, 0)))
    others = [masks(1, 2, 0)[1], masks(0, 2, 0)[0], masks(1, 3, 0)[0], masks(1, 2, 1)[0], layers[0](inputs)]
    assert not any(torch.equal(first[0], other) for other in others)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_batch_norm_matches_torch(kind: torch.dtype) -> None:
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


def test_a_batch_of_one_sample_uses_and_keeps_the_running_statistics() -> None:
    layer = BatchNorm(3)
    layer(torch.randn(20, 3) * 2 + 1)
    kept, one = [each.clone() for each in statistics(layer)], torch.randn(1, 3)
    assert torch.equal(layer(one), layer.eval()(one))
    assert all(map(torch.equal, statistics(layer), kept))
