"""Search space of `stratarec tune`: recipe fields with their dimensions, such as ``field=uniform(0,
0.5)``.

uniform(LOW, HIGH)     a number in the range, uniform; a whole number for a field of whole numbers
log(LOW, HIGH)         a number in the range, with uniform logarithm
choice(A, B, ...)      one of the values, which may be lists: choice([64], [256, 64])
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratarec.config import yaml
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe, read_yaml, with_values

Values = Mapping[str, Any]
"""Field -> value."""

_FORM = re.compile(r"(uniform|log|choice)\((.*)\)", re.DOTALL)
_EXPECTED = "expected uniform(low, high), log(low, high) or choice(a, b, ...)"
# Fields that must be equal in all trials -> the reason.
_FIXED = {
    "name": "it names the recipe",
    "data": "all trials use one prepared data set",
    "distributed": "a study runs in one process",
    "train.run": "each trial has a separate run",
    "train.early_stopping.metric": "trials are compared by it",
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Interval of numbers from which a trial's value of a field is drawn."""

    low: float
    high: float
    """Largest number; it is included."""
    log: bool
    """Whether values are drawn on a logarithmic scale."""
    is_integer: bool
    """Whether values are integers."""

    def holds(self, value: Any) -> bool:
        """Whether `value` is a number in the interval, and an integer if `is_integer` is true."""
        kinds = int if self.is_integer else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Set of values from which a trial's value of a field is drawn."""

    values: tuple[str, ...]
    """The values as JSON."""

    def holds(self, value: Any) -> bool:
        """Whether `value` is in the set."""
        return value in self.values


Dimension = Range | Choice


@dataclass(frozen=True)
class Space:
    """Search space: fields in the order in which they were named."""

    dimensions: Mapping[str, Dimension]
    text: Mapping[str, str]
    """Field -> text of its dimension, for the files of the study."""

    @classmethod
    def read(cls, items: Sequence[str], content: Mapping[str, Any], origin: str) -> Space:
        """Read the space from files and ``field=...``, for the recipe `content` that was read from
        `origin`.

        Raises
        ------
        ConfigError
            For an invalid dimension, an unknown field, or values that the recipe would refuse.
        """
        text: dict[str, str] = {}
        for item in items:
            for field, form in _entries(item).items():
                if field in text:
                    raise ConfigError(f"--space names {field} twice: leave one of them out")
                text[field] = form
        return cls({field: _dimension(field, form, content, origin) for field, form in text.items()}, text)

    def recipe_values(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's value of each field, if the space contains this value. Values of
        choices are JSON text.
        """
        plain = Recipe.from_dict(dict(content)).to_dict()
        result = {
            field: json.dumps(_at(plain, field)) if isinstance(dimension, Choice) else _at(plain, field)
            for field, dimension in self.dimensions.items()
        }
        return {field: value for field, value in result.items() if self.dimensions[field].holds(value)}

    def values(self, params: Values) -> Values:
        """Convert `params`, in which choices are JSON, to the value of each field."""
        return {
            field: json.loads(params[field]) if isinstance(dimension, Choice) else params[field]
            for field, dimension in self.dimensions.items()
        }


def _entries(item: str) -> dict[str, str]:
    """Return field -> text of its dimension. `item` is ``field=...`` or the path of a file with
    several.
    """
    field, equals, form = item.partition("=")
    if equals and _FORM.fullmatch(form.strip()):
        return {field.strip(): form.strip()}
    if not Path(item).is_file():
        raise ConfigError(f"--space {item[:80]}: neither a file nor field=...; {_EXPECTED}")
    content = read_yaml(Path(item), "the space")
    if not isinstance(content, dict) or not all(
        isinstance(part, str) for part in (*content, *content.values())
    ):
        raise ConfigError(
            f"{item}: expected one line per field, such as train.batch_size: choice(1024, 4096)"
        )
    return content


def _dimension(field: str, form: str, content: Mapping[str, Any], origin: str) -> Dimension:
    for fixed, why in _FIXED.items():
        if field == fixed or field.startswith(f"{fixed}."):
            raise ConfigError(f"--space {field}: it cannot be searched: {why}")
    match = _FORM.fullmatch(form.strip())
    if match is None or "" in field.split("."):
        raise ConfigError(f"--space {field}: got {form[:80]!r}, {_EXPECTED}")
    kind, inside = match.groups()
    try:
        values = yaml.load(f"[{inside}]")
    except ValueError as error:
        raise ConfigError(f"--space {field}: {form[:80]!r} cannot be read: {error}") from error
    return (
        _choice(field, values, content, origin)
        if kind == "choice"
        else _range(field, kind, values, content, origin)
    )


def _choice(field: str, arguments: list[Any], content: Mapping[str, Any], origin: str) -> Choice:
    if not arguments:
        raise ConfigError(f"--space {field}: choice() has no values")
    values = tuple(
        dict.fromkeys(json.dumps(_checked(field, value, content, origin)) for value in arguments)
    )
    return Choice(values=values)


def _range(field: str, kind: str, arguments: list[Any], content: Mapping[str, Any], origin: str) -> Range:
    try:
        # YAML reads 1e-4 as text.
        low, high = (float(value) for value in arguments if not isinstance(value, bool))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--space {field}: {kind} requires two numbers, got {str(arguments)[:80]}"
        ) from error
    if not low < high or (kind == "log" and low <= 0):
        above = ", above 0" if kind == "log" else ""
        raise ConfigError(
            f"--space {field}: {kind}({low:g}, {high:g}), expected a lower and a higher number{above}"
        )
    ends = [_checked(field, int(end) if end.is_integer() else end, content, origin) for end in (low, high)]
    for end in ends:
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise ConfigError(f"--space {field} is not a number; list its values in choice(...)")
    return Range(
        low=low, high=high, log=kind == "log", is_integer=all(isinstance(end, int) for end in ends)
    )


def _checked(field: str, value: Any, content: Mapping[str, Any], origin: str) -> Any:
    """Return a value as the recipe stores it. Raises `ConfigError` if the recipe refuses it."""
    try:
        return _at(Recipe.from_dict(with_values(content, {field: value}), origin).to_dict(), field)
    except ConfigError as error:
        raise ConfigError(f"--space {field}: {error}") from error


def _at(content: Any, field: str) -> Any:
    for name in field.split("."):
        content = content[name]
    return content
