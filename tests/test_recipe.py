"""Recipes: every mistake is one clear message that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

import stratarec
from errors import refuses
from recipes import tiny
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe

SHIPPED = sorted((Path(stratarec.__file__).parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.load(path)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_overrides_reach_nested_fields(tmp_path: Path) -> None:
    recipe = Recipe.load(SHIPPED[0], ["train.batch_size=77", "data.split.test=0.2", "model.embedding_dim=8"][:1])
    assert recipe.train.batch_size == 77
    recipe = Recipe.load(
        Path(SHIPPED[0]).parent / "criteo.yaml", ["data.source.paths=[a, b]", "train.dense.schedule.warmup_steps=5"]
    )
    assert recipe.data.source.paths == ("a", "b")  # type: ignore[union-attr]
    assert recipe.train.dense.schedule.warmup_steps == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"batch_sise": 3}}, "train.batch_sise batch_size"),
        ({"trian": {}}, "train"),
        (
            {"model": {"kind": "dlmr"}},
            "model.kind dlmr dcnv2",
        ),
        ({"model": {"kind": "dlrm", "cross_layers": 3}}, "model.cross_layers"),
        ({"train": {"batch_size": "many"}}, "train.batch_size many"),
        ({"train": {"batch_size": 0}}, "train.batch_size 0 1"),
        ({"train": {"precision": "fp8"}}, "train.precision float32 bf16 fp8"),
        ({"train": {"dense": {"kind": "adma"}}}, "train.dense.kind"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with refuses(ConfigError, message):
        Recipe.from_dict({**tiny(tmp_path), **change})


def test_a_missing_file_and_a_bad_override_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "recipe"):
        Recipe.load(tmp_path / "none.yaml")
    with refuses(ConfigError, "field=value"):
        Recipe.load(SHIPPED[0], ["train.batch_size"])
