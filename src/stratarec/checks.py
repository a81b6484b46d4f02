"""Checks of values that several configurations share."""

from __future__ import annotations

from pathlib import Path

from stratarec.errors import ConfigError

_SEEDS = 1 << 63


def check_seed(seed: int, field: str) -> None:
    """Refuse a seed that not every generator takes: negative ones, and those beyond 63 bits."""
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"{field} is {seed}, expected 0 to 2^63 - 1")


def check_directory(path: str, field: str) -> None:
    """Refuse a directory that cannot be StrataRec's own: ``.``, ``..``, ``/``, and what is no path at all."""
    if "\0" in path or Path(path).name in ("", ".."):
        raise ConfigError(f"{field} is {path!r}, expected the name of a directory of its own")
