"""Test the memory section and plan files: errors name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing.artefacts import TIERS, make_log, make_recipe, place_tables

from errors import refuses
from recipes import tiny
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import DatasetError
from stratarec.io.sealed import write_sealed
from stratarec.planning import machine
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe


def memory(root: Path, **section: Any) -> MemoryConfig:
    return Recipe.from_dict({**tiny(root), "memory": section}).memory


def test_the_section_survives_a_round_trip(tmp_path: Path) -> None:
    section = {
        "dram": "4GiB", "block": {"path": "/tmp/rows", "budget": "1TiB"},
        "precision": {"default": "int8", "C3": "fp32"},
        "cache": {"policy": "rank", "fraction": 0.05}, "lookahead": 2, "state": "bf16",
    }  # fmt: skip
    recipe = Recipe.from_dict({**tiny(tmp_path), "memory": section})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.memory.dram == 4 << 30
    assert recipe.memory.block == BlockConfig(path="/tmp/rows", budget=1 << 40)
    assert (recipe.memory.table_precision("C3"), recipe.memory.table_precision("C4")) == ("fp32", "int8")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plan")
    make_log(root)
    recipe = make_recipe(root, root / "run", memory=TIERS)
    prepare(recipe.data)
    plan = place_tables("cached", recipe)
    assert plan is not None
    return plan.to_dict()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_rows", 2**40),
        ("cache_rows", -1),
        ("rows", 2**62),
        ("width", 10**400),
        ("pinned", -1),
        ("lookups", -1.0),
        ("distinct", 1e300),
        ("misses", float("nan")),
        ("bytes", {"dram": {"slot weights": 10**400}}),
        ("bytes", {"dram": {"slot weights": -1}}),
        ("seconds", {"compute": -1.0, "staging": 0.0, "device": 0.0}),
    ],
    ids=str,
)
def test_impossible_numbers_in_a_plan_are_named(
    content: dict[str, Any], tmp_path: Path, field: str, value: Any
) -> None:
    changed = json.loads(json.dumps(content))
    cached = next(table for table in changed["tables"] if table["tier"] != "level0")
    cached[field] = value
    if value != value:
        (tmp_path / "plan.json").write_text(json.dumps(changed))
    else:
        write_sealed(tmp_path / "plan.json", changed)
    with refuses(DatasetError, "NaN" if value != value else field):
        Plan.load(tmp_path / "plan.json").summary  # noqa: B018


def test_rates_are_positive_if_other_processes_take_the_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of 0 would make predictions of the planner divide by 0."""
    for name, value in {"_SECONDS": -1.0, "_FILE_BYTES": 1 << 22, "_WRITE_BYTES": 1 << 20}.items():
        monkeypatch.setattr(machine, name, value)
    assert all(value > 0 for name, value in machine._measure_block(tmp_path).items() if name != "direct")
    assert machine._rate(lambda: None, 1, -1.0) > 0
