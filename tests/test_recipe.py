"""Test that recipes load and survive a round trip, and that a mistake is one error that names its
field.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import stratarec
from errors import refuses
from recipes import tiny
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError
from stratarec.models import HistoryConfig
from stratarec.recipe import Recipe, with_values
from stratarec.recipe.train_section import TrainConfig

SHIPPED = sorted((Path(stratarec.__file__).parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.load(path)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_overrides_reach_nested_fields(tmp_path: Path) -> None:
    recipe = Recipe.load(
        SHIPPED[0], ["train.batch_size=77", "data.split.test=0.2", "model.embedding_dim=8"][:1]
    )
    assert recipe.train.batch_size == 77
    recipe = Recipe.load(
        Path(SHIPPED[0]).parent / "criteo.yaml",
        ["data.source.paths=[a, b]", "train.dense.schedule.warmup_steps=5"],
    )
    assert recipe.data.source.paths == ("a", "b")  # type: ignore[union-attr]
    assert recipe.train.dense.schedule.warmup_steps == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"batch_sise": 3}}, "train.batch_sise batch_size"),
        ({"trian": {}}, "train"),
        ({"model": {"kind": "dlmr"}}, "model.kind dlmr dcnv2"),
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


RECIPES = Path(stratarec.__file__).parent / "recipes"
WRONG = (-1, 1.5, "x", "", [], {}, None, math.nan, math.inf, [0], True, 10**30, "a\0b", {"kind": "x"})


def everything() -> dict[str, Any]:
    """Return a recipe with a field of every kind."""
    content = yaml.safe_load((RECIPES / "trivago.yaml").read_text())
    content["memory"] = {
        "block": {"path": "a"},
        "mapped": {"path": "b"},
        "precision": {"item_id": "int8"},
        "dram": 2**30,
    }
    content["data"]["vocabulary"]["overrides"] = {"city": {"min_count": 5}}
    content["model"]["history"] = {"pooling": "target_attention"}
    return Recipe.from_dict(content).to_dict()


def fields(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in inner:
        yield (*path, key)
        yield from fields(part, (*path, key))


def written(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def put(content: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(content)
    place: Any = content
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return content


@pytest.mark.parametrize("place", ["model", "train.loss", "train.dense", "train.embedding", "data.source"])
def test_a_name_in_place_of_a_section_is_explained(place: str, tmp_path: Path) -> None:
    with refuses(ConfigError, f"{place}: expected a section, such as {place}.kind=adam, got 'adam'"):
        Recipe.from_dict(with_values(tiny(tmp_path), {place: "adam"}))


@pytest.mark.parametrize("kind", ["criteo", "avazu"])
def test_a_kind_of_source_that_became_a_recipe_names_the_recipe(kind: str, tmp_path: Path) -> None:
    with refuses(ConfigError, f"data.source.kind '{kind}' csv `stratarec init --recipe {kind}`"):
        Recipe.from_dict(with_values(tiny(tmp_path), {"data.source": {"kind": kind}}))
    assert kind in (path.stem for path in SHIPPED)


HISTORY = {"name": "h", "kind": "history", "of": "item"}


@pytest.mark.parametrize("value", [7, 7.5, True, None, ["7d"]])
@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("data.source.schema.sparse[1].within", lambda value: {**HISTORY, "within": value}),
        ("data.source.memory", lambda value: value),
        ("data.vocabulary.half_life", lambda value: value),
    ],
)
def test_a_number_is_no_duration(place: str, content: Any, value: object, tmp_path: Path) -> None:
    schema = {"time": "t", "user": "u", "sparse": [{"name": "item"}, content(value)]}
    source = {"kind": "csv", "schema": schema} if "schema" in place else {"kind": "clicks"}
    recipe = with_values(tiny(tmp_path), {"data.source": source})
    wrong = recipe if "schema" in place else with_values(recipe, {place: value})
    shown = "null" if value is None else str(value)
    with refuses(ConfigError, f"{place} {shown} duration 90s 2d"):
        Recipe.from_dict(wrong)


def test_every_wrong_value_is_one_line_that_names_its_field_or_section() -> None:
    content = everything()
    refused = [
        (path, value, message)
        for number, path in enumerate(fields(content))
        for value in (WRONG * 2)[number % len(WRONG) :][:4]
        if (message := complaint(put(content, path, value))) is not None
    ]
    assert len(refused) > 150
    for path, value, message in refused:
        # A feature may be named by another feature; the error then names the schema.
        sections = [written(path[:end]) for end in range(max(len(path) - 3, 1), len(path) + 1)]
        assert any(message.startswith(f"r.yaml: {section}") for section in sections), (path, value, message)
        assert "\n" not in message


def complaint(content: dict[str, Any]) -> str | None:
    try:
        Recipe.from_dict(content, "r.yaml")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(seed=-1), "train.seed -1"),
        (lambda: TrainConfig(seed=1 << 63), "train.seed 9223372036854775808 0 2^63 1"),
        (lambda: TrainConfig(run=".."), "train.run '..'"),
        (lambda: SplitConfig(seed=-1), "data.split.seed -1"),
        (lambda: SyntheticConfig(seed=-1), "data.source.seed -1"),
        (lambda: ClicksConfig(seed=-1), "data.source.seed -1"),
        (lambda: PrepareConfig(source=SyntheticConfig(), path="."), "data.path '.'"),
        (lambda: HistoryConfig(attention_mlp=()), "model.history.attention_mlp []"),
        (lambda: HistoryConfig(attention_mlp=(8, 0)), "model.history.attention_mlp [8 0]"),
        (lambda: HistoryConfig(heads=0), "model.history.heads 0"),
    ],
)
def test_configurations_are_validated_when_they_are_built_in_python(make: Any, message: str) -> None:
    with refuses(ConfigError, message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"sorce": {}}}, "data.sorce: unknown field; did you mean source?"),
        (
            {"data": {"source": {"kind": "parquet", "pats": []}}},
            "data.source.pats: unknown field; did you mean paths?",
        ),
        (
            {"model": {"kind": "dcnv2", "bottom_mlp": [4]}},
            "model.bottom_mlp: unknown field; known fields: kind, embed",
        ),
        (
            {"memory": {"block": {"path": "x", "bugdet": 3}}},
            "memory.block.bugdet: unknown field; did you mean budget?",
        ),
        (
            {"data": {"vocabulary": {"overrides": {"a": {"min_cout": 3}}}}},
            "data.vocabulary.overrides.a.min_cout: unknown field; did you mean min_count?",
        ),
        (
            {"data": {"source": {"kind": "csv", "schema": {"label": {"column": "r", "at_lest": 4}}}}},
            "data.source.schema.label.at_lest: unknown field; did you mean at_least?",
        ),
        ({"train": {"batch_size": 0, "epoch": 3}}, "train.epoch: unknown field; did you mean epochs?"),
        ({"train": {5: 3}}, "train.5: unknown field; known fields: run, batch_size"),
    ],
)
def test_an_unknown_field_is_named_at_any_depth(change: dict[str, Any], message: str) -> None:
    content = everything()
    for section, fields_of_it in change.items():
        content[section] = fields_of_it if "kind" in fields_of_it else {**content[section], **fields_of_it}
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict(content, "r.yaml")
    assert str(caught.value).startswith(f"r.yaml: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "mapping data"),
        (b"# only a remark\n", "mapping"),
        (b"name: \xff\n", "UTF-8 byte 6"),
        (b"name: a\n\tdata: 3\n", r"YAML line 2 column 1 '\t'"),
        (b"name: a\n---\nname: b\n", "YAML line 2 column 1"),
        (b"name: 2020-13-45\n", "YAML 1..12"),
        (b"name: " + b"9" * 5000 + b"\n", "YAML line 1 column 7 number 5,000"),
        (b"[" * 5000, "YAML line 1 column 51 50"),
        (b"!!python/object/apply:os.system [ls]\n", "YAML line 1 column"),
        (b"a: &a [*a]\n", "YAML line 1 column 8"),
        (b"name: a\nmodel:\n  kind: dlrm\n  kind: dcnv2\n", "YAML line 4 column 3 kind"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "r.yaml").write_bytes(text)
    with refuses(ConfigError, message) as caught:
        Recipe.load(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "r.yaml"))
