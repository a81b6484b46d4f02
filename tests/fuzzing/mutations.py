"""Change fields of manifests, which are sealed again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzzing.seals import seal

Place = tuple[str | int, ...]

_MISSING = object()
_TEXT = "x" * 100_000
_VALUES: tuple[Any, ...] = (
    None, _MISSING, -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**61, 2**62, 2**63, 2**64, 10**400, float("nan"), float("inf"),
    -float("inf"), 5e-324, 1.7e308, True, False, "", _TEXT, "../x", "/etc/passwd", "\0", "a\n\x1b[31mb", "\ud800", [],
    {}, [[]], {"": None},
)  # fmt: skip


def files(path: Path) -> list[Path]:
    """Return all files of an artifact except curves."""
    return sorted(file for file in path.rglob("*") if file.is_file() and "tensorboard" not in file.parts)


def change_field(path: Path, draws: random.Random, file: Path | None = None) -> str:
    """Change a field of the given manifest, or of a random one, and seal it again.

    Return a description of the change.
    """
    file = file or draws.choice([file for file in files(path) if file.suffix == ".json"])
    return _changed(path, file, draws, lambda value: True, _put)


def change_number(path: Path, draws: random.Random, file: Path) -> str:
    """Change a number, like `change_field`."""
    return _changed(path, file, draws, lambda value: type(value) in (int, float), _put_number)


def _changed(
    path: Path, file: Path, draws: random.Random, accepts: Callable[[Any], bool], put: Callable[..., str]
) -> str:
    content = json.loads(file.read_text())
    # A field in a list of a thousand entries is drawn as often as a single field.
    kinds: dict[Place, list[Place]] = {}
    for place in (place for place in _places(content) if accepts(_at(content, place))):
        kinds.setdefault(tuple("*" if isinstance(part, int) else part for part in place), []).append(place)
    if not kinds:
        return ""
    place = draws.choice(kinds[draws.choice(sorted(kinds))])
    if place == ("hash",):
        return ""
    description = put(content, place, draws)
    seal(file, content)
    return f"field {file.relative_to(path)} {'.'.join(map(str, place))} {description}"


def _places(content: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    entries = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in entries:
        yield from _places(value, (*place, key))


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content


def _put_number(content: Any, place: Place, draws: random.Random) -> str:
    inside = _at(content, place[:-1])
    now = inside[place[-1]]
    whole = (
        -1,
        0,
        1,
        2,
        2**16,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**48 - 1,
        2**53,
        2**61,
        2**62 - 1,
        2**63 - 1,
        2**63,
    )
    near = (now + 1, now - 1, now * 2, -now, now // 2, now + 2**32)
    values = (
        (*near, *near, *whole)
        if isinstance(now, int)
        else (0.0, -1.0, 1e-300, 5e-324, 1e38, 1e300, 1e308, -now)
    )
    inside[place[-1]] = draws.choice(values)
    return repr(inside[place[-1]])


def _put(content: Any, place: Place, draws: random.Random) -> str:
    """Set a field to another value and return a description."""
    parent = {"": content}
    inside: Any = parent
    for part in ("", *place)[:-1]:
        inside = inside[part]
    key = place[-1] if place else ""
    value = draws.choice([*_VALUES, *_neighbours(inside[key], draws)])
    if value is _MISSING:
        del inside[key]
        return "missing"
    if draws.random() < 0.05:
        value = _nested(draws.choice((5, 190, *range(900, 1000, 5))))
    elif draws.random() < 0.05 and isinstance(inside[key], dict):
        inside[key]["more"] = value
        return "an extra key"
    inside[key] = value
    if not place:
        return "another value of all"
    return repr(value)[:60] if not isinstance(value, list) else f"a list of {len(value)}"


def _neighbours(value: Any, draws: random.Random) -> list[Any]:
    """Return other values of the same type."""
    if isinstance(value, bool):
        return [not value] * 4
    if isinstance(value, int):
        return [
            value + 1,
            value - 1,
            -value,
            value * 2,
            float(value),
            str(value),
            value + 2**32,
            draws.getrandbits(40),
        ]
    if isinstance(value, float):
        return [value * 2, -value, value + 1e-3, int(value), str(value)]
    if isinstance(value, str):
        return [
            value + "x",
            value[:-1],
            value[::-1],
            f"../{value}",
            f"/{value}",
            value.upper(),
            f"{value}\n",
        ]
    if isinstance(value, list) and value:
        shuffled = draws.sample(value, len(value))
        return [value + value, [*value, value[-1]], value[:-1], value[1:], value[::-1], shuffled]
    if isinstance(value, dict) and value:
        first, last = next(iter(value)), list(value)[-1]
        swapped = {**value, first: value[last], last: value[first]}
        return [swapped, {f"{key}x": each for key, each in value.items()}, {first: value[first]}]
    return []


def _nested(depth: int) -> list[Any]:
    results: list[Any] = []
    for _ in range(depth):
        results = [results]
    return results
