"""Input files by paths, globs, directories and URLs, with clear errors.

A recipe may be untrusted, and some file systems of fsspec run templates, open archives or read the
memory of this process. So only URLs with one of `remote.PROTOCOLS` are opened, and chained URLs are
refused.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import fsspec
import polars as pl
from fsspec.implementations.local import LocalFileSystem

from stratarec.data.sources.formats import FRONT_BYTES
from stratarec.errors import ConfigError, DataError
from stratarec.io.atomic import open_regular, storage_error
from stratarec.io.hashes import file_hashes
from stratarec.io.remote import PROTOCOLS, URL, hide_secrets

STANDARD_INPUT = "-"
"""Path of standard input, once `copy_standard_input` was called."""
_standard_input: list[IO[bytes]] = []
# Prefixes of hidden files and directories, as in Spark and Hive.
_HIDDEN = re.compile(r"/[._]")
# A directory that Spark and Hive name by the value of a column, and the value that means missing.
_PARTITION = re.compile(r"([^=]+)=(.*)", re.DOTALL)
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
DATE_PARTS = ("year", "month", "day")
"""Directories that together give the column `DATE`."""
DATE = "year-month-day"


class LogPathError(DataError):
    """A path that names no readable log. The message does not say where the path was named."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of a log, on this machine or at a URL, and the properties that show whether it has
    changed.
    """

    path: str
    """Path or URL, as a user would write it."""
    size: int
    """Number of bytes as stored; if the file is compressed, of the compressed content."""
    stamp: str
    """Modification time, or another property that changes with the file, from its file system."""
    stored: str = ""
    """Path of the local copy that is read instead; empty if there is none."""

    def open(self) -> IO[bytes]:
        """Open the file as it is stored, without decompression."""
        with _as_data_error(self.path):
            # Not opened by fsspec, which would interpret some names as patterns and would wait for
            # the writer of a pipe.
            if not URL.match(self.path):
                return open_regular(self.stored or self.path)
            system, path = _file_system(self.path)  # a listing may have names of any form
            opened: IO[bytes] = system.open(path, "rb")
        return opened

    def directory_columns(self, own: Collection[str]) -> dict[str, str | None]:
        """Return the columns that directories of the path give, such as ``day=2024-03-01``, with
        their value in all rows of the file; None if it is missing.

        Columns in `own`, which the file itself has, are left out. Directories of a year, a month
        and a day also give the column ``year-month-day``.
        """
        parts = map(_PARTITION.fullmatch, self.path.split("/")[:-1])
        values = {unquote(part[1]): unquote(part[2]) for part in parts if part is not None}
        columns = {name: None if value in ("", _NO_VALUE) else value for name, value in values.items()}
        if columns.keys() >= {*DATE_PARTS}:
            date = [part.zfill(2) for name in DATE_PARTS if (part := columns[name])]
            columns[DATE] = "-".join(date) if len(date) == len(DATE_PARTS) else None
        # Polars would read ^...$ as a pattern.
        return {name: columns[name] for name in columns if name not in own and not name.startswith("^")}

    def front(self) -> bytes:
        """Return the first bytes of the file as it is stored, from which its format is
        recognized.
        """
        with self.open() as file:
            return file.read(FRONT_BYTES)


def expand(paths: tuple[str, ...]) -> tuple[InputFile, ...]:
    """Expand globs, directories and URLs, each in sorted order.

    A directory means all files in it and in its subdirectories, except files and directories whose
    names begin with ``_`` or ``.``, such as ``_SUCCESS``. Empty files of a glob or directory are
    left out.

    Raises
    ------
    DataError
        If there are no paths, if a path, glob or directory matches no file with content, or if the
        protocol of a URL is not supported. Also if a file is given twice, even by different names,
        because its rows would count twice.
    """
    if not paths:
        raise DataError("the source has no paths; name at least one file, glob or URL in data.source.paths")
    files: dict[object, InputFile] = {}
    for pattern in paths:
        if pattern == STANDARD_INPUT and _standard_input:
            files[pattern] = _copied_input()
            continue
        for system, path, info in _matches(pattern):
            file, key = _input_file(system, path, info), _identity(system, path)
            if key in files:
                other = "" if files[key].path == file.path else f", which is {files[key].path}"
                raise LogPathError(f"{file.path}{other}: named twice; name each file once")
            files[key] = file
    return tuple(files.values())


def with_constants(frame: pl.DataFrame, columns: Mapping[str, str | None]) -> pl.DataFrame:
    """Return `frame` with columns of text that have one value in all rows."""
    rows = frame.height
    return frame.with_columns(
        pl.repeat(value, rows, dtype=pl.String, eager=True).alias(name) for name, value in columns.items()
    )


def copy_standard_input() -> None:
    """Copy standard input to a file, because a log is read several times. `expand` then finds it as
    the path ``-``.

    The file has no name, so nothing is left behind if the process is killed.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "- reads a log from standard input, which is a terminal; pipe a log into the command"
        )
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        copy.flush()
    except OSError as error:
        raise storage_error(Path(tempfile.gettempdir()), error) from error
    _standard_input.append(copy)


def _copied_input() -> InputFile:
    descriptor = _standard_input[-1].fileno()
    size = os.fstat(descriptor).st_size
    if not size:
        raise DataError("standard input (-) is empty, expected at least one row")
    return InputFile(path=STANDARD_INPUT, size=size, stamp="", stored=f"/proc/self/fd/{descriptor}")


