"""Lengths of time as people write them: 90s, 1h, 2d."""

from __future__ import annotations

import re

from stratarec.data.schema import TimeUnit
from stratarec.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def seconds_in(unit: TimeUnit) -> float:
    """Seconds of one step of `unit`."""
    return 1 / _PER_SECOND[unit]


def readable(seconds: float) -> str:
    """A length of time by its two largest units: 2d 1h, 90 s as 1m 30s."""
    if seconds < 1:
        return f"{seconds:g}s"
    left, parts = int(seconds), []
    for name, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size}{name}")
            left %= size
    return " ".join(parts[:2])


def in_unit(text: str, unit: TimeUnit, field: str) -> int:
    """The duration `text` in `unit`; `ConfigError` naming `field` where it is none."""
    match = re.fullmatch(r"(\d+)\s*([smhdw])", str(text).strip())
    if not match or int(match[1]) == 0:
        raise ConfigError(f"{field} is {text!r}, expected a duration such as 90s, 30m, 1h, 2d or 1w")
    return int(match[1]) * _SECONDS[match[2]] * _PER_SECOND[unit]
