"""Fields of a source's section that bound the memory of reading it."""

from __future__ import annotations

from functools import partial

from pydantic import BeforeValidator

from stratarec.sizes import parse_bytes

LIMITS = ("max_line_bytes", "max_row_group_bytes")
"""They say whether a log is read, and nothing of what it becomes."""


def Size(field: str) -> BeforeValidator:
    """What makes text such as ``16MiB`` the bytes of `field`, where a recipe is read."""
    return BeforeValidator(partial(parse_bytes, field=field))


def set_size(config: object, name: str, field: str) -> None:
    """The same where the configuration is made in Python."""
    object.__setattr__(config, name, parse_bytes(getattr(config, name), field))
