"""JSON files with a hash of their content (a seal), validated by a model with every field.

The seal detects damage and edits. It is not a signature: anyone who can write a file can also seal
it. So no content is used before its model has validated it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import pydantic

from stratarec.errors import UNREGISTERED, DatasetError, StrataError
from stratarec.io.atomic import read_json, write_json

_SEAL = "hash"
# Maximum number of characters of a value in a message.
_MAX_VALUE = 80

Hash = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
"""xxh3_128 hash of a file, as `atomic.file_hash` returns it."""
Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 62)]
"""Non-negative number, of items or of bytes."""


class Model(pydantic.BaseModel):
    """Part of a sealed file. Unknown fields, values of other types, NaN and infinities are
    refused.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return self.model_dump(mode="json", by_alias=True)


M = TypeVar("M", bound=pydantic.BaseModel)


def content_hash(content: Mapping[str, Any]) -> str:
    """Return a hash of JSON data; the order of keys does not matter."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON data together with its hash, atomically."""
    write_json(path, {**content, _SEAL: content_hash(content)})


def sealed_text(content: Mapping[str, Any]) -> str:
    """Return JSON data together with its hash as text."""
    return json.dumps({**content, _SEAL: content_hash(content)}, sort_keys=True, allow_nan=False)


def read_sealed(path: Path, model: type[M], advice: str, error: type[StrataError] = DatasetError) -> M:
    """Read a sealed file as a `model`, in which the field ``format`` is a literal.

    Parameters
    ----------
    advice : str
        End of an error message, which says what to do if the file cannot be used.
    error : type
        Raised if the file is missing, changed, of another format or invalid. The message names the
        file and the field.
    """
    return validate(model, read_unvalidated(path, _version(model), advice, error), str(path), advice, error)


def parse_sealed(
    text: bytes, origin: str, model: type[M], advice: str, error: type[StrataError] = DatasetError
) -> M:
    """Parse the content of a sealed file as `read_sealed` does. `origin` is the name of the file in
    messages.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise error(f"{origin} is damaged: not JSON ({fault}); {advice}") from fault
    if not isinstance(content, dict):
        raise error(f"{origin}: expected an object, got {_short(content)}; {advice}")
    return validate(
        model, _unsealed(content, _version(model), origin, advice, error), origin, advice, error
    )


def _version(model: type[pydantic.BaseModel]) -> int:
    version: int = model.model_fields["format"].annotation.__args__[0]  # type: ignore[union-attr]
    return version


def read_unvalidated(
    path: Path, version: int, advice: str, error: type[StrataError] = DatasetError
) -> dict[str, Any]:
    """Read a sealed file of format `known` without validating its fields."""
    return _unsealed(read_object(path, advice, error), version, str(path), advice, error)


def _unsealed(
    content: dict[str, Any], version: int, origin: str, advice: str, error: type[StrataError]
) -> dict[str, Any]:
    """Check format and seal of JSON data, and return the data without the seal."""
    number = content.get("format")
    if number != version or isinstance(number, bool):
        # `advice` may be to write the file again, which would lose what the newer version wrote.
        fault = newer_format(number, version) or f"format {_short(number)}, expected {version}; {advice}"
        raise error(f"{origin}: {fault}")
    if content.pop(_SEAL, None) != content_hash(content):
        raise error(f"{origin} was changed after it was written: its hash does not match; {advice}")
    return content


def newer_format(number: object, version: int) -> str:
    """Return an error message if format `number` of a file is newer than the known `version`; else
    an empty text.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number <= version:
        return ""
    return f"format {_short(number)}, which a newer version of StrataRec writes, expected {version}; upgrade StrataRec"


def validate(
    model: type[M],
    content: Mapping[str, Any],
    origin: str,
    advice: str,
    error: type[StrataError] = DatasetError,
) -> M:
    """Convert JSON data to a `model`; raise `error`, which names the first invalid field."""
    try:
        # The content is parsed as JSON, where strict mode converts lists to tuples, but no other
        # type.
        return model.model_validate_json(json.dumps(content))
    except (pydantic.ValidationError, StrataError) as fault:
        # Writing the file again would not help if a package is missing.
        is_registered = (
            not isinstance(fault, pydantic.ValidationError) or fault.errors()[0]["type"] != UNREGISTERED
        )
        raise error(f"{origin}: {describe_error(fault)}" + f"; {advice}" * is_registered) from fault


def describe_error(error: Exception) -> str:
    """Return the first problem that pydantic reports, or the message of any other error, in one
    line.
    """
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    value = (
        ""
        if first["type"] in ("missing", "value_error", UNREGISTERED)
        else f", got {_short(first['input'])}"
    )
    return f"{place}: {message[0].lower()}{message[1:]}{value}" if place else f"{message}{value}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def read_object(path: Path, advice: str, error: type[StrataError] = DatasetError) -> dict[str, Any]:
    """Read a JSON object from a regular file of bounded size; symbolic links are refused."""
    if path.is_symlink():
        raise error(f"cannot read {path}: it is a symbolic link, expected a file; {advice}")
    try:
        content = read_json(path)
    except DatasetError as fault:
        raise error(f"{fault}; {advice}") from fault
    if not isinstance(content, dict):
        raise error(f"{path}: expected an object, got {_short(content)}; {advice}")
    return content


def regular_file_below(root: Path, relative: str) -> Path:
    """Return the path of a regular file below `root` that a manifest names; symbolic links are not
    followed.

    Raises
    ------
    ValueError
        If there is no such file, if it is not a regular file, or if its path contains a symbolic
        link.
    """
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{relative!r} is outside {root}")
    path = root
    for part in parts.parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, expected the original file")
    if not path.is_file():
        raise ValueError(f"{path} is {'not a regular file' if path.exists() else 'missing'}")
    return path
