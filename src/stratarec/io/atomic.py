"""Outputs that are whole or absent: written to a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import polars as pl
import xxhash

from stratarec.errors import DatasetError, StorageError
from stratarec.io.opening import (
    create,
    hold_directory,
    is_leftover,
    leftover_directories,
    open_regular,
    temporary_name,
)

LARGEST_JSON = 1 << 28
"""Bytes of the largest JSON file that is read; what describes a million row groups has a tenth of it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_error(path: Path, error: OSError | pl.exceptions.PolarsError) -> StorageError:
    """`error` as a message that names the path and what to do."""
    reason = getattr(error, "strerror", None) or str(error).rpartition("IO error: ")[2]
    if getattr(error, "errno", None) == errno.ENOTDIR:
        file = next((parent for parent in path.parents if parent.is_file()), path)
        return StorageError(f"cannot write {path}: {file} is a file, expected a directory; name another path")
    full = getattr(error, "errno", None) in (None, *_FULL)
    return StorageError(f"cannot write {path}: {reason}; {'free space or ' if full else ''}name another path")


def check_output(path: Path, *endings: str) -> None:
    """Refuse `path` as an output file before any work is done for it.

    Parameters
    ----------
    endings : str
        Such as ``.csv``: what its name may end in, in letters of any case; by default in anything.

    Raises
    ------
    StorageError
        When it is a directory, lies below a file, its directory cannot be written, or it has another ending.
    """
    try:
        directory = path.name in ("", "..") or stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        directory = False
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte
        raise StorageError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if directory:
        raise StorageError(f"cannot write {path}: it is a directory; name a file, such as {path / 'output'}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise StorageError(f"cannot write {path}: {parent} is a file, expected a directory; name another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {path}: no permission to write in {parent}; name another path")
    if endings and path.suffix.lower() not in endings:
        raise StorageError(f"cannot write {path}: expected a name that ends in {' or '.join(endings)}")


def sync(path: Path) -> None:
    """Flush a file or a directory entry to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush everything in a directory."""
    for inside, _, names in os.walk(folder):
        for name in names:
            sync(Path(inside, name))
        sync(Path(inside))


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a new temporary file beside `path`, then sync it and rename it to `path`.

    Raises
    ------
    StorageError
        When the file cannot be written; `path` is then as it was.
    """
    check_output(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)  # before it is created: a signal may come in between
        with create(temporary) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        temporary = None
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
        For NaN and infinities, which JSON does not have; what is not defined is None.
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically."""
    write_atomic(path, lambda file: file.write(text.encode()))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def read_json(path: Path) -> Any:
    """The value in `path`; a damaged or missing file is a `DatasetError` that names it."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON:
                raise DatasetError(f"cannot read {path}: it has {size:,} bytes, expected at most {LARGEST_JSON:,}")
            return json.loads(file.read(size).decode(), parse_constant=_no_number)
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DatasetError(f"{path} is damaged: not JSON ({reason})") from error


def read_frame(path: Path) -> pl.DataFrame:
    """The one Parquet file `path`, whatever marks there are in its name."""
    with open_regular(path) as file:
        return pl.read_parquet(file)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever the content of `path` makes go wrong inside is a `DatasetError` that names it."""
    try:
        yield
    except DatasetError:
        raise
    # pyarrow's errors are ValueError, TypeError, KeyError or OSError too.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, pl.exceptions.PolarsError) as error:
        raise DatasetError(f"{path} is damaged or of another version ({' '.join(str(error).split())})") from error


def cache_directory() -> Path:
    """Where what can be found again is kept for this user; `RuntimeError` for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stratarec"


def make_directory(path: Path) -> None:
    """Create `path` and its parents; a `StorageError` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), path)
        raise StorageError(f"cannot write {path}: {file} is a file, expected a directory") from error
    except OSError as error:
        raise storage_error(path, error) from error


def temporary_directory(final: Path) -> Path:
    """A new directory beside `final`, in which that is made; `StorageError` where it cannot be."""
    make_directory(final.parent)
    path = temporary_name(final)
    try:
        path.mkdir()
    except OSError as error:
        raise storage_error(final, error) from error
    return path


@contextmanager
def working_directory(final: Path, parts: Collection[str]) -> Iterator[Path]:
    """Make a directory next to `final` that is locked until the end and then removed, unless it was renamed.

    Working directories of killed processes are removed first; see `remove_working_directories`.
    """
    remove_working_directories(final, parts)
    work, held = temporary_name(final), None
    make_directory(final.parent)
    try:
        try:
            work.mkdir()
        except OSError as error:
            raise storage_error(final, error) from error
        held = hold_directory(work)
        yield work
    finally:
        if held is not None:
            os.close(held)
        shutil.rmtree(work, ignore_errors=True)


def remove_working_directories(final: Path, parts: Collection[str]) -> list[Path]:
    """Delete working directories of `final` whose processes were killed, and return those that remain.

    A directory that holds anything but `parts`, whole or half written, belongs to a user and stays.
    """
    for left in leftover_directories(final):
        with suppress(OSError):
            if all(entry in parts or is_leftover(entry, parts) for entry in os.listdir(left)):
                shutil.rmtree(left, ignore_errors=True)
    return leftover_directories(final, locked=True)


def remove_tree(path: Path) -> None:
    """Delete what can be deleted of a directory; anything else at `path` stays."""
    # rmtree opens what it is given: it would wait for the writer of a pipe.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def replace_directory(temporary: Path, final: Path) -> None:
    """Sync everything in `temporary` and rename it to `final`; an older `final` is removed after the swap.

    For directories inside one of ours; `replace.replace` is for those that a user names.
    """
    try:
        sync_tree(temporary)
        old = final.with_name(f".{final.name}.old")
        remove_tree(old)
        if final.exists():
            os.replace(final, old)
        os.replace(temporary, final)
        sync(final.parent)
        remove_tree(old)
    except OSError as error:
        raise storage_error(final, error) from error


def file_hash(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
