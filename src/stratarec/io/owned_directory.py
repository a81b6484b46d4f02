"""Directories that StrataRec made, marked from their first moment, so that nothing else is ever replaced.

A marked directory holds `MARKER`, which says of what kind it is. It is the first file in it, also of a run that has
only just begun and of a data set that is only half prepared. Whatever has no marker, or holds something that is not of
its kind, is left as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import make_directory, read_json, storage_error, write_json
from stratarec.io.opening import is_leftover

MARKER = "stratarec.json"
HOLDER = ".holder.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of directory."""

    name: str
    """As its marker says it, and as messages do."""
    field: str
    """Of the recipe, that names such a directory."""
    content: tuple[str, ...]
    """What may lie in it: names or patterns of its entries."""


def named_directory(text: str | Path) -> Path:
    """The directory that a user named: what a link points at, and never a name such as ``.`` or ``..``."""
    path = Path(text)
    _working_directory()
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} has a character that no path can have; name another directory")
    if str(path).startswith("~"):
        raise StorageError(f"{path}: ~ is no home directory here; name the directory in full")
    try:
        # Other links on the way are left to the system: they need not be readable as paths.
        path = path.resolve() if path.is_symlink() or path.name in ("", "..") else path
    except (OSError, RuntimeError) as error:  # a circle of links
        raise StorageError(f"cannot use {path}: its links lead nowhere; name another directory") from error
    if not path.name:
        raise StorageError(f"{path} is the root directory: name a directory of its own")
    return path


def kind_of(path: Path) -> str:
    """The kind that the marker in `path` says; empty where there is none."""
    try:
        found = read_json(path / MARKER)
    except DatasetError:  # absent or damaged
        return ""
    kind = found.get("kind") if isinstance(found, dict) and found.get("format") == FORMAT else ""
    return kind if isinstance(kind, str) else ""


def state(path: Path, kind: Kind) -> Literal["free", "ours"]:
    """Whether `path` is free for a new directory of `kind` (absent or empty) or is one already.

    Raises
    ------
    StorageError
        When it is anything else: a file, a place of its own such as a home directory, a directory of another kind or of
        somebody else, or a part of one of ours.
    """
    try:
        found = entries(path)
    except FileNotFoundError:
        found = []
    except OSError as error:
        if path.is_file():
            raise StorageError(
                f"cannot write {path}: it is a file, expected a directory or nothing; name another {kind.field}"
            ) from error
        raise storage_error(path, error) from error
    if not found:
        _check_place(path, kind)
        return "free"
    marked = kind_of(path)
    if marked == kind.name:
        return "ours"
    if marked:
        raise StorageError(f"{path} is a {marked}, expected a {kind.name}; name another {kind.field}")
    _check_place(path, kind)
    raise StorageError(
        f"{path} is no {kind.name} of StrataRec (it holds {found[0]} and no {MARKER}) and is left as it is; "
        f"name another {kind.field}"
    )


def check_replaceable(path: Path, kind: Kind) -> None:
    """Refuse to replace what `path` holds unless it is nothing, or a directory of `kind` and nothing besides."""
    if state(path, kind) == "free":
        return
    _check_place(path, kind)
    ours = [MARKER, *kind.content]
    for entry in entries(path):
        # Writes that never finished leave files of ours, too.
        if not any(fnmatch(entry, pattern) for pattern in ours) and not is_leftover(entry, ours):
            raise StorageError(
                f"{path} also holds {entry}, which is no part of a {kind.name}: move it away, or name another "
                f"{kind.field}"
            )


def entries(path: Path) -> list[str]:
    """What lies in `path`, leftovers of a write that never finished aside."""
    return sorted(entry for entry in os.listdir(path) if entry != HOLDER and not is_leftover(entry, (MARKER, HOLDER)))


def _check_place(path: Path, kind: Kind) -> None:
    """Refuse directories that are more than a directory of ours, and parts of directories of ours."""
    for place, what in _places():
        if _is_same(path, place):
            raise StorageError(f"{path} is {what}: name a directory of its own in {kind.field}")
    if _is_mount(path):
        raise StorageError(f"{path} is where a file system is mounted: name a directory in it in {kind.field}")
    for parent in Path(os.path.abspath(path)).parents:
        found = kind_of(parent)
        if found:
            raise StorageError(f"{path} lies inside {parent}, which is a {found}; name another {kind.field}")


def _places() -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path.home(), "your home directory"
    here = _working_directory()
    yield here, "the working directory"
    for parent in here.parents:
        yield parent, "a parent of the working directory"


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise StorageError("the working directory is gone; change to one that exists") from error


def _is_mount(path: Path) -> bool:
    try:
        return path.stat().st_dev != (path / "..").stat().st_dev
    except OSError:  # absent
        return False


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is absent
        return False


def claim(path: Path, kind: Kind) -> None:
    """Make `path` a directory of `kind`, if it is free; else see `state`."""
    if state(path, kind) == "free":
        make_directory(path)
        mark(path, kind)


def mark(path: Path, kind: Kind) -> None:
    """Write the marker of a directory that is ours already by being new."""
    write_json(path / MARKER, _marker(kind))


def check_marker(path: Path, kind: Kind) -> None:
    """`DatasetError` where the marker of a directory is not to the letter what `mark` writes."""
    if read_json(path / MARKER) != _marker(kind):
        raise DatasetError(f"{path / MARKER} was changed after it was written; expected {json.dumps(_marker(kind))}")


def _marker(kind: Kind) -> dict[str, object]:
    about = f"A {kind.name} of StrataRec, which replaces this directory when it is told to overwrite it."
    return {"kind": kind.name, "format": FORMAT, "about": about}
