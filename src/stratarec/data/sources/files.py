"""Input paths: globs, fsspec URLs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from stratarec.errors import DataError
from stratarec.hashes import file_hashes


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
        opened: IO[bytes] = fsspec.open(self.path, "rb").open()
        return opened


def expand(paths: tuple[str, ...]) -> tuple[InputFile, ...]:
    """Expand globs and URLs, each in sorted order.

    Raises
    ------
    DataError
        For no paths, a path or glob that matches nothing, a directory, or an empty file.
    """
    if not paths:
        raise DataError("the source has no paths; name at least one file, glob or URL in data.source.paths")
    found: list[InputFile] = []
    for pattern in paths:
        system, path = fsspec.core.url_to_fs(pattern)
        matches = sorted(system.glob(path)) if any(mark in path for mark in "*?[") else [path]
        if not matches:
            raise DataError(f"{pattern}: no file matches; check data.source.paths")
        found += [_describe(system, match, pattern) for match in matches]
    return tuple(found)


def _describe(system: Any, path: str, pattern: str) -> InputFile:
    try:
        info = system.info(path)
    except FileNotFoundError as error:
        raise DataError(f"{pattern}: no such file; check data.source.paths") from error
    except OSError as error:
        raise DataError(f"{pattern}: cannot be read: {error.strerror or error}") from error
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