def _matches(pattern: str) -> list[tuple[Any, str, dict[str, Any]]]:
    """Return the file system, path and properties of each file that matches `pattern`."""
    if not pattern:
        raise LogPathError("'': an empty name; name a file, glob or URL")
    with _as_data_error(pattern):
        system, path = _file_system(pattern)
        # The name of a file may contain brackets.
        glob = any(mark in path for mark in "*?[") and not system.exists(path)
        matches: dict[str, dict[str, Any]] = {}
        for match in sorted(system.glob(path)) if glob else [path]:
            info = _info(system, match)
            matches |= _files_below(system, match) if info["type"] == "directory" else {match: info}
    if not matches:
        raise LogPathError(f"{pattern}: no file matches; name another path")
    # Pipes and devices have no size; a later check refuses them with a better error.
    filled = [match for match, info in matches.items() if info["size"] or info["type"] != "file"]
    if not filled or (path in matches and path not in filled):
        raise DataError(f"{next(iter(matches))}: the file is empty, expected at least one row")
    return [(system, match, matches[match]) for match in filled]


def _files_below(system: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return path and properties of all files in a directory and its subdirectories, except hidden
    files and files behind symbolic links to directories."""
    files = {}
    for path, listed in sorted(system.find(folder, detail=True).items()):
        info = _info(system, path) if listed.get("islink") else listed
        if info["type"] != "directory" and not _HIDDEN.search(path[len(folder.rstrip("/")) :]):
            files[path] = info
    return files


def _info(system: Any, path: str) -> dict[str, Any]:
    """Return the properties of a file; `DataError` for a symbolic link without a target."""
    try:
        return system.info(path)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        if not isinstance(system, LocalFileSystem) or not os.path.islink(path):
            raise
        raise DataError(
            f"{path}: a symbolic link to {os.readlink(path)}, which does not exist; remove the "
            "link or restore the file"
        ) from error


def _file_system(pattern: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in that file system."""
    url, chain = URL.match(pattern), "::" in pattern and "://" in pattern
    if url is None and not chain:  # fsspec would split some paths
        return LocalFileSystem(), LocalFileSystem._strip_protocol(pattern)
    if url is None or chain or url[1] not in PROTOCOLS:
        form = "a chain of file systems" if url is None or chain else f"of the protocol {url[1]}"
        names = ", ".join(f"{name}://" for name in PROTOCOLS)
        raise LogPathError(f"{pattern!r} is {form}, expected a path of this machine or one of {names}")
    return fsspec.core.url_to_fs(pattern)  # type: ignore[no-any-return]


def _identity(system: Any, path: str) -> object:
    """Return a key that is the same for all names of a file, such as links and relative paths. A
    URL is its own key.
    """
    if isinstance(system, LocalFileSystem):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return system.unstrip_protocol(path)


@contextmanager
def _as_data_error(pattern: str) -> Iterator[None]:
    """Convert errors of a path or URL to `DataError`. File systems of other libraries raise
    exceptions of any class.
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise LogPathError(f"{pattern}: no such file; name another path") from error
    except ImportError as error:
        protocol = pattern.partition("://")[0]
        advice = f"{protocol}:// needs a library that is not installed; pip install {PROTOCOLS[protocol]}"
        raise DataError(f"{pattern}: {advice} ({error})") from error
    except Exception as error:
        reason = hide_secrets(str(getattr(error, "strerror", None) or error)) or type(error).__name__
        raise LogPathError(f"{pattern!r}: cannot be read: {reason}") from error


def _input_file(system: Any, path: str, info: dict[str, Any]) -> InputFile:
    if isinstance(system, LocalFileSystem):
        with _as_data_error(path):
            open_regular(path).close()
    name = system.unstrip_protocol(path).removeprefix("file://")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise LogPathError(f"{os.fsencode(name)!r}: its name is not UTF-8; rename it") from error
    stamp = next(
        (str(info[key]) for key in ("mtime", "LastModified", "etag", "created") if key in info), ""
    )
    return InputFile(path=name, size=info["size"], stamp=stamp)


def no_rows(file: InputFile) -> DataError:
    """Return the error for a log without a row."""
    return DataError(f"{file.path}: the file has no rows, expected at least one")


def hash_logs(paths: Sequence[str], advance: Callable[[int], object] = lambda done: None) -> dict[str, str]:
    """Return path -> hash of content, for all paths that are not URLs. `advance` is called with
    each file's size.

    Files that were hashed earlier and have not changed are not read again.
    """
    local = [path for path in paths if not URL.match(path)]
    try:
        return dict(zip(local, file_hashes([Path(path) for path in local], advance=advance), strict=True))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def fingerprint(files: tuple[InputFile, ...], columns: Collection[str] = ()) -> list[list[object]]:
    """Return JSON that identifies the content of files: name, size, and hash. A URL has no hash; it
    has the modification time or tag that its file system reports.

    Folder and modification time of a local file are left out, so a copy counts as the same log.
    The values of `columns` that directories give are part of the content.
    """
    hashes = hash_logs([file.path for file in files])
    return [
        [
            file.path.rpartition("/")[2],
            file.size,
            hashes.get(file.path, file.stamp),
            *([name, value] for name, value in file.directory_columns(()).items() if name in columns),
        ]
        for file in files
    ]
