"""Putting one of our directories in the place of another: the earlier one stays until there is another to have.

It waits beside its place, where the next start finds it if this one is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from stratarec.errors import StorageError
from stratarec.io.atomic import storage_error, sync, sync_tree
from stratarec.io.lock import held
from stratarec.io.owned_directory import MARKER, Kind, check_replaceable, entries, kind_of, state


def remove(path: Path) -> None:
    """Delete a directory of ours, its marker last: what an interruption leaves is still known as ours."""
    empty(path)
    with _removing(path):
        shutil.rmtree(path)


def empty(path: Path) -> None:
    """Delete everything in a directory of ours but its marker."""
    with _removing(path):
        for entry in entries(path):
            if entry != MARKER:
                _delete(path / entry)


@contextlib.contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot remove {error.filename or path}: {reason}; remove {path} yourself") from error


def _delete(path: Path) -> None:
    # What lies behind a link is not ours.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def aside(path: Path) -> Path:
    """Where a directory waits while what takes its place is not yet whole."""
    return path.with_name(f".{path.name}.replaced")


def set_aside(path: Path, kind: Kind) -> Path:
    """Rename a directory that may be replaced; returns where it is now. `recover` undoes this or completes it."""
    check_replaceable(path, kind)
    old = aside(path)
    if old.exists():
        raise StorageError(f"cannot replace {path}: {old} is in the way; move it elsewhere")
    try:
        os.replace(path, old)
        sync(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    return old


def put_back(path: Path, kind: Kind) -> None:
    """Undo `set_aside`: what was begun in place of the earlier directory goes, and that one comes back."""
    if state(path, kind) == "ours":
        remove(path)
    try:
        os.replace(aside(path), path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def recover(path: Path, kind: Kind, stands: Callable[[Path], bool]) -> None:
    """Settle a replacement that was interrupted: it is finished if what is at `path` now `stands`, else undone."""
    old = aside(path)
    if kind_of(old) != kind.name:
        return
    with contextlib.ExitStack() as stack:
        for folder in (old, path):  # whoever is replacing it now holds both
            if kind_of(folder) == kind.name:
                stack.enter_context(held(folder))
        if path.exists() and stands(path):
            remove(old)
        else:
            put_back(path, kind)


def replace(temporary: Path, path: Path, kind: Kind) -> Path | None:
    """Put the finished directory `temporary` in the place of `path`; returns where an earlier one lies, to `remove`.

    Raises
    ------
    StorageError
        When `path` holds anything but an earlier directory of `kind`, or cannot be written. It is then as it was.
    """
    old = None
    with contextlib.ExitStack() as stack:
        try:
            sync_tree(temporary)
            if state(path, kind) == "ours":
                stack.enter_context(held(path))
                old = set_aside(path, kind)
            os.replace(temporary, path)
            sync(path.parent)
        except StorageError:
            raise
        except OSError as error:
            if old is not None and not path.exists():
                put_back(path, kind)
            raise storage_error(path, error) from error
    return old
