"""Test the page of recipes by situation, and the links from recipe fields to the pages that explain
them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratarec.data.sources import SOURCES
from stratarec.distributed.wire_formats import WIRES
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.optimizers import ROW_OPTIMIZERS
from stratarec.kernels.policies import POLICIES
from stratarec.models.dense_optimizers import DENSE_OPTIMIZERS
from stratarec.models.losses import LOSSES
from stratarec.models.metrics import watched
from stratarec.models.registry import MODELS
from stratarec.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to" / "recipes.md").read_text()
SITUATIONS = dict(re.findall(r"^## (.+)\n(?:(?!## ).*\n)*?```yaml\n((?:.*\n)*?)```", PAGE, re.MULTILINE))
LINES = 13
"""Maximum lines of a situation."""
SCHEMA = {
    "label": "clicked",
    "time": "time",
    "user": "user",
    "sparse": [{"name": "user"}, {"name": "item"}],
}
BASE = {
    "name": "clicks",
    "data": {"path": "data/clicks", "source": {"kind": "csv", "paths": ["clicks.csv"], "schema": SCHEMA}},
}
"""The reader's recipe."""


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the lines of a situation, as a reader copies them; a source of another
    kind replaces it.
    """
    if change.get("kind", base.get("kind")) != base.get("kind"):
        return change
    result = dict(base)
    for name, value in change.items():
        is_section = isinstance(value, dict) and isinstance(base.get(name), dict)
        result[name] = merged(base[name], value) if is_section else value
    if "labels" in result:
        result.pop("label", None)
    return result


def test_every_situation_has_lines() -> None:
    assert len(SITUATIONS) == len(re.findall(r"^## ", PAGE, re.MULTILINE)) >= 12
    assert {name: text for name, text in SITUATIONS.items() if text.count("\n") > LINES} == {}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_lines_of_a_situation_are_a_valid_recipe(name: str) -> None:
    lines = yaml.safe_load(SITUATIONS[name])
    recipe = Recipe.from_dict(merged(BASE, lines)).to_dict()
    for path, value in leaves(lines):
        kept: Any = recipe
        for part in path:
            kept = kept[part]
        # sizes and durations are converted
        assert kept == value or isinstance(value, (str, dict, list)), path


def leaves(content: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(content, dict):
        return [(path, content)]
    return [leaf for name, value in content.items() for leaf in leaves(value, (*path, name))]


def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_field_links_to_a_heading_whose_page_names_it() -> None:
    tool = generate()
    unexplained, used = [], set()
    for _, kind in tool._sections():
        for field in dataclasses.fields(kind):
            key, target = tool.explanation(kind, field.name)
            used.add(key)
            page, _, heading = target.partition("#")
            text = tool.metrics() if page == "reference/metrics.md" else (DOCS / page).read_text()
            anchors = {
                re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-")
                for line in HEADING.findall(text)
            }
            assert not heading or heading in anchors, target
            if "." in key and not re.search(rf"\b{field.name}\b", text):
                unexplained.append(f"{key}: {target} does not contain the field")
    assert not unexplained
    assert not {key for key in tool.EXPLANATIONS if "." in key} - used, "entries without a field"


def test_the_reference_lists_the_choices_of_every_registry() -> None:
    text = generate().recipe()
    for registry in (DENSE_OPTIMIZERS, ROW_OPTIMIZERS, WIRES, watched()):
        assert f"`{' | '.join(registry)}`" in text
    for kind in (*LOSSES, *MODELS, *SOURCES):
        assert f", kind {kind}\n" in text
    for registry in (KINDS, POLICIES):
        assert f"auto | {' | '.join(registry)}" in text
    assert " at 0x" not in text


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
