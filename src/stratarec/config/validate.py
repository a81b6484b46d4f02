"""Checks of configurations, and what pydantic finds wrong with plain data as one line that names the field."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from stratarec.errors import ConfigError

# Characters of a value that a message repeats.
_LONGEST = 120
_TOO_LARGE = 1 << 63
_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_TAGS = ("union_tag_not_found", "union_tag_invalid")


def explain(error: pydantic.ValidationError, content: Any, kind: Any) -> str:
    """The first mistake in `content`, which is no `kind`: the field, what is expected, what was got.

    A field that does not exist comes before everything else: what follows from it is no mistake of its own. What a
    section says of itself comes before what is wrong with it as something else.
    """
    found = [(_place(one["loc"], content, one["type"]), one) for one in error.errors()]
    # A value that fits no member of a union has an error for each: the one that lies deepest is of the member meant.
    unknown = [entry for entry in found if entry[1]["type"] in _UNKNOWN]
    first_place = (unknown or found)[0][0]
    place, first = max(
        (entry for entry in unknown or found if entry[0].startswith(first_place)),
        key=lambda entry: (len(entry[0]), entry[1]["type"] == "value_error"),
    )
    if first["type"] in _UNKNOWN:
        return f"{place}: unknown field; {_hint(str(first['loc'][-1]), _fields(kind, first['loc'][:-1]))}"
    if first["type"] in _TAGS:
        return _explain_kind(place, first["input"].get("kind"), [*_kinds(_at(kind, first["loc"]))])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return _in_place(message, place, first["input"], _fields(kind, ()))
    # What pydantic calls these is what they are in Python; in a recipe they are something else.
    section = "expected a section"
    words = {"tuple_type": "expected a list", "dataclass_type": section, "model_attributes_type": section}
    message = words.get(first["type"], message)
    got = "" if first["type"] == "missing" else f", got {short(first['input'])}"
    return f"{place}: {message[0].lower()}{message[1:]}{got}"


def odd_value(content: Any, where: str = "") -> str:
    """The first value that no field can have: more than 64 bits, or text with zero bytes; empty where none is."""
    for place, value in _leaves(content, where):
        if isinstance(value, int) and abs(value) >= _TOO_LARGE:
            return f"{place} is {short(value)}, expected a number of at most 64 bits"
        if isinstance(value, str) and "\0" in value:
            return f"{place} is {short(value)}, expected text without zero bytes"
    return ""


def mistaken_truth(content: Any, taken: Any) -> str:
    """The first truth value in `content` that was `taken` for a number; empty where none was."""
    read = dict(_leaves(taken, ""))
    for place, value in _leaves(content, ""):
        if isinstance(value, bool) and not isinstance(read.get(place, value), bool):
            return f"{place} is {value}, expected a number"
    return ""


def short(value: Any) -> str:
    """A value as it was got, in one line of a length that can be read."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than some thousand digits
        return "a number of too many digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _leaves(content: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _leaves(value, f"{where}[{number}]")
    else:
        yield where, content


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}"


def _explain_kind(place: str, name: Any, kinds: Sequence[str]) -> str:
    if name is None:
        return f"{place}.kind is missing, expected one of {', '.join(kinds)}"
    close = difflib.get_close_matches(str(name), kinds, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{place}.kind is {short(str(name))}, expected one of {', '.join(kinds)}{hint}"


def _fields(kind: Any, location: Sequence[str | int]) -> list[str]:
    """The fields of the section at a location of pydantic's."""
    section = _at(kind, location)
    members = [section, *_members(section)]
    return [
        entry.name for member in members if dataclasses.is_dataclass(member) for entry in dataclasses.fields(member)
    ]


def _at(kind: Any, location: Sequence[str | int]) -> Any:
    """The type of what lies at a location, which also names members of unions: by their kind, or by their class."""
    for part in location:
        kind = _bare(kind)
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind, include_extras=True).get(str(part))
            continue
        members = _members(kind)
        named = [member for member in members if part in (getattr(member, "kind", None), member.__name__)]
        if named:
            kind = named[0]
        elif len(members) == 1:  # an optional section is not named
            kind = _at(members[0], [part])
        elif typing.get_args(kind):
            kind = typing.get_args(kind)[0 if isinstance(part, int) else -1]
    return _bare(kind)


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _members(kind: Any) -> list[Any]:
    """The sections of a union."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return [member for member in typing.get_args(kind) if dataclasses.is_dataclass(member)] if union else []


def _kinds(kind: Any) -> Iterator[str]:
    return (str(member.kind) for member in _members(kind))


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


def _in_place(message: str, place: str, section: Any, sections: Sequence[str]) -> str:
    """The message of a section's own check, with the path that the field has in this recipe.

    Sections that stand in several places, such as schedules and optimizers, know only their own name.
    """
    head, space, rest = message.partition(" ")
    if place and head.startswith(f"{place}."):
        return message
    field_name = head.rpartition(".")[2]
    known = isinstance(section, Mapping) and field_name in section and ("." in head or rest.startswith("is "))
    elsewhere = "." in head and head.partition(".")[0] not in sections
    if place and (known or (elsewhere and field_name.isidentifier())):
        return f"{place}.{field_name}{space}{rest}"
    return message if head.partition(".")[0] in sections or not place else f"{place}: {message}"


def check_finite(config: Any, where: str) -> None:
    """Refuse NaN and infinities anywhere in a dataclass or in plain data.

    Parameters
    ----------
    where : str
        What stands before the field in the message, such as ``train.dense.``.

    Raises
    ------
    ConfigError
        Naming the first such field.
    """
    for name, value in _entries(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}{name} is {value}, expected a finite number")
        check_finite(value, f"{where}{name}.")


def _entries(config: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(config):
        yield from ((entry.name, getattr(config, entry.name)) for entry in dataclasses.fields(config))
    elif isinstance(config, Mapping):
        yield from config.items()
    elif isinstance(config, list | tuple):
        yield from enumerate(config)


_SEEDS = 1 << 63


def check_seed(seed: int, field: str) -> None:
    """Refuse a seed that not every generator takes: negative ones, and those beyond 63 bits."""
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"{field} is {seed}, expected 0 to 2^63 - 1")


def check_directory(path: str, field: str) -> None:
    """Refuse a directory that cannot be StrataRec's own: ``.``, ``..``, ``/``, and what is no path at all."""
    if "\0" in path or Path(path).name in ("", ".."):
        raise ConfigError(f"{field} is {path!r}, expected the name of a directory of its own")
