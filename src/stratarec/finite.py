"""Numbers of configurations are finite: NaN passes every comparison that refuses what is too small or too large."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from stratarec.errors import ConfigError


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
