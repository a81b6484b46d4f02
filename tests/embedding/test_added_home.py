"""Test a home of another package: rows are trained under a cache over its store, saved, and
restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from errors import refuses
from recipes import prepared, tiny
from stratarec.embedding.homes import HOMES, Home, NewStore
from stratarec.embedding.stores.arrays import DramRecords
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.build import new_plan
from stratarec.training.trainer import Trainer


class ShelfRecords(DramRecords):
    """Records of another kind of memory that is addressed by bytes."""

    kind = "shelf"


OPENED: list[ShelfRecords] = []


def open_shelf(new: NewStore) -> ShelfRecords:
    OPENED.append(ShelfRecords(rows=new.rows, record_bytes=new.record_bytes))
    return OPENED[-1]


@pytest.fixture
def registered() -> Iterator[None]:
    """Register a home as a package does."""
    HOMES.register("shelf", Home(open_shelf, "dram"))
    yield
    del HOMES["shelf"]


@pytest.mark.usefixtures("registered")
def test_a_run_with_rows_in_a_home_of_a_package_equals_one_in_dram(tmp_path: Path) -> None:
    changes = {
        "data.source.scale": 0.05,
        "data.vocabulary": {"min_count": 1, "tail_buckets": 4},
        "model.embedding_dim": 16,
        "memory": {"precision": "int8", "lookahead": 0, "cache": {"fraction": 0.05, "ways": 8}},
    }
    content = with_values(tiny(tmp_path, batch_size=32, max_steps=30, eval_every=0), changes)
    results = {}
    for home in ("dram", "shelf"):
        recipe = Recipe.from_dict(with_values(content, {"train.run": str(tmp_path / home)}))
        dataset = prepared(recipe.data)
        plan = new_plan(recipe, dataset)
        assert plan is not None
        assert any(placed.tier == "dram" for placed in plan.tables)
        tables = tuple(
            placed if placed.tier == "level0" else replace(placed, tier=home) for placed in plan.tables
        )
        trainer = Trainer(recipe, dataset, SilentProgress(), plan=replace(plan, tables=tables))
        results[home] = trainer.train()["test"]
        longer = Trainer(recipe.with_overrides(["train.max_steps=40"]), dataset, SilentProgress())
        results[home, "resumed"] = longer.train(resume=True)["test"]
    assert len(OPENED) == 2
    assert results["shelf"] == results["dram"]
    assert results["shelf", "resumed"] == results["dram", "resumed"]


def test_a_home_that_is_not_registered_is_refused() -> None:
    with refuses(ConfigError, "shelf dram mapped log hbm"):
        TierConfig(tables={"t": TableTier(home="shelf", cache_rows=8)})
