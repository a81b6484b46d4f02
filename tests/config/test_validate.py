"""Every number of a recipe is finite, whether it comes from YAML or from Python."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from errors import missing
from recipes import tiny
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe


def members(kind: Any) -> list[Any]:
    """The types that a field may have."""
    if typing.get_origin(kind) is typing.Annotated:
        return members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return [part for one in typing.get_args(kind) for part in members(one)]
    return [kind]


def float_fields(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Path in a recipe, class and field of every float; unions are walked through all their members."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for entry in dataclasses.fields(kind):
        for member in members(hints[entry.name]):
            if dataclasses.is_dataclass(member):
                yield from float_fields(member, (*path, entry.name))
            elif member is float:
                yield (*path, entry.name), kind, entry.name


FIELDS = list(float_fields(Recipe))


def test_the_walk_finds_what_there_is() -> None:
    paths = {".".join(path) for path, _, _ in FIELDS}
    assert {"train.dense.learning_rate", "train.embedding.eps", "train.dense.schedule.power"} <= paths
    assert {
        "data.source.signal",
        "data.split.valid",
        "train.checkpoint.every_minutes",
        "memory.cache.fraction",
    } <= paths


@pytest.mark.parametrize("path", sorted({path for path, _, _ in FIELDS}), ids=".".join)
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "nan", "inf"])
def test_a_recipe_names_the_field_that_is_no_number(tmp_path: Path, path: tuple[str, ...], value: str) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(tmp_path)))
    # The recipe's source has no schema, which is what it hears where the value is text.
    named = "schema" if "schema" in path and not value.startswith((".", "-.")) else path[-1]
    with pytest.raises(ConfigError, match=named) as caught:
        Recipe.load(tmp_path / "r.yaml", [f"{'.'.join(path)}={value}"])
    assert "\n" not in str(caught.value)
    if value.startswith((".", "-.")):
        assert not missing(f"r.yaml {'.'.join(path)} {value.replace('.', '')}", str(caught.value))
