"""Test optimizers of another package: one of rows, which kernels compile, and one of the
network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from added import train_with
from errors import refuses
from recipes import prepared, tiny
from stratarec.errors import ConfigError
from stratarec.kernels import update
from stratarec.kernels.optimizers import ROW_OPTIMIZERS, RowOptimizer
from stratarec.models.dense_optimizers import DENSE_OPTIMIZERS, DenseOptimizer
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.trainer import Trainer

REGISTERS = """
import numpy as np
from stratarec.kernels.optimizers import ROW_OPTIMIZERS, RowOptimizer

def momentum(rule, numbers, slots, row, D, gradient, start):
    for d in range(D):
        at = row * D + d
        part = rule.scale * gradient[start + d] + rule.l2 * slots.weights[at]
        slots.full_state[at] = rule.beta1 * slots.full_state[at] + part
        slots.weights[at] -= numbers.rate * slots.full_state[at]

ROW_OPTIMIZERS.register("momentum", RowOptimizer(full=("momentum",), lingers=True, update=momentum))
"""
CHECKS = """
import torch
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.kernels.update import rules
from stratarec.recipe import _adapter
from stratarec import EmbeddingBagConfig, TieredEmbeddingBagCollection

assert not rules.IS_CACHED

# All rows are in each batch, so the rows are the weights of torch's SGD with momentum.
table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("x",))
optimizer = RowOptimizerConfig(kind="momentum", learning_rate=0.05, beta1=0.9)
tables = TieredEmbeddingBagCollection([table], optimizer=optimizer, seed=1)
weight = tables.table("t")["weight"].clone().requires_grad_()
plain = torch.optim.SGD([weight], lr=0.05, momentum=0.9)
for step in range(4):
    batch = KeyedJagged(keys=("x",), values=torch.arange(5), offsets=None, batch_size=5)
    (tables(batch).pooled - step).square().sum().backward()
    plain.zero_grad()
    (weight - step).square().sum().backward()
    plain.step()
torch.testing.assert_close(tables.table("t")["weight"], weight.detach())
assert set(tables.table("t")) == {"weight", "momentum"}
assert "momentum" in json.dumps(_adapter().json_schema())
print(json.dumps(result["test"]["auc"]))
"""


@pytest.mark.slow
def test_a_row_optimizer_of_a_package_trains_as_torch_does(tmp_path: Path) -> None:
    changes = {"train.embedding": {"kind": "momentum", "learning_rate": 0.1}, "train.epochs": 2}
    assert json.loads(train_with(REGISTERS, tmp_path, json.dumps(changes), CHECKS).splitlines()[-1]) > 0.6


def test_a_row_optimizer_is_refused_once_kernels_contain_the_others() -> None:
    assert update
    with refuses(ConfigError, "late row optimizer kernels"):
        ROW_OPTIMIZERS.register("late", RowOptimizer())


@pytest.fixture
def registered() -> Iterator[None]:
    """Register an optimizer of the network as a package does."""
    DENSE_OPTIMIZERS.register("rmsprop", DenseOptimizer(lambda: torch.optim.RMSprop))
    yield
    del DENSE_OPTIMIZERS["rmsprop"]


@pytest.mark.usefixtures("registered")
def test_an_optimizer_of_the_network_of_a_package_trains_and_resumes(tmp_path: Path) -> None:
    content = with_values(tiny(tmp_path, epochs=2, max_steps=40), {"train.dense.kind": "rmsprop"})
    recipe = Recipe.from_dict(content)
    dataset = prepared(recipe.data)
    whole = Trainer(recipe, dataset, SilentProgress()).train()
    assert whole["test"]["auc"] > 0.6
    short = recipe.with_overrides([f"train.run={tmp_path / 'two'}", "train.max_steps=20"])
    Trainer(short, dataset, SilentProgress()).train()
    longer = short.with_overrides(["train.max_steps=40"])
    assert Trainer(longer, dataset, SilentProgress()).train(resume=True)["test"] == whole["test"]
    with refuses(ConfigError, "train.dense.kind adam adamw adagrad sgd rmsprop"):
        Recipe.from_dict(with_values(content, {"train.dense.kind": "lion"}))
