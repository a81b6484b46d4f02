"""JSON files that say what lies beside them: sealed by a hash of their own, and read through a model of every field.

The seal tells damage and edits from what was written. It is no signature: whoever can write a file can seal it too, so
nothing that a sealed file says is used before its model has checked it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import pydantic

from stratarec.errors import DatasetError, StrataError
from stratarec.io.atomic import read_json, write_json

_SEAL = "hash"
# Characters of a value that a message repeats.
_LONGEST = 80

Hash = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
"""Of a file: xxh3_128, as `atomic.file_hash` gives it."""
Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 62)]
"""How many there are of something, or how many bytes it takes."""


class Model(pydantic.BaseModel):
    """A part of such a file: its fields and no others, each of its type, no number that is none."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return self.model_dump(mode="json", by_alias=True)


M = TypeVar("M", bound=pydantic.BaseModel)


def digest(content: Mapping[str, Any]) -> str:
    """Hash of JSON data; the order of keys does not matter."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON data with its own hash, atomically."""
    write_json(path, {**content, _SEAL: digest(content)})


def read_sealed(path: Path, model: type[M], advice: str, error: type[StrataError] = DatasetError) -> M:
    """What `write_sealed` wrote, as a `model`, whose field ``format`` is a literal.

    Parameters
    ----------
    advice : str
        What to do where the file is of no use; ends the message.
    error : type
        Raised where it is missing, changed, of another format or against its model; names file and field.
    """
    known = model.model_fields["format"].annotation.__args__[0]  # type: ignore[union-attr]
    return validated(model, unsealed(path, known, advice, error), str(path), advice, error)


def unsealed(path: Path, known: int, advice: str, error: type[StrataError] = DatasetError) -> dict[str, Any]:
    """What `write_sealed` wrote, of the format `known`; its fields are not checked."""
    content = read_object(path, advice, error)
    if content.get("format") != known or isinstance(content["format"], bool):
        raise error(f"{path}: format {_short(content.get('format'))}, expected {known}; {advice}")
    if content.pop(_SEAL, None) != digest(content):
        raise error(f"{path} was changed after it was written: its hash does not match; {advice}")
    return content


def validated(
    model: type[M], content: Mapping[str, Any], origin: str, advice: str, error: type[StrataError] = DatasetError
) -> M:
    """JSON data as a `model`; `error` names the first field that does not fit it."""
    try:
        # As JSON: a tuple is a list there, and nothing else is taken for another type.
        return model.model_validate_json(json.dumps(content))
    except (pydantic.ValidationError, StrataError) as fault:
        raise error(f"{origin}: {describe(fault)}; {advice}") from fault


def describe(error: Exception) -> str:
    """The first fault that pydantic found, or what one of our own errors says, in one line."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error") else f", got {_short(first['input'])}"
    return f"{place}: {message[0].lower()}{message[1:]}{got}" if place else f"{message}{got}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def read_object(path: Path, advice: str, error: type[StrataError] = DatasetError) -> dict[str, Any]:
    """The JSON object in a regular file of bounded size, reached through no link."""
    if path.is_symlink():
        raise error(f"cannot read {path}: it is a link, which may lead anywhere; {advice}")
    try:
        content = read_json(path)
    except DatasetError as fault:
        raise error(f"{fault}; {advice}") from fault
    if not isinstance(content, dict):
        raise error(f"{path}: expected an object, got {_short(content)}; {advice}")
    return content


def own_file(root: Path, relative: str) -> Path:
    """A file that a manifest in `root` names: a regular one below `root`, reached through no link.

    Raises
    ------
    ValueError
        When it is anything else, or absent.
    """
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{relative!r} lies outside {root}")
    path = root
    for part in parts.parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{path} is a link, expected what was written there")
    if not path.is_file():
        raise ValueError(f"{path} is {'no regular file' if path.exists() else 'missing'}")
    return path
