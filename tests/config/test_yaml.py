"""Test that hostile recipes and JSON, and invalid numbers in them, are one error."""

from __future__ import annotations

import dataclasses
import os
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from errors import missing, refuses
from recipes import tiny
from stratarec.cli import main
from stratarec.config import yaml as limited_yaml
from stratarec.config.choices import Sections
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import read_json
from stratarec.recipe import Recipe

LIMIT_SECONDS = 10
"""Refusing these texts takes milliseconds. Without the limit it took minutes, or more memory than
there is.
"""


def bomb(levels: int, width: int = 9) -> str:
    lines = ["a0: &a0 [" + ", ".join(["lol"] * width) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * width) + "]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int, width: int = 9) -> str:
    lines = ["a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(width)) + "}"]
    lines += [f"a{n}: &a{n} {{<<: [" + ", ".join([f"*a{n - 1}"] * width) + "]}" for n in range(1, levels)]
    return "\n".join(lines)


def wide(keys: int) -> str:
    return "{" + ",".join(f"k{n}: 1" for n in range(keys)) + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9), "more than 100,000 values"),
        (merges(9), "more than 100,000 values"),
        ("a: &a [*a]", "line 1, column 8: alias a refers to its own section"),
        ("a: &a {b: *a}", "alias a refers to its own section"),
        ("[" * 60 + "]" * 60, "more than 50 nested sections"),
        ("[" * 200_000, "more than 50 nested sections"),
        ("{a: " * 200_000, "more than 50 nested sections"),
        ("? " * 200_000, "more than 50 nested sections"),
        ("- " * 200_000, "more than 50 nested sections"),
        ("a: " + "9" * 5_000, "line 1, column 4: a number with 5,000 digits"),
        ("a: 0x" + "f" * 5_000, "a number with 5,002 digits"),
        ("a: " + ":".join(["59"] * 100_000), "a number with 299,999 digits"),
        ("a: " + "1" * 200_000 + ".5", "a number with 200,002 digits"),
        pytest.param("[" + "1," * 200_000 + "]", "more than 100,000 values", marks=pytest.mark.slow),
        pytest.param(wide(60_000), "more than 100,000 values", marks=pytest.mark.slow),
        ("a: 1\n" * 2 + "b: 1", "duplicate key 'a'"),
        ("? [a]\n: 1", "cannot be a key"),
        ("? {a: 1}\n: 1", "cannot be a key"),
        ("x" * (limited_yaml.LARGEST + 1), "1,048,577 characters, expected at most 1,048,576"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor for the tag"),
    ],
    ids=lambda value: value[:30],
)
def test_small_texts_that_expand_to_much_are_refused_at_once(text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"\w") as caught:
        limited_yaml.load(text)
    assert time.process_time() - began < LIMIT_SECONDS
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_anchors_merges_and_wide_schemas_are_read() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}\nd: [*a, *a]\ne: 0x10\nf: 1_000\ng: 1e-3\nh: 1.5\ni: ~"
    assert limited_yaml.load(text) == yaml.safe_load(text)
    schema = yaml.safe_dump([{"name": f"f{n}", "group": "g", "vocabulary": "v"} for n in range(200)])
    assert len(limited_yaml.load(schema)) == 200


def test_a_text_expands_to_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_yaml, "_MAX_VALUES", 301)
    assert len(limited_yaml.load(wide(150))) == 150
    for text in (wide(151), "[" + "1," * 302 + "]"):
        with refuses(ValueError, "values 301"):
            limited_yaml.load(text)


@pytest.mark.slow
def test_a_text_of_nearly_the_maximum_number_of_values_is_read() -> None:
    began = time.process_time()
    assert len(limited_yaml.load(wide(40_000))) == 40_000
    assert time.process_time() - began < 3 * LIMIT_SECONDS


