"""Compare dense and row updates with the bits and norms of their references."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from errors import refuses
from recipes import prepared, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import DenseOptimizerConfig, TrainConfig
from stratarec.training.build import new_model
from stratarec.training.run.open_run import open_run
from stratarec.training.torch_setup import build_optimizer
from stratarec.training.trainer import Trainer

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "adagrad": Adagrad, "sgd": SGD}


def run_steps(network: nn.Module, optimizer: Optimizer, steps: int) -> None:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        network(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_torchs_optimizers_bit_for_bit(kind: Any) -> None:
    torch.manual_seed(3)
    ours, theirs = nn.Linear(5, 4), nn.Linear(5, 4)
    theirs.load_state_dict(ours.state_dict())
    config = DenseOptimizerConfig(kind=kind, weight_decay=0.1)
    torch_optimizer = KINDS[kind](
        theirs.parameters(), lr=config.learning_rate, weight_decay=0.1, fused=True
    )  # type: ignore[call-arg]
    run_steps(ours, build_optimizer(config, ours), 3)
    run_steps(theirs, torch_optimizer, 3)
    taken = build_optimizer(config, ours)
    taken.load_state_dict(deepcopy(torch_optimizer.state_dict()))
    run_steps(ours, taken, 2)
    run_steps(theirs, torch_optimizer, 2)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert not mine.grad_fn
        assert not taken.state[mine].keys() ^ torch_optimizer.state[other].keys()


def values(model: Any) -> dict[str, torch.Tensor]:
    rows = {table.name: model.embeddings.table(table.name)["weight"] for table in model.embeddings.tables}
    return {
        name: value.detach().clone() for name, value in (*model.network.named_parameters(), *rows.items())
    }


def test_a_step_is_clipped_exactly_to_the_norm(tmp_path: Path) -> None:
    """With plain gradient descent at a rate of 1, the norm is the distance that all weights
    moved.
    """
    plain = {"kind": "sgd", "learning_rate": 1.0}
    content = tiny(tmp_path, max_steps=1, dense=plain, embedding=plain)
    prepared(Recipe.from_dict(content).data)
    moved = []
    for limit, rows in ((0.0, False), (0.01, False), (0.01, True), (1e6, True)):
        content["train"] |= {
            "clip_norm": limit,
            "clip_rows": rows,
            "run": str(tmp_path / f"run-{len(moved)}"),
        }
        recipe = Recipe.from_dict(content)
        dataset = Dataset.open(recipe.data.path)
        trainer = Trainer(recipe, dataset)
        before = values(new_model(recipe, dataset, None, "untrained"))
        trainer.train()
        with open_run(recipe.train.run) as trained:
            moved.append({name: value - before[name] for name, value in values(trained.model).items()})
    tables = set(moved[0]) - {name for name, _ in trainer.parts.model.network.named_parameters()}

    def norm(moves: dict[str, torch.Tensor], names: Any = None) -> float:
        return float(torch.stack([moves[name].double().norm() for name in names or moves]).norm())

    whole, network, both, loose = moved
    assert norm(whole) > 0.02
    assert norm(network, set(network) - tables) == pytest.approx(0.01, rel=1e-3)
    assert all(torch.equal(network[name], whole[name]) for name in tables)
    assert norm(both) == pytest.approx(0.01, rel=1e-3)
    for name, value in both.items():
        torch.testing.assert_close(value, whole[name] * 0.01 / norm(whole), rtol=2e-3, atol=1e-7)
    assert all(torch.equal(loose[name], value) for name, value in whole.items())


def test_rows_are_clipped_only_by_a_norm() -> None:
    with refuses(ConfigError, "clip_rows true train.clip_norm 0"):
        TrainConfig(clip_rows=True)
