"""The ``memory:`` section: sizes as people write them, and every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from errors import refuses
from recipes import tiny
from stratarec.errors import ConfigError
from stratarec.planning.config import BlockConfig, MemoryConfig
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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dram": "lots"}, "memory.dram lots 4GiB"),
        ({"dramm": 1}, "memory.dramm"),
        ({"block": {"path": "x", "budgett": 1}}, "memory.block.budgett"),
        ({"block": {"path": "x", "budget": "1XB"}}, "memory.block.budget 1XB"),
        ({"block": {"path": ""}}, "memory.block.path"),
        ({"mapped": {"budget": 1}}, "memory.mapped.path"),
        ({"mapped": {"path": "a"}, "block": {"path": "a"}}, "'a'"),
        ({"precision": {"C1": "int5"}}, "memory.precision"),
        ({"precision": "int5"}, "memory.precision"),
        ({"cache": {"fraction": 0}}, "memory.cache.fraction 0.0 0"),
        ({"cache": {"ways": 0}}, "memory.cache.ways 0 1 256"),
        ({"cache": {"policy": "mru"}}, "memory.cache.policy"),
        ({"lookahead": -1}, "memory.lookahead -1 0 64"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        memory(tmp_path, **section)
