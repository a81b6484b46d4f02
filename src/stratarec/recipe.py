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
from functools import cache
from pathlib import Path
from typing import Any

import pydantic
from pydantic.fields import FieldInfo

from stratarec import limited_yaml
from stratarec.data.prepare import PrepareConfig
from stratarec.distributed.config import DistributedConfig
from stratarec.errors import ConfigError
from stratarec.finite import check_finite
from stratarec.models import DLRMConfig, ModelConfig
from stratarec.naming import file_name, visible
from stratarec.opening import open_regular
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
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """How several processes share it."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or visible(self.name) != self.name:
            raise ConfigError(f"name is {self.name!r}, expected a name without '/' and control characters, and no path")
        if len(self.name) > _LONGEST:
            raise ConfigError(f"name is {_short(self.name)}, expected at most {_LONGEST} characters")

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe and apply overrides such as ``train.batch_size=4096``.

        Raises
        ------
        ConfigError
            Naming the file, the field, what was got and what was expected.
        """
        content = _read_yaml(Path(path))
        for override in overrides if isinstance(content, dict) else ():
            _apply(content, override)
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: object, origin: str = "recipe") -> Recipe:
        """A recipe from plain data, as `to_dict` gives."""
        if not isinstance(content, Mapping):
            got = type(content).__name__
            raise ConfigError(f"{origin}: expected a mapping with name, data, model and train, got {got}")
        _check_keys(content, cls, origin, "")
        check_finite(content, f"{origin}: ")
        try:
            recipe = _adapter().validate_python(content)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{origin}: {_explain(error, content)}") from error
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: every field, defaults included."""
        return _adapter().dump_python(self, mode="json")  # type: ignore[no-any-return]

    @property
    def place(self) -> str:
        """What directories of this recipe are called."""
        return file_name(self.name)

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return Path(self.train.run) if self.train.run else Path("runs") / self.place


@cache
def _adapter() -> pydantic.TypeAdapter[Recipe]:
    return pydantic.TypeAdapter(Recipe)


_SECTIONS = tuple(entry.name for entry in dataclasses.fields(Recipe))
_TOO_LARGE = 1 << 63
# Characters of a value that a message repeats.
_LONGEST = 120


def _read_yaml(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            text = file.read(limited_yaml.LARGEST + 1)
        if len(text) > limited_yaml.LARGEST:
            raise ConfigError(f"{path} is no recipe: it has more than {limited_yaml.LARGEST:,} bytes")
        content = limited_yaml.load(text.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        raise ConfigError(f"{path} is empty, expected a mapping with name, data, model and train")
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or "" in key.split("."):
        raise ConfigError(f"override {_short(override)}: expected field=value, such as train.batch_size=4096")
    try:
        value = limited_yaml.load(text)
    except ValueError as error:
        raise ConfigError(f"override {_short(override)}: the value is not valid YAML: {error}") from error
    *path, last = key.split(".")
    for name in path:
        inner = content.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {_short(override)}: {name} is not a section")
        content = inner
    content[last] = value


def _check_keys(value: Any, kind: Any, origin: str, where: str) -> None:
    """Refuse unknown keys anywhere in `value`, by the dataclasses that `kind` names."""
    kind = _chosen(value, kind, origin, where)
    _check_leaf(value, kind, origin, where)
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


def _check_leaf(value: Any, kind: Any, origin: str, where: str) -> None:
    """Refuse what no field can mean: true for 1, more than 64 bits, zero bytes."""
    kinds, expected = typing.get_args(kind) or (kind,), ""
    if isinstance(value, bool):
        expected = "a number" if bool not in kinds and (int in kinds or float in kinds) else ""
    elif isinstance(value, int) and abs(value) >= _TOO_LARGE:
        expected = "a number of at most 64 bits"
    elif isinstance(value, str) and "\0" in value:
        expected = "text without zero bytes"
    if expected:
        raise ConfigError(f"{origin}: {where} is {_short(value)}, expected {expected}")


def _chosen(value: Any, kind: Any, origin: str, where: str) -> Any:
    """The member of a union that ``kind:`` names; other types as they are."""
    if typing.get_origin(kind) is typing.Annotated:
        union, *notes = typing.get_args(kind)
        if any(isinstance(note, FieldInfo) and note.discriminator for note in notes) and isinstance(value, Mapping):
            members = {str(member.kind): member for member in typing.get_args(union)}
            name = value.get("kind")
            if name is None:
                raise ConfigError(f"{origin}: {where}.kind is missing, expected one of {', '.join(members)}")
            name = str(name)
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


def _explain(error: pydantic.ValidationError, content: Any) -> str:
    """The first mistake: the field, what is expected, what was got."""
    found = [(_place(one["loc"], content, one["type"]), one) for one in error.errors()]
    # A value that fits no member of a union has an error for each: the one that lies deepest is of the member meant.
    place, first = max((entry for entry in found if entry[0].startswith(found[0][0])), key=lambda entry: len(entry[0]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return _in_place(message, place, first["input"])
    # What pydantic calls these is what they are in Python; in a recipe they are something else.
    message = {"tuple_type": "expected a list", "dataclass_type": "expected a section"}.get(first["type"], message)
    got = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
    return f"{place}: {message[0].lower()}{message[1:]}{got}"


def _place(location: Sequence[str | int], content: Any, kind: str) -> str:
    """The path of a field as a recipe has it: pydantic's own also names the members of unions."""
    path = ""
    for place, part in enumerate(location):
        absent = kind == "missing" and place == len(location) - 1
        if isinstance(part, int) and isinstance(content, list | tuple) and part < len(content):
            path, content = f"{path}[{part}]", content[part]
        elif absent or (isinstance(content, Mapping) and part in content):
            path = f"{path}.{part}" if path else str(part)
            content = content.get(part) if isinstance(content, Mapping) else None
    return path


def _in_place(message: str, place: str, section: Any) -> str:
    """The message of a section's own check, with the path that the field has in this recipe.

    Sections that stand in several places, such as schedules and optimizers, know only their own name.
    """
    head, space, rest = message.partition(" ")
    if place and head.startswith(f"{place}."):
        return message
    field_name = head.rpartition(".")[2]
    known = isinstance(section, Mapping) and field_name in section and ("." in head or rest.startswith("is "))
    elsewhere = "." in head and head.partition(".")[0] not in _SECTIONS
    if place and (known or (elsewhere and field_name.isidentifier())):
        return f"{place}.{field_name}{space}{rest}"
    return message if head.partition(".")[0] in _SECTIONS or not place else f"{place}: {message}"


def _short(value: Any) -> str:
    """A value as it was got, in one line of a length that can be read."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than some thousand digits
        return "a number of too many digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
