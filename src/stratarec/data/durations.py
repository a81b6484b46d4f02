"""Durations in text form, such as 90s, 1h and 2d."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import pydantic

from stratarec.errors import ConfigError

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_EXPECTED = "a duration such as 90s, 30m, 1h, 2d or 1w"
# A time of 64 bits minus a duration is then a number of 64 bits for all times since 1970.
_LONGEST = 1 << 62
PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
"""Time unit -> number of these units in a second, from the longest unit to the shortest."""


def _require_text(value: object) -> object:
    """Raise `ValueError` for a number or null in a recipe; other texts are refused where the unit
    is known.
    """
    if isinstance(value, str):
        return value
    advice = "; leave the field out for its default" if value is None else ""
    raise ValueError(f"got {'null' if value is None else repr(value)}, expected {_EXPECTED}{advice}")


Duration: TypeAlias = Annotated[str, pydantic.BeforeValidator(_require_text)]
"""Field of a recipe with the text of a duration; may be empty where the field allows it."""


def in_unit(text: str, unit: TimeUnit, field: str) -> int:
    """Parse a duration and return it in `unit`. Raises `ConfigError`, which names `field`, if it is
    no duration.
    """
    match = re.fullmatch(r"(\d+)\s*([smhdw])", str(text).strip())
    if not match or int(match[1]) == 0:
        raise ConfigError(f"{field} is {text!r}, expected {_EXPECTED}")
    length = int(match[1]) * _SECONDS[match[2]] * PER_SECOND[unit]
    if length >= _LONGEST:
        raise ConfigError(f"{field} is {text!r}, expected less than {_LONGEST:,} {unit}")
    return length


def as_text(length: int, unit: TimeUnit) -> str:
    """Format a duration in `unit` with its two largest units, such as 12d 9h; below a second, in
    `unit`.
    """
    seconds = length // PER_SECOND[unit]
    if not seconds:
        return f"{length} {unit}" if length else "0s"
    parts = []
    for name in ("d", "h", "m", "s"):
        count, seconds = divmod(seconds, _SECONDS[name])
        parts.append((count, name))
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{name}" for count, name in parts[first : first + 2] if count)
