"""Files and directories that are complete or absent: written under a temporary name, synced and
renamed.

A temporary file or directory is locked while it is written. If it is not locked, a killed process
left it behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import polars as pl
import xxhash

from stratarec.errors import DatasetError, StorageError

LARGEST_JSON = 1 << 28
"""Largest JSON file that is read, in bytes. The description of a million row groups takes a tenth
of this size.
"""
# A file name has at most 255 bytes, and a character takes up to four bytes.
_MAX_NAME = 50
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPECIAL = {
    stat.S_ISDIR: "Is a directory",
    stat.S_ISFIFO: "it is a pipe, which can be read only once",
    stat.S_ISSOCK: "it is a socket",
    stat.S_ISCHR: "it is a device",
    stat.S_ISBLK: "it is a device",
}


def storage_error(path: Path, error: OSError | pl.exceptions.PolarsError) -> StorageError:
    """Return a `StorageError` whose message names the path and the reason, and says what to do."""
    reason = getattr(error, "strerror", None) or str(error).rpartition("IO error: ")[2]
    if getattr(error, "errno", None) == errno.ENOTDIR:
        file = next((parent for parent in path.parents if parent.is_file()), path)
        return StorageError(
            f"cannot write {path}: {file} is a file, expected a directory; name another path"
        )
    is_full = getattr(error, "errno", None) in (None, *_FULL)
    other = (
        "set TMPDIR to another directory" if path == Path(tempfile.gettempdir()) else "name another path"
    )
    return StorageError(f"cannot write {path}: {reason}; {'free space or ' if is_full else ''}{other}")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert errors of the operating system inside the context to a `StorageError` that names
    `path`.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error


def check_output(path: Path, *endings: str) -> None:
    """Check that `path` can be an output file, before any work is done for it.

    Parameters
    ----------
    endings : str
        Allowed endings of the name, such as ``.csv``, in lower case; by default any.

    Raises
    ------
    StorageError
        If `path` is a directory, is below a file, cannot be written, or has another ending.
    """
    try:
        is_directory = path.name in ("", "..") or stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_directory = False
    except (OSError, ValueError) as error:  # a name that is too long, or with a null character
        raise StorageError(
            f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if is_directory:
        raise StorageError(
            f"cannot write {path}: it is a directory; name a file, such as {path / 'output'}"
        )
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise StorageError(
            f"cannot write {path}: {parent} is a file, expected a directory; name another path"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {path}: no permission to write in {parent}; name another path")
    if endings and not path.name.lower().endswith(endings):
        raise StorageError(f"cannot write {path}: the name must end in {' or '.join(endings)}")


def check_absent(path: Path, *endings: str) -> None:
    """Refuse an output file that exists, as it may be the user's work; otherwise do the checks of
    `check_output`.
    """
    if os.path.lexists(path):
        raise StorageError(f"cannot write {path}: it exists; remove it, or name another --output")
    check_output(path, *endings)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files and directories below `folder` to the device."""
    for inside, _, names in os.walk(folder):
        for name in names:
            sync(Path(inside, name))
        sync(Path(inside))


