"""One YAML file -> a typed recipe, with overrides from the command line.

Every unknown key is refused, with the key that was probably meant. Relative paths start at the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic.fields import FieldInfo

from stratarec.data.prepare import PrepareConfig
from stratarec.errors import ConfigError
from stratarec.finite import check_finite
from stratarec.models import DLRMConfig, ModelConfig
from stratarec.planning.config import MemoryConfig
from stratarec.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, model, training and memory of one run."""

    name: str
    """Names the run."""
    data: PrepareConfig
    """Which logs become which data set."""
    model: ModelConfig = field(default_factory=DLRMConfig)
    """Which model is trained."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How it is trained."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Where its tables live; by default float32 in DRAM."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe and apply overrides such as ``train.batch_size=4096``.

        Raises
        ------
        ConfigError
            Naming the file, the field, what was got and what was expected.
        """
        content = _read_yaml(Path(path))
        for override in overrides:
            _apply(content, override)
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "recipe") -> Recipe:
        """A recipe from plain data, as `to_dict` gives."""
        _check_keys(content, cls, origin, "")
        check_finite(content, f"{origin}: ")
        try:
            recipe: Recipe = pydantic.TypeAdapter(cls).validate_python(content)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{origin}: {_explain(error)}") from error
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: every field, defaults included."""
        return pydantic.TypeAdapter(Recipe).dump_python(self, mode="json")  # type: ignore[no-any-return]

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return Path(self.train.run or f"runs/{self.name}")


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML would quietly keep the last."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            line = node.value[place][0].start_mark.line + 1
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} stands twice (line {line})", node.start_mark
            )
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with name, data, model and train, got {type(content).__name__}")
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected field=value, such as train.batch_size=4096")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    *path, last = key.split(".")
    for name in path:
        inner = content.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name} is not a section")
        content = inner
    content[last] = value


def _check_keys(value: Any, kind: Any, origin: str, where: str) -> None:
    """Refuse unknown keys anywhere in `value`, by the dataclasses that `kind` names."""
    kind = _chosen(value, kind, origin, where)
    if not dataclasses.is_dataclass(kind):
        if typing.get_origin(kind) in (Mapping, dict, types.MappingProxyType) and isinstance(value, Mapping):
            for key, inner in value.items():
                _check_keys(inner, typing.get_args(kind)[1], origin, f"{where}.{key}")
        elif typing.get_origin(kind) is tuple and isinstance(value, list):
            for place, inner in enumerate(value):
                _check_keys(inner, typing.get_args(kind)[0], origin, f"{where}[{place}]")
        return
    if not isinstance(value, Mapping):
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [entry.name for entry in dataclasses.fields(kind)]
    for key, inner in value.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}"
            raise ConfigError(f"{origin}: {path}: unknown field; {hint}")
        _check_keys(inner, hints[key], origin, path)


def _chosen(value: Any, kind: Any, origin: str, where: str) -> Any:
    """The member of a union that ``kind:`` names; other types as they are."""
    if typing.get_origin(kind) is typing.Annotated:
        union, *notes = typing.get_args(kind)
        if any(isinstance(note, FieldInfo) and note.discriminator for note in notes) and isinstance(value, Mapping):
            members = {str(member.kind): member for member in typing.get_args(union)}
            name = str(value.get("kind"))
            if name not in members:
                close = difflib.get_close_matches(name, members, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{origin}: {where}.kind is {name!r}, expected one of {', '.join(members)}{hint}")
            return members[name]
        return union
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and isinstance(value, Mapping):
        # An optional section: unknown fields in it are refused like anywhere else.
        sections = [member for member in typing.get_args(kind) if dataclasses.is_dataclass(member)]
        return sections[0] if len(sections) == 1 else kind
    return kind


def _explain(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message
    got = "" if first["type"] == "missing" else f", got {first['input']!r}"
    return f"{place}: {message[0].lower()}{message[1:]}{got}"
