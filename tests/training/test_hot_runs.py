"""Test runs with hot rows and hot batches: they match tables in memory bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_tiered_runs import INT8, content

from recipes import prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.config import CodecConfig
from stratarec.hot.hot_loader import HotLoader
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training.build import new_model, new_plan
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.step import TrainPipeline
from stratarec.training.torch_setup import build_optimizer, torch_settings
from stratarec.training.trainer import Trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set."""
    root = tmp_path_factory.mktemp("hot-runs")
    prepared(Recipe.from_dict(content(root)).data)
    return root


def make_recipe(home: Path, run: Path, hot: dict[str, Any], **train: Any) -> Recipe:
    return Recipe.from_dict({**content(home, run=str(run), **train), "memory": INT8, "hot": hot})


def exact(plan: Plan | None) -> Plan:
    """Return the plan with float32 homes."""
    assert plan is not None
    return replace(
        plan,
        tables=tuple(
            placed if placed.tier == "level0" else replace(placed, codec=CodecConfig())
            for placed in plan.tables
        ),
    )


def test_float32_homes_match_tables_in_memory_bit_for_bit(home: Path, tmp_path: Path) -> None:
    # One evaluation only, so that the best checkpoint is the last.
    recipe = make_recipe(
        home, tmp_path / "hot", {"budget": "256KiB", "batches": "proportional"}, eval_every=1_000_000
    )
    dataset = Dataset.open(recipe.data.path)
    plan = exact(new_plan(recipe, dataset))
    assert any(placed.hot_rows for placed in plan.tables)
    trainer = Trainer(recipe, dataset, plan=plan)
    parts = trainer.build()
    parts.close()
    loader = parts.loader
    assert isinstance(loader, HotLoader)
    assert 0 < loader.hot_samples < loader.samples
    assert 0 < loader.kinds(0).sum() < len(loader)
    plain = new_model(replace(recipe, memory=type(recipe.memory)()), dataset, None, "")
    optimizer = build_optimizer(recipe.train.dense, plain.network)
    pipeline = TrainPipeline(plain, optimizer, recipe.train, loader)
    with torch_settings(threads=recipe.train.threads, seed=recipe.train.seed):
        steps = (batch for epoch in range(recipe.train.epochs) for batch in loader.batches(epoch))
        for step, batch in enumerate(steps):
            pipeline.train(step, batch)
    trainer.train()
    trained = open_run(tmp_path / "hot")
    with trained:
        for name in dataset.vocabularies:
            for part, values in plain.embeddings.table(name).items():
                assert torch.equal(values, trained.model.embeddings.table(name)[part]), (name, part)
        for name, values in plain.network.state_dict().items():
            assert torch.equal(values, trained.model.network.state_dict()[name]), name


def test_a_plan_keeps_the_budget_and_predicts_the_used_memory(home: Path, tmp_path: Path) -> None:
    hot = {"budget": "128KiB", "batches": "none"}
    recipe = make_recipe(home, tmp_path / "run", hot, max_steps=5)
    dataset = Dataset.open(recipe.data.path)
    recipe = replace(recipe, memory=replace(recipe.memory, dram=8 << 20))
    plan = new_plan(recipe, dataset)
    assert plan is not None
    assert plan.used("dram") <= 8 << 20
    assert plan.budgets["dram"] == 8 << 20
    assert "inputs need only hot rows" in plan.notes[-1]
    assert Plan.from_dict(plan.to_dict()) == plan
    parts = Trainer(recipe, dataset).build().model.embeddings.engine.bytes_by_part()
    predicted = plan.bytes["dram"]
    assert parts["level0"] == predicted["slot weights"] + predicted["slot state"]