@pytest.mark.parametrize(
    "number", ["9" * 5_000, "0x" + "f" * 5_000, "9" * 90, "-" + "9" * 90, "9" * 90 + ".5"]
)
@pytest.mark.parametrize(
    "field", ["train.seed", "train.batch_size", "data.shard_samples", "train.dense.learning_rate"]
)
def test_numbers_of_many_digits_are_one_line(
    tmp_path: Path, number: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(tmp_path)))
    code = main(["prepare", "-q", str(tmp_path / "r.yaml"), f"{field}={number}"])
    result = capsys.readouterr().err
    if (field, number[-2:]) == ("train.dense.learning_rate", ".5"):
        return  # an ordinary rate
    assert (code, result.count("\n")) == (2, 1)
    assert len(result) < 1_000
    content = tiny(tmp_path)
    place = content["data"] if field.startswith("data.") else content["train"]
    place["X" if "dense" in field else field.split(".")[-1]] = "NUMBER"
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump(content).replace("NUMBER", number).replace("X:", "dense:")
    )
    assert main(["prepare", "-q", str(tmp_path / "r.yaml")]) == 2
    result = capsys.readouterr().err
    assert result.count("\n") == 1
    assert len(result) < 1_000


@pytest.mark.parametrize(
    "text",
    ["9" * 5_000, '{"a": ' + "9" * 5_000 + "}", "[" * 100_000, '{"a":' * 100_000, "\udc80"],
    ids=["number", "object", "lists", "objects", "bytes"],
)
def test_invalid_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
    with refuses(DatasetError, "a.json JSON") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_a_recipe_from_a_process_is_refused_and_one_from_a_file_is_read(tmp_path: Path) -> None:
    text = yaml.safe_dump(tiny(tmp_path))
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    done = forked.run(["prepare", "-q", "/dev/stdin"], stdin=reader)
    os.close(reader)
    expected = (
        "cannot read the recipe /dev/stdin: it is a pipe, which can be read only once, expected a file"
    )
    assert (done.returncode, done.stderr) == (2, f"stratarec: {expected}\n")
    (tmp_path / "r.yaml").write_text(text)
    with (tmp_path / "r.yaml").open() as file:
        assert forked.run(["prepare", "-q", "/dev/stdin"], stdin=file).returncode == 0


def members(kind: Any) -> list[Any]:
    """Return the types that a field may have."""
    if typing.get_origin(kind) is typing.Annotated:
        first, *others = typing.get_args(kind)
        sections = [other.union for other in others if isinstance(other, Sections)]
        return [part for one in sections or [first] for part in members(one)]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return [part for one in typing.get_args(kind) for part in members(one)]
    return [kind]


def float_fields(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Return the path in a recipe, class and field of every float, for all members of unions."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for entry in dataclasses.fields(kind):
        for member in members(hints[entry.name]):
            if dataclasses.is_dataclass(member):
                yield from float_fields(member, (*path, entry.name))
            elif member is float:
                yield (*path, entry.name), kind, entry.name


FIELDS = list(float_fields(Recipe))


def test_the_walk_finds_the_known_fields() -> None:
    paths = {".".join(path) for path, _, _ in FIELDS}
    assert {"train.dense.learning_rate", "train.embedding.eps", "train.dense.schedule.power"} <= paths
    assert {
        "data.source.signal",
        "data.split.valid",
        "train.checkpoint.every_minutes",
        "memory.cache.fraction",
    } <= paths


@pytest.mark.parametrize("path", sorted({path for path, _, _ in FIELDS}), ids=".".join)
@pytest.mark.parametrize("value", [".nan", "-.inf", "inf"])
def test_an_error_names_the_field_that_is_not_a_number(
    tmp_path: Path, path: tuple[str, ...], value: str
) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(tmp_path)))
    # The recipe's source has no schema, so the error for a text value is about the schema.
    named = "schema" if "schema" in path and not value.startswith((".", "-.")) else path[-1]
    # the default loss has no numbers
    kind = ["train.loss.kind=focal"] if path[:2] == ("train", "loss") else []
    with pytest.raises(ConfigError, match=named) as caught:
        Recipe.load(tmp_path / "r.yaml", [*kind, f"{'.'.join(path)}={value}"])
    assert "\n" not in str(caught.value)
    if value.startswith((".", "-.")):
        assert not missing(f"r.yaml {'.'.join(path)} {value.replace('.', '')}", str(caught.value))
