"""Where two JSON values differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class _Absent:
    """What stands for a key that is not there."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two values differ."""

    field: str
    """Its path, such as ``split.test`` or ``schema.sparse[3].name``; empty where the values are no collections."""
    want: Any
    have: Any


def first_difference(want: Any, have: Any, field: str = "") -> Difference | None:
    """Where `want` and `have` first differ, keys in the order of `want`; None when they are equal."""
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        pairs = [(_join(field, key), want.get(key, _ABSENT), have.get(key, _ABSENT)) for key in {**want, **have}]
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = [(f"{field}[{place}]", *each) for place, each in enumerate(zip(want, have, strict=True))]
    else:
        return None if want == have else Difference(field=field, want=want, have=have)
    found = (first_difference(mine, theirs, name) for name, mine, theirs in pairs)
    return next((difference for difference in found if difference is not None), None)


def _join(field: str, key: object) -> str:
    return f"{field}.{key}" if field else str(key)
