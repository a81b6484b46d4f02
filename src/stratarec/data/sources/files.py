"""Input paths: globs, fsspec URLs, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from stratarec.errors import DataError
from stratarec.io.hashes import file_hashes
from stratarec.io.opening import open_regular


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input file."""

    path: str
    """Path or URL as the user would write it."""
    size: int
    """Bytes, compressed where the file is."""
    stamp: str
    """Modification time, or whatever the file system has instead."""

    def open(self) -> IO[bytes]:
        """The file as stored, without decompression."""
        with _reading(self.path):
            # Not for fsspec, which would take marks in the name for a pattern and wait for the writer of a pipe.
            if "://" not in self.path:
                return open_regular(self.path)
            opened: IO[bytes] = fsspec.open(self.path, "rb").open()
        return opened


def expand(paths: tuple[str, ...]) -> tuple[InputFile, ...]:
    """Expand globs and URLs, each in sorted order.

    Raises
    ------
    DataError
        For no paths, a path or glob that matches nothing, a directory, an empty file, a URL that nothing reads, or a
        file that is named twice, be it under another name: its rows would count twice.
    """
    if not paths:
        raise DataError("the source has no paths; name at least one file, glob or URL in data.source.paths")
    found: dict[object, InputFile] = {}
    for pattern in paths:
        for system, path in _matches(pattern):
            file, key = _describe(system, path, pattern), _identity(system, path)
            if key in found:
                other = "" if found[key].path == file.path else f", which is {found[key].path}"
                raise DataError(f"{file.path}{other}: named twice; let data.source.paths name each file once")
            found[key] = file
    return tuple(found.values())


def _matches(pattern: str) -> list[tuple[Any, str]]:
    """File system and path of each file that `pattern` names."""
    if not pattern:
        raise DataError("'': an empty name; check data.source.paths")
    with _reading(pattern):
        system, path = fsspec.core.url_to_fs(pattern)
        # A file may have brackets in its name.
        glob = any(mark in path for mark in "*?[") and not system.exists(path)
        matches = sorted(system.glob(path)) if glob else [path]
    if not matches:
        raise DataError(f"{pattern}: no file matches; check data.source.paths")
    return [(system, match) for match in matches]


def _identity(system: Any, path: str) -> object:
    """The same for two names of one file: links and relative paths on this machine, else the URL."""
    if isinstance(system, LocalFileSystem):
        known = os.stat(path)
        return known.st_dev, known.st_ino
    return system.unstrip_protocol(path)


@contextmanager
def _reading(pattern: str) -> Iterator[None]:
    """What goes wrong with a path or URL, in one line. File systems of other libraries raise errors of any kind."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{pattern}: no such file; check data.source.paths") from error
    except ImportError as error:
        raise DataError(f"{pattern}: {_library(pattern)} ({error})") from error
    except Exception as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        raise DataError(f"{pattern!r}: cannot be read: {reason}; check data.source.paths") from error


def _library(pattern: str) -> str:
    """Which package would read the URL; a chain such as simplecache::s3:// needs that of its last protocol."""
    protocol = pattern.rpartition("::")[2].partition("://")[0]
    package = str(known_implementations.get(protocol, {}).get("class", "fsspec")).partition(".")[0].replace("_", "-")
    if package == "fsspec":
        package = {"https": '"fsspec[http]"'}.get(protocol, f'"fsspec[{protocol}]"')
    return f"{protocol}:// needs a library that is not installed; pip install {package}"


def _describe(system: Any, path: str, pattern: str) -> InputFile:
    with _reading(pattern):
        info = system.info(path)
        if isinstance(system, LocalFileSystem) and info["type"] != "directory":
            open_regular(path).close()
    if info["type"] == "directory":
        raise DataError(f"{path}: is a directory, expected a file; a glob such as {path}/* names the files in it")
    if not info["size"]:
        raise DataError(f"{path}: the file is empty, expected at least one row")
    stamp = next((str(info[key]) for key in ("mtime", "LastModified", "etag", "created") if key in info), "")
    return InputFile(path=system.unstrip_protocol(path).removeprefix("file://"), size=info["size"], stamp=stamp)


def hash_logs(paths: Sequence[str], advance: Callable[[int], object] = lambda done: None) -> dict[str, str]:
    """Hash of each path that is a file of this machine, no URL; `advance` is told of the bytes of each.

    Files that were hashed before and have not changed since are not read.
    """
    local = [path for path in paths if "://" not in path]
    try:
        return dict(zip(local, file_hashes([Path(path) for path in local], advance=advance), strict=True))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def fingerprint(files: tuple[InputFile, ...]) -> list[list[object]]:
    """JSON that changes when the content of a file does: its hash, or what the file system of a URL says instead.

    Neither the folder nor the time of a local file is in it: a copy is the same log.
    """
    hashes = hash_logs([file.path for file in files])
    return [[file.path.rpartition("/")[2], file.size, hashes.get(file.path, file.stamp)] for file in files]
