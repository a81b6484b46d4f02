"""The network's optimizers are torch's own, to the bit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from stratarec.recipe.train_section import DenseOptimizerConfig
from stratarec.training.torch_setup import build_optimizer

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "adagrad": Adagrad, "sgd": SGD}


def stepped(network: nn.Module, optimizer: Optimizer, steps: int) -> None:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        network(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_torchs_optimizer(kind: Any) -> None:
    torch.manual_seed(3)
    ours, theirs = nn.Linear(5, 4), nn.Linear(5, 4)
    theirs.load_state_dict(ours.state_dict())
    config = DenseOptimizerConfig(kind=kind, weight_decay=0.1)
    made = KINDS[kind](theirs.parameters(), lr=config.learning_rate, weight_decay=0.1, fused=True)  # type: ignore[call-arg]
    stepped(ours, build_optimizer(config, ours), 3)
    stepped(theirs, made, 3)
    taken = build_optimizer(config, ours)
    taken.load_state_dict(deepcopy(made.state_dict()))
    stepped(ours, taken, 2)
    stepped(theirs, made, 2)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert not mine.grad_fn
        assert not taken.state[mine].keys() ^ made.state[other].keys()
