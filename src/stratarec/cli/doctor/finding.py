"""What a doctor says of one thing."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """How something is, and what to change."""

    what: str
    said: str
    change: str = ""
    """Empty where nothing need be changed."""
    must: bool = True
    """Whether runs stop, or are wrong, until it is changed; else they are slower."""