def write_atomic(path: Path, write: Callable[[BinaryIO], object], *, synced: bool = True) -> None:
    """Pass a new temporary file next to `path` to `write`, then sync the file and rename it to
    `path`.

    If `synced` is false, the caller must sync the directory later, see `sync_tree`.

    Raises
    ------
    StorageError
        If the file cannot be written; `path` is then unchanged.
    """
    check_output(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)  # assigned before the file exists: a signal may come in between
        with create_locked(temporary) as file:
            write(file)
            file.flush()
            if synced:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        temporary = None
        if synced:
            sync(path.parent)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise storage_error(path, error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically.

    Raises
    ------
    ValueError
        For NaN and infinities, which JSON cannot represent; use None instead.
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically."""
    write_atomic(path, lambda file: file.write(text.encode()))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_json(path: Path) -> Any:
    """Return the JSON value in a file. Raises `DatasetError` if the file is damaged or missing."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON:
                raise DatasetError(
                    f"cannot read {path}: it has {size:,} bytes, expected at most {LARGEST_JSON:,}"
                )
            return json.loads(file.read(size).decode(), parse_constant=_refuse_constant)
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DatasetError(f"{path} is damaged: not JSON ({reason})") from error


def read_frame(path: Path) -> pl.DataFrame:
    """Read one Parquet file. Characters such as ``*`` in its name are not wildcards."""
    with open_regular(path) as file:
        return pl.read_parquet(file)


@contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Convert errors caused by the content of `path` to a `DatasetError` that names the file."""
    try:
        yield
    except DatasetError:
        raise
    # pyarrow's errors are ValueError, TypeError, KeyError or OSError.
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        pl.exceptions.PolarsError,
    ) as error:
        raise DatasetError(
            f"{path} is damaged or of another version ({' '.join(str(error).split())})"
        ) from error


def cache_directory() -> Path:
    """Return the user's directory for data that can be recomputed. Raises `RuntimeError` if the
    user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stratarec"


def make_directory(path: Path) -> None:
    """Create `path` and its parents. Raises `StorageError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), path)
        raise StorageError(f"cannot write {path}: {file} is a file, expected a directory") from error
    except OSError as error:
        raise storage_error(path, error) from error


def rename_directory(temporary: Path, final: Path) -> None:
    """Sync everything in `temporary` and rename it to `final`; `StorageError` if `final` exists and
    is not empty.
    """
    with storage_errors(final):
        sync_tree(temporary)
        os.rename(temporary, final)
        sync(final.parent)


@contextmanager
def working_directory(final: Path, parts: Collection[str]) -> Iterator[Path]:
    """Create a locked directory next to `final`, and remove it at the end unless it was renamed.

    Working directories that killed processes left behind are removed first, see
    `remove_working_directories`.
    """
    remove_working_directories(final, parts)
    work, descriptor = temporary_name(final), None
    make_directory(final.parent)
    try:
        with storage_errors(final):
            work.mkdir()
        descriptor = lock_directory(work)
        yield work
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(work, ignore_errors=True)


def remove_working_directories(final: Path, parts: Collection[str]) -> list[Path]:
    """Delete working directories of `final` that killed processes left behind; return the
    directories that remain.

    A directory with entries other than `parts`, complete or temporary, belongs to a user and
    remains.
    """
    for folder in leftover_directories(final):
        with suppress(OSError):
            if all(entry in parts or is_leftover(entry, parts) for entry in os.listdir(folder)):
                shutil.rmtree(folder, ignore_errors=True)
    return leftover_directories(final, locked=True)


def remove_tree(path: Path) -> None:
    """Delete as much of a directory as possible; do nothing if `path` is not a directory."""
    # rmtree opens its argument. Opening a pipe would wait for a writer.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def replace_directory(temporary: Path, final: Path) -> None:
    """Sync everything in `temporary` and rename it to `final`; an older `final` is removed at the
    end.

    This is for directories inside an owned directory. For a directory that a user named, use
    `owned_directory.replace_directory_at`.
    """
    old = final.with_name(f".{final.name}.old")
    with storage_errors(final):
        sync_tree(temporary)
        remove_tree(old)
        if final.exists():
            os.replace(final, old)
        os.replace(temporary, final)
        sync(final.parent)
    remove_tree(old)


def file_hash(path: Path) -> str:
    """Return the xxh3_128 hash of a file in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def temporary_name(path: Path) -> Path:
    """Return an unused path next to `path`, for content that is renamed to `path` when it is
    complete.
    """
    return path.with_name(f".{path.name[:_MAX_NAME]}.{secrets.token_hex(8)}.tmp")


def is_leftover(entry: str, patterns: Iterable[str] = ("*",)) -> bool:
    """Whether `entry` is a temporary name, and the final name in it matches one of `patterns`."""
    match = _TEMPORARY.fullmatch(entry)
    return match is not None and any(fnmatchcase(match[1], pattern) for pattern in patterns)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and directories below `folder` that are not locked. Their writers were
    killed.
    """
    for inside, folders, names in os.walk(folder):
        for name in filter(is_leftover, names):
            _remove_unlocked(Path(inside, name))
        for name in filter(is_leftover, folders):
            if not is_locked(path := Path(inside, name)):
                shutil.rmtree(path, ignore_errors=True)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError), open_regular(path) as file:  # it is in use, or cannot be removed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def remove_leftovers_of(path: Path) -> None:
    """Delete temporary files of `path` whose writers were killed; directories and other files
    remain.
    """
    for entry in _leftovers_of(path):
        if entry.is_file(follow_symlinks=False):
            _remove_unlocked(Path(entry.path))


def leftover_directories(path: Path, *, locked: bool = False) -> list[Path]:
    """Return temporary directories of `path` whose writers were killed, and of running writers if
    `locked`.
    """
    folders = [Path(entry.path) for entry in _leftovers_of(path) if entry.is_dir(follow_symlinks=False)]
    return [folder for folder in folders if locked or not is_locked(folder)]


def _leftovers_of(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path.parent) as entries:
            return [entry for entry in entries if is_leftover(entry.name, [escape(path.name[:_MAX_NAME])])]
    except OSError:
        return []


def lock_directory(path: Path) -> int:
    """Lock a temporary directory. Return a file descriptor; closing it unlocks the directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a directory is locked. True if it is not certain, as on a file system without
    locks.
    """
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


def create_locked(path: Path) -> BinaryIO:
    """Create a file, lock it, and open it for writing. Raises `FileExistsError` if `path`
    exists.
    """
    file = path.open("xb")
    # The file is locked, because another process would otherwise consider it left behind, and
    # delete it.
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Raises `SpecialFileError` for others, such as a pipe, which
    may never end.
    """
    _require_regular(path, os.stat(path).st_mode)  # before opening it, which may have an effect on a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except SpecialFileError:
        file.close()
        raise
    return file


class SpecialFileError(OSError):
    """Raised if a path that should be a file is a pipe, device, socket or directory; `strerror`
    says which.
    """


def _require_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((text for test, text in _SPECIAL.items() if test(mode)), "it is not a regular file")
        raise SpecialFileError(errno.EINVAL, f"{kind}, expected a file", str(path))
