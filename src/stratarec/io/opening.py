"""Opening files: temporary ones have names of their own and are locked while they are written, and what is read is a
file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import BinaryIO

# A file name has at most 255 bytes, and a character up to four.
_LONGEST_NAME = 50
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_SPECIAL = {
    stat.S_ISDIR: "Is a directory",
    stat.S_ISFIFO: "it is a pipe, which can be read only once",
    stat.S_ISSOCK: "it is a socket",
    stat.S_ISCHR: "it is a device",
    stat.S_ISBLK: "it is a device",
}


def temporary_name(path: Path) -> Path:
    """Where `path` is written before it is whole: a name beside it that no other writer has."""
    return path.with_name(f".{path.name[:_LONGEST_NAME]}.{secrets.token_hex(8)}.tmp")


def is_leftover(entry: str, patterns: Iterable[str] = ("*",)) -> bool:
    """Whether `entry` is a temporary name of something that one of `patterns` names."""
    found = _TEMPORARY.fullmatch(entry)
    return found is not None and any(fnmatchcase(found[1], pattern) for pattern in patterns)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and directories below `folder` whose writers were killed.

    What a process is writing is locked, and stays.
    """
    for inside, folders, names in os.walk(folder):
        for name in filter(is_leftover, names):
            _remove_unheld(Path(inside, name))
        for name in filter(is_leftover, folders):
            if not _is_held(path := Path(inside, name)):
                shutil.rmtree(path, ignore_errors=True)


def _remove_unheld(path: Path) -> None:
    with suppress(OSError), open_regular(path) as file:  # it is in use, or cannot be removed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def remove_leftovers_of(path: Path) -> None:
    """Delete temporary files of `path` itself whose writers were killed; those of others, and directories, stay."""
    for entry in _leftovers_of(path):
        if entry.is_file(follow_symlinks=False):
            _remove_unheld(Path(entry.path))


def leftover_directories(path: Path, *, locked: bool = False) -> list[Path]:
    """Temporary directories of `path` whose writers were killed; with `locked`, also those of running writers."""
    directories = [Path(entry.path) for entry in _leftovers_of(path) if entry.is_dir(follow_symlinks=False)]
    return [directory for directory in directories if locked or not _is_held(directory)]


def _leftovers_of(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path.parent) as entries:
            return [entry for entry in entries if is_leftover(entry.name, [escape(path.name[:_LONGEST_NAME])])]
    except OSError:
        return []


def hold_directory(path: Path) -> int:
    """A descriptor that tells others that somebody writes in a temporary directory, until it is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_held(path: Path) -> bool:
    """Whether a directory is locked; where there are no locks, it may be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def create(path: Path) -> BinaryIO:
    """A new file, open for writing and locked; `FileExistsError` for whatever is there already."""
    file = path.open("xb")
    # The lock tells a file that somebody writes from a leftover.
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading; `SpecialFileError` for what is none, and may never end or never begin."""
    _require_regular(path, os.stat(path).st_mode)  # opening a device may do something already
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except SpecialFileError:
        file.close()
        raise
    return file


class SpecialFileError(OSError):
    """A pipe, a device, a socket or a directory where a file was expected; `strerror` says which."""


def _require_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((text for test, text in _SPECIAL.items() if test(mode)), "it is no regular file")
        raise SpecialFileError(errno.EINVAL, f"{kind}, expected a file", str(path))
