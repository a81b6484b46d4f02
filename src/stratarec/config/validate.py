"""Validate plain data: describe pydantic's errors in one line, check values, and find the first
difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from stratarec.config.choices import Sections
from stratarec.errors import ConfigError

# Maximum number of characters of a value in a message.
_MAX_VALUE = 120
_TOO_LARGE = 1 << 63
_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_TAGS = ("union_tag_not_found", "union_tag_invalid")


def first_mistake(error: pydantic.ValidationError, content: Any, kind: Any) -> str:
    """Describe the first mistake in `content`, which is not a valid `kind`: the field, the expected
    values, the value.

    An unknown field is described before other mistakes, because they may follow from it. If a
    section refuses a value itself, this error is described before type errors of the same value.
    """
    errors = [(_place(one["loc"], content, one["type"]), one) for one in error.errors()]
    # If a value fits no member of a union, there is an error for each member. The error with the
    # longest path is most likely from the intended member.
    unknown = [entry for entry in errors if entry[1]["type"] in _UNKNOWN]
    first_place = (unknown or errors)[0][0]
    place, first = max(
        (entry for entry in unknown or errors if entry[0].startswith(first_place)),
        key=lambda entry: (len(entry[0]), entry[1]["type"] == "value_error"),
    )
    if first["type"] in _UNKNOWN:
        return f"{place}: unknown field; {_hint(str(first['loc'][-1]), _fields(kind, first['loc'][:-1]))}"
    if first["type"] in _TAGS:
        return _explain_kind(place, first["input"].get("kind"), [*_kinds(_at(kind, first["loc"]))])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return _in_place(message, place, first["input"], _fields(kind, ()))
    # pydantic uses the names of Python types; a recipe has lists and sections.
    section = "expected a section"
    words = {"tuple_type": "expected a list", "dataclass_type": section, "model_attributes_type": section}
    message = words.get(first["type"], message)
    if message == section and isinstance(first["input"], str) and "kind" in _fields(kind, first["loc"]):
        message = f"{section}, such as {place}.kind={short(first['input'])[1:-1]}"
    value = "" if first["type"] == "missing" else f", got {short(first['input'])}"
    return f"{place}: {message[0].lower()}{message[1:]}{value}"


def unsupported_value(content: Any) -> str:
    """Describe the first value that no field can hold, such as a number of over 64 bits; empty if
    there is none.
    """
    for place, value in _leaves(content, ""):
        if isinstance(value, int) and abs(value) >= _TOO_LARGE:
            return f"{place} is {short(value)}, expected a number of at most 64 bits"
        if isinstance(value, str) and "\0" in value:
            return f"{place} is {short(value)}, expected text without null characters"
    return ""


def boolean_as_number(content: Any, parsed: Any) -> str:
    """Describe the first boolean in `content` that became a number in `parsed`; empty if there is
    none.
    """
    leaves = dict(_leaves(parsed, ""))
    for place, value in _leaves(content, ""):
        if isinstance(value, bool) and not isinstance(leaves.get(place, value), bool):
            return f"{place} is {value}, expected a number"
    return ""


def short(value: Any) -> str:
    """Return the `repr` of a value, cut to a limited length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes at most some thousand digits
        return "a number with too many digits"
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _leaves(content: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _leaves(value, f"{where}[{number}]")
    else:
        yield where, content


def _hint(name: str, fields: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, fields, 1)
    return f"did you mean {close[0]}?" if close else f"known fields: {', '.join(fields)}"


def _explain_kind(place: str, name: Any, kinds: Sequence[str]) -> str:
    if name is None:
        return f"{place}.kind is missing, expected one of {', '.join(kinds)}"
    close = difflib.get_close_matches(str(name), kinds, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{place}.kind is {short(str(name))}, expected one of {', '.join(kinds)}{hint}"


def _fields(kind: Any, location: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of the section at `location`, which comes from a pydantic
    error.
    """
    section = _at(kind, location)
    members = [section, *_members(section)]
    return [
        entry.name
        for member in members
        if dataclasses.is_dataclass(member)
        for entry in dataclasses.fields(member)
    ]


def _at(kind: Any, location: Sequence[str | int]) -> Any:
    """Return the type at `location` from a pydantic error. Such a location names union members by
    kind or class.
    """
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
    if typing.get_origin(kind) is not typing.Annotated:
        return kind
    return next(
        (mark.union for mark in kind.__metadata__ if isinstance(mark, Sections)), typing.get_args(kind)[0]
    )


def _members(kind: Any) -> list[Any]:
    """Return the members of a union that are sections."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return [member for member in typing.get_args(kind) if dataclasses.is_dataclass(member)] if union else []


def _kinds(kind: Any) -> Iterator[str]:
    return (str(member.kind) for member in _members(kind))


def _place(location: Sequence[str | int], content: Any, kind: str) -> str:
    """Return the recipe's path for a location from a pydantic error, without the names of union
    members.
    """
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
    """Add the path of the field to a message that a section raised.

    Sections that occur in several places, such as schedules and optimizers, know only their field
    names.
    """
    head, space, tail = message.partition(" ")
    if place and head.startswith(f"{place}."):
        return message
    field_name = head.rpartition(".")[2]
    in_section = (
        isinstance(section, Mapping) and field_name in section and ("." in head or tail.startswith("is "))
    )
    elsewhere = "." in head and head.partition(".")[0] not in sections
    if place and (in_section or (elsewhere and field_name.isidentifier())):
        return f"{place}.{field_name}{space}{tail}"
    return message if head.partition(".")[0] in sections or not place else f"{place}: {message}"


def check_finite(config: Any, where: str) -> None:
    """Refuse NaN and infinities anywhere in a dataclass or in plain data.

    Parameters
    ----------
    where : str
        Prefix of the field in the message, such as ``train.dense.``.

    Raises
    ------
    ConfigError
        If there is one; the message names the first field.
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


def check_ranges(config: Any, where: str, **intervals: str) -> None:
    """Refuse numbers outside their intervals.

    Parameters
    ----------
    where : str
        Prefix of the field in the message, such as ``train.dense.``.
    intervals : str
        Interval of each field, such as ``[1, inf)`` or ``(0, 1]``. None is in every interval.

    Raises
    ------
    ConfigError
        If a number is NaN or outside; the message names the field, its value and the interval.
    """
    for name, interval in intervals.items():
        value = getattr(config, name)
        least, most = (float(limit) for limit in interval[1:-1].split(","))
        if value is None or (least < value < most) or (value, "[") == (least, interval[0]):
            continue
        if (value, "]") != (most, interval[-1]):
            limits = f"{'at least' if interval[0] == '[' else 'more than'} {least:g}"
            if most < math.inf:
                limits += f" and {'at most' if interval[-1] == ']' else 'less than'} {most:.15g}"
            limits = limits if math.isfinite(value) else f"a finite number of {limits}"
            raise ConfigError(f"{where}{name} is {value}, expected {limits}")


def check_choice(value: object, field: str, choices: Collection[str]) -> None:
    """Refuse a value that is not one of `choices`: Python callers may pass any value to a field."""
    if value not in choices:
        raise ConfigError(f"{field} is {value!r}, expected one of {', '.join(choices)}")


_SEEDS = 1 << 63


def check_seed(seed: int, field: str) -> None:
    """Refuse seeds that some generators do not accept: negative seeds and seeds with more than 63
    bits.
    """
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"{field} is {seed}, expected 0 to 2^63 - 1")


def check_directory(path: str, field: str) -> None:
    """Refuse a path that cannot be an owned directory: ``.``, ``..``, ``/``, and text with null
    characters.
    """
    if "\0" in path or Path(path).name in ("", ".."):
        raise ConfigError(f"{field} is {path!r}, expected the name of a new directory")


class _Absent(str):
    """Placeholder for the value of a missing key in a `Difference`. It equals an empty text."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First difference between two JSON values."""

    field: str
    """Path, such as ``split.test`` or ``schema.sparse[3].name``; empty if the values are not
    collections.
    """
    want: Any
    have: Any


def _names(items: Any) -> list[str] | None:
    """Return the names of a list of features or similar; None for anything else."""
    named = isinstance(items, list) and all(isinstance(item, Mapping) and "name" in item for item in items)
    return [str(item["name"]) for item in items] if named else None


def first_difference(want: Any, have: Any, field: str = "") -> Difference | None:
    """Return the first difference of two JSON values, in the order of the keys of `want`; None if
    they are equal.

    For lists of features, only the names that one of them lacks are returned. An empty text equals
    an absent value, which may have been written before the field existed.
    """
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        prefix = f"{field}." if field else ""
        pairs = [
            (f"{prefix}{key}", want.get(key, _ABSENT), have.get(key, _ABSENT)) for key in {**want, **have}
        ]
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = [(f"{field}[{index}]", *pair) for index, pair in enumerate(zip(want, have, strict=True))]
    else:
        expected, present = _names(want), _names(have)
        if expected is not None and present is not None and set(expected) != set(present):
            only = [
                [name for name in one if name not in other]
                for one, other in ((expected, present), (present, expected))
            ]
            return Difference(field=f"{field} (names that differ)", want=only[0], have=only[1])
        return None if want == have else Difference(field=field, want=want, have=have)
    differences = (first_difference(one, other, name) for name, one, other in pairs)
    return next((difference for difference in differences if difference is not None), None)
