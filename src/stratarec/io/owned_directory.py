"""Directories that StrataRec owns: recognize, lock and replace them.

An owned directory contains the file `MARKER`, which names its kind. The marker is written first, so
that an unfinished run or data set is also recognized. A directory is never changed if it has no
marker, or if it has files that do not belong to its kind.

Only one process at a time writes in an owned directory; any number may read. This is ensured by a
file lock on the marker, which the system releases when the process ends.

While a directory is replaced, the earlier directory is kept next to it under another name. If the
process is killed, the next start finds the earlier directory there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Literal

from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import (
    is_leftover,
    make_directory,
    open_regular,
    read_json,
    storage_error,
    storage_errors,
    sync,
    sync_tree,
    write_json,
)
from stratarec.io.sealed import newer_format

MARKER = "stratarec.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class DirectoryKind:
    """Kind of content of an owned directory, such as a data set or a run, as its marker records
    it.
    """

    name: str
    """Name in the marker and in messages."""
    field: str
    """Recipe field or command-line option with which a user names such a directory."""
    content: tuple[str, ...]
    """Names or patterns of the entries that such a directory may have."""


def named_directory(text: str | Path) -> Path:
    """Return the path of a directory that a user named. A link and a name such as ``.`` or ``..``
    are resolved.
    """
    path = Path(text)
    try:
        Path.cwd()
    except OSError as error:
        raise StorageError("the working directory was deleted; change to one that exists") from error
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} contains a null character; name another directory")
    if str(path).startswith("~"):
        raise StorageError(f"{path}: ~ is not expanded here; write the directory in full")
    try:
        # Only the last part is resolved: parent directories need not be readable as paths.
        path = path.resolve() if path.is_symlink() or path.name in ("", "..") else path
        # From Python 3.13 on, `resolve` returns a circle of links; before, it raises an error.
        if path.is_symlink():
            raise RuntimeError(f"{path} is part of a circle of links")
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot use {path}: its links lead nowhere; name another directory") from error
    if not path.name:
        raise StorageError(f"{path} is the root directory; name a subdirectory")
    return path


def kind_of(path: Path) -> str:
    """Return the kind that the marker in `path` names; empty if there is no valid marker.

    Raises `StorageError` if a newer version wrote the marker.
    """
    try:
        marker = read_json(path / MARKER)
    except DatasetError:  # absent or damaged
        return ""
    if isinstance(marker, dict) and (fault := newer_format(marker.get("format"), FORMAT)):
        raise StorageError(f"{path / MARKER}: {fault}")
    kind = marker.get("kind") if isinstance(marker, dict) and marker.get("format") == FORMAT else ""
    return kind if isinstance(kind, str) else ""


def directory_state(path: Path, kind: DirectoryKind) -> Literal["free", "ours"]:
    """Return "free" if `path` is absent or empty, or "ours" if it is a directory of `kind`.

    Raises
    ------
    StorageError
        If `path` is a file, a directory of another kind or without a marker, or inside an owned
        directory.
    """
    try:
        names = list_entries(path)
    except FileNotFoundError:
        names = []
    except OSError as error:
        if path.is_file():
            raise StorageError(
                f"cannot write {path}: it is a file, expected a directory or nothing; "
                f"name another {kind.field}"
            ) from error
        raise storage_error(path, error) from error
    if not names:
        _check_place(path, kind)
        return "free"
    marked = kind_of(path)
    if marked == kind.name:
        return "ours"
    if marked:
        raise StorageError(f"{path} is a {marked}, expected a {kind.name}; name another {kind.field}")
    _check_place(path, kind)
    raise StorageError(
        f"{path} is not a {kind.name} of StrataRec (it contains {names[0]} and no {MARKER}) and was not "
        f"changed; name another {kind.field}"
    )


def check_replaceable(path: Path, kind: DirectoryKind) -> None:
    """Raise `StorageError` unless `path` is free, or is a directory of `kind` that contains only
    files of this kind.
    """
    if directory_state(path, kind) == "free":
        return
    _check_place(path, kind)
    patterns = [MARKER, *kind.content]
    for entry in list_entries(path):
        # Temporary files that interrupted writes left behind belong to the directory, too.
        if not any(fnmatch(entry, pattern) for pattern in patterns) and not is_leftover(entry, patterns):
            raise StorageError(
                f"{path} also contains {entry}, which is not part of a {kind.name}: move it elsewhere, or "
                f"name another {kind.field}"
            )


def list_entries(path: Path) -> list[str]:
    """Return the sorted names in `path`, without temporary files of the marker that an interrupted
    write left.
    """
    return sorted(name for name in os.listdir(path) if not is_leftover(name, (MARKER,)))


def _check_place(path: Path, kind: DirectoryKind) -> None:
    """Raise `StorageError` if `path` is inside an owned directory."""
    for parent in Path(os.path.abspath(path)).parents:
        if name := kind_of(parent):
            raise StorageError(f"{path} is inside {parent}, which is a {name}; name another {kind.field}")


def claim(path: Path, kind: DirectoryKind) -> None:
    """If `path` is free, create a directory of `kind` there. Raises the same errors as
    `directory_state`.
    """
    if directory_state(path, kind) == "free":
        make_directory(path)
        write_marker(path, kind)


def write_marker(path: Path, kind: DirectoryKind) -> None:
    """Write the marker of a directory of this `kind` into the new directory `path`."""
    write_json(path / MARKER, _marker(kind))


def check_marker(path: Path, kind: DirectoryKind) -> None:
    """Raise `DatasetError` unless the marker in `path` is exactly what `write_marker` writes for
    this `kind`.
    """
    content = read_json(path / MARKER)
    kind_of(path)  # refuses the marker of a newer version
    if content != _marker(kind):
        raise DatasetError(
            f"{path / MARKER} was changed after it was written; expected {json.dumps(_marker(kind))}"
        )


def _marker(kind: DirectoryKind) -> dict[str, object]:
    # The text is part of the format: markers of existing directories have it.
    about = f"A {kind.name} of StrataRec, which replaces this directory when it is told to overwrite it."
    return {"kind": kind.name, "format": FORMAT, "about": about}


@contextlib.contextmanager
def directory_lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock an owned directory against writers in other processes.

    Parameters
    ----------
    path : Path
        The directory.
    shared : bool
        Whether to lock for reading only, which allows other readers.

    Raises
    ------
    StorageError
        If another process, or another part of this process, has the lock. If possible, the message
        names the process.
    """
    try:
        file = open_regular(path / MARKER)
    except FileNotFoundError as error:
        raise _in_use(path) from error
    except OSError as error:
        raise storage_error(path, error) from error
    with file:
        if not try_lock(file, shared=shared) or not _is_open(path / MARKER, file):
            # Another process has the lock, or had the lock and has replaced or removed the
            # directory.
            raise _in_use(path)
        yield


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Try to lock an open file. False if another process has the lock; True also if the file system
    has no locks.

    `shared` locks for reading only, which allows other readers.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _in_use(path: Path) -> StorageError:
    who = "another process or trainer"
    with contextlib.suppress(OSError):
        lock = f":{(path / MARKER).stat().st_ino}"
        # Lines are like ``1: FLOCK ADVISORY WRITE 4242 08:01:131078 0 EOF``. Locks of other hosts
        # are not listed.
        lines = map(str.split, Path("/proc/locks").read_text().splitlines())
        who = next(
            (f"process {line[4]}" for line in lines if line[1] == "FLOCK" and line[5].endswith(lock)), who
        )
    return StorageError(f"{path} is in use by {who}, which reads or writes it: wait for it, or end it")


