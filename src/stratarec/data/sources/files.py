"""Input paths: globs, fsspec URLs, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import fsspec

from stratarec.errors import DataError


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


def fingerprint(files: tuple[InputFile, ...]) -> list[list[object]]:
    """JSON that changes when a file does."""
    return [[file.path, file.size, file.stamp] for file in files]
