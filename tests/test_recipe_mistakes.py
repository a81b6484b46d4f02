"""Any wrong value in any field of a recipe is one line that names the field as the recipe has it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import stratarec
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.sources.clicks_config import ClicksConfig
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.errors import ConfigError
from stratarec.models import HistoryConfig
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import TrainConfig

RECIPES = Path(stratarec.__file__).parent / "recipes"
WRONG = (-1, 1.5, "x", "", [], {}, None, math.nan, math.inf, [0], True, 10**30, "a\0b", {"kind": "x"})


def everything() -> dict[str, Any]:
    """A recipe with a field of every kind."""
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
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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


def test_every_wrong_value_is_one_line_that_names_its_field_or_section() -> None:
    content = everything()
    refused = [
        (path, value, message)
        for path in fields(content)
        for value in WRONG
        if (message := complaint(put(content, path, value))) is not None
    ]
    assert len(refused) > 700
    for path, value, message in refused:
        # A feature may be one that another names: their schema is the section then.
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
    ("change", "message"),
    [
        ({"model.history.pooling": "x"}, "model.history.pooling: input should be 'mean', 'target_attention' or"),
        ({"model.kind": None}, "model.kind is missing, expected one of dlrm, dcnv2"),
        ({"data.source.paths": 3}, "data.source.paths: expected a list, got 3"),
        ({"data.source.schema.sparse[1].kind": "x"}, "data.source.schema.sparse[1].kind: input should be 'single'"),
        ({"data.split.valid": [3]}, "data.split.valid[0]: input should be a valid string, got 3"),
        ({"data.vocabulary.overrides.city.min_count": 0}, "data.vocabulary.overrides.city.min_count is 0, expected at"),
        ({"train.embedding.learning_rate": -1}, "train.embedding.learning_rate is -1.0, expected 0 or more"),
        ({"train.dense.schedule.power": 0}, "train.dense.schedule.power is 0.0, expected more than 0"),
        ({"train.dense.schedule.total_steps": -1}, "train.dense.schedule.total_steps is -1, expected 0 or more"),
        ({"train.dense.learning_rate": math.nan}, "train.dense.learning_rate is nan, expected a finite number"),
        ({"train.clip_norm": math.inf}, "train.clip_norm is inf, expected a finite number"),
        ({"train.batch_size": True}, "train.batch_size is True, expected a number"),
        ({"train.threads": 100000}, "train.threads is 100000, expected at most 1024"),
        ({"train.max_steps": 1 << 63}, "train.max_steps is 9223372036854775808, expected a number of at most 64 bits"),
        ({"memory.precision.item_id": "int7"}, "memory.precision.item_id: input should be 'auto', 'fp32', 'fp16'"),
        ({"name": "a/b"}, "name is 'a/b', expected a name without '/' and control characters"),
        ({"name": ".."}, "name is '..', expected a name without '/' and control characters"),
        ({"train.run": "."}, "train.run is '.', expected the name of a directory of its own"),
        ({"data.path": "/"}, "data.path is '/', expected the name of a directory of its own"),
        ({"train.seed": -1}, "train.seed is -1, expected 0 to 2^63 - 1"),
        ({"data.split.seed": -1}, "data.split.seed is -1, expected 0 to 2^63 - 1"),
        ({"model.history.attention_mlp": []}, "model.history.attention_mlp is [], expected at least one positive size"),
        ({"model.history.attention_mlp": [0]}, "model.history.attention_mlp is [0], expected at least one positive"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_messages_name_the_field_what_was_got_and_what_was_expected(change: dict[str, Any], message: str) -> None:
    content = everything()
    by_name = {written(path): path for path in fields(content)}
    ((name, value),) = change.items()
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict(put(content, by_name[name], value), "r.yaml")
    assert str(caught.value).startswith(f"r.yaml: {message}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(seed=-1), r"^train\.seed is -1"),
        (lambda: TrainConfig(seed=1 << 63), r"^train\.seed is 9223372036854775808, expected 0 to 2\^63 - 1"),
        (lambda: TrainConfig(run=".."), r"^train\.run is '\.\.'"),
        (lambda: SplitConfig(seed=-1), r"^data\.split\.seed is -1"),
        (lambda: SyntheticConfig(seed=-1), r"^data\.source\.seed is -1"),
        (lambda: ClicksConfig(seed=-1), r"^data\.source\.seed is -1"),
        (lambda: PrepareConfig(source=SyntheticConfig(), path="."), r"^data\.path is '\.'"),
        (lambda: HistoryConfig(attention_mlp=()), r"^model\.history\.attention_mlp is \[\]"),
        (lambda: HistoryConfig(attention_mlp=(8, 0)), r"^model\.history\.attention_mlp is \[8, 0\]"),
        (lambda: HistoryConfig(heads=0), r"^model\.history\.heads is 0"),
    ],
)
def test_configurations_are_checked_when_they_are_made_in_python(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"sorce": {}}}, "data.sorce: unknown field; did you mean source?"),
        ({"data": {"source": {"kind": "parquet", "pats": []}}}, "data.source.pats: unknown field; did you mean paths?"),
        (
            {"model": {"kind": "dcnv2", "bottom_mlp": [4]}},
            "model.bottom_mlp: unknown field; known fields: kind, embed",
        ),
        ({"memory": {"block": {"path": "x", "bugdet": 3}}}, "memory.block.bugdet: unknown field; did you mean budget?"),
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
def test_a_field_that_does_not_exist_is_named_wherever_it_stands(change: dict[str, Any], message: str) -> None:
    content = everything()
    for section, fields_of_it in change.items():
        content[section] = fields_of_it if "kind" in fields_of_it else {**content[section], **fields_of_it}
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict(content, "r.yaml")
    assert str(caught.value).startswith(f"r.yaml: {message}")


@pytest.mark.parametrize("override", ["train.batch_size", "=5", "train.=5", ".=5", "train..seed=5", "other.yaml"])
def test_an_override_that_is_none_is_one_line(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^override '{override}': expected field=value, such as train\.batch_size"):
        Recipe.load(RECIPES / "demo.yaml", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"is empty, expected a mapping with name, data, model and train"),
        (b"# only a remark\n", r"is empty, expected a mapping"),
        (b"name: \xff\n", r"is not UTF-8 text \(byte 6: invalid start byte\); save it as UTF-8"),
        (
            b"name: a\n\tdata: 3\n",
            r"YAML: line 2, column 1: found character '\\t' that cannot start any token; indent with spaces$",
        ),
        (b"name: a\n---\nname: b\n", r"is not valid YAML: line 2, column 1: but found another document"),
        (b"name: 2020-13-45\n", r"is not valid YAML: month must be in 1\.\.12"),
        (b"name: " + b"9" * 5000 + b"\n", r"is not valid YAML: line 1, column 7: a number of 5,000 digits"),
        (b"[" * 5000, r"is not valid YAML: line 1, column 51: sections in more than 50 sections"),
        (
            b"!!python/object/apply:os.system [ls]\n",
            r"is not valid YAML: line 1, column 1: could not determine a constructor",
        ),
        (b"a: &a [*a]\n", r"is not valid YAML: line 1, column 8: a stands for a section that it lies in"),
        (
            b"name: a\nmodel:\n  kind: dlrm\n  kind: dcnv2\n",
            r"is not valid YAML: line 4, column 3: key 'kind' stands twice",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "r.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Recipe.load(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "r.yaml"))