def _is_open(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def remove_directory(path: Path) -> None:
    """Delete an owned directory. The marker is deleted last, so an interrupted deletion leaves an
    owned directory.
    """
    clear_directory(path)
    with _removing(path):
        shutil.rmtree(path)


def clear_directory(path: Path) -> None:
    """Delete everything in the owned directory `path` except its marker."""
    with _removing(path):
        for entry in (path / name for name in list_entries(path) if name != MARKER):
            if entry.is_dir() and not entry.is_symlink():  # the target of a link is not ours
                shutil.rmtree(entry)
            else:
                entry.unlink()


@contextlib.contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"cannot remove {error.filename or path}: {reason}; remove {path} yourself"
        ) from error


def replaced_path(path: Path) -> Path:
    """Return the path at which the earlier directory is kept until its replacement is complete."""
    return path.with_name(f".{path.name}.replaced")


def move_aside(path: Path, kind: DirectoryKind) -> Path:
    """Check that the directory `path` is of this `kind` and may be replaced, rename it, and return
    its new path.

    If the process ends before the replacement is complete, `recover_replacement` completes or
    undoes it later.
    """
    check_replaceable(path, kind)
    old = replaced_path(path)
    if old.exists():
        raise StorageError(f"cannot replace {path}: {old} exists; move it elsewhere")
    with storage_errors(path):
        os.replace(path, old)
        sync(path.parent)
    return old


def restore_replaced(path: Path, kind: DirectoryKind) -> None:
    """Undo `move_aside`: delete the unfinished replacement, and rename the earlier directory
    back.
    """
    if directory_state(path, kind) == "ours":
        remove_directory(path)
    with storage_errors(path):
        os.replace(replaced_path(path), path)
        sync(path.parent)


def recover_replacement(path: Path, kind: DirectoryKind, is_complete: Callable[[Path], bool]) -> None:
    """Finish an interrupted replacement, if there is one: complete it or undo it.

    Parameters
    ----------
    path : Path
        Directory that was being replaced.
    kind : DirectoryKind
        Kind of the directory.
    is_complete : callable
        Whether the new directory is complete. If it is not, the earlier one is renamed back.
    """
    old = replaced_path(path)
    if kind_of(old) != kind.name:
        return
    with contextlib.ExitStack() as stack:
        for folder in (old, path):  # a process that is replacing the directory right now has locked both
            if kind_of(folder) == kind.name:
                stack.enter_context(directory_lock(folder))
        if path.exists() and is_complete(path):
            remove_directory(old)
        else:
            restore_replaced(path, kind)


def replace_directory_at(temporary: Path, path: Path, kind: DirectoryKind) -> Path | None:
    """Rename the finished directory `temporary` to `path`.

    Returns the new path of the earlier directory, which the caller has to remove, or None if there
    was none.

    Raises
    ------
    StorageError
        If `path` exists and is not a directory of `kind`, or if it cannot be written. It is then
        unchanged.
    """
    old = None
    with contextlib.ExitStack() as stack:
        try:
            sync_tree(temporary)
            if directory_state(path, kind) == "ours":
                stack.enter_context(directory_lock(path))
                old = move_aside(path, kind)
            os.replace(temporary, path)
            sync(path.parent)
        except StorageError:
            raise
        except OSError as error:
            if old is not None and not path.exists():
                restore_replaced(path, kind)
            raise storage_error(path, error) from error
    return old
