"""Cached hashes of files, and versions of packages and of this project's code.

The cache has one file per folder under ``$XDG_CACHE_HOME/stratarec/hashes`` (``~/.cache`` by
default). The cached hash of a file is used if the file's size, times and inode are unchanged. If a
file was written just before it is hashed, its hash is not cached, because the file could change
again within the resolution of its times.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from stratarec import errors
from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import cache_directory, file_hash, read_json, write_json

# Some file systems store times with a resolution of two seconds.
_SETTLE_NS = 2_000_000_000
_THREADS = 2
CODE, PYTHON = "code of stratarec with the hash", "Python"
"""Keys in the result of `versions` for the project's code and for the interpreter."""

Signature = tuple[int, int, int, int]


def file_hashes(
    paths: Sequence[Path], *, fresh: bool = False, advance: Callable[[int], object] = lambda done: None
) -> list[str]:
    """Return the xxh3_128 hash of each file, from the cache if possible.

    Parameters
    ----------
    fresh : bool
        Whether to ignore the cache and read every file.
    advance : callable
        Called with the size of a file in bytes when its hash is known.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    files = [Path(os.path.abspath(path)) for path in paths]
    folders = {folder: _FolderCache(folder, fresh) for folder in {file.parent for file in files}}
    hashes = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, digest in zip(
            files, pool.map(lambda file: folders[file.parent].hash(file), files), strict=True
        ):
            hashes.append(digest)
            advance(file.stat().st_size)
    for folder in folders.values():
        folder.save()
    return hashes


class _FolderCache:
    """Cached hashes of the files of one folder."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self._path: Path | None = None
        self._cached: dict[str, tuple[Signature, str]] = {}
        self._changed = False
        with contextlib.suppress(RuntimeError):  # a user without a home
            name = xxhash.xxh3_64_hexdigest(os.fsencode(folder))
            self._path = cache_directory() / "hashes" / f"{name}.json"
        if self._path is not None and not fresh:
            # If the cache cannot be read, files are hashed again.
            with contextlib.suppress(DatasetError, LookupError, TypeError, ValueError, AttributeError):
                self._cached = {
                    str(file): (_signature(entry[0]), str(entry[1]))
                    for file, entry in read_json(self._path).items()
                }

    def hash(self, path: Path) -> str:
        status = path.stat()
        signature = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        cached = self._cached.get(path.name)
        if cached is not None and cached[0] == signature:
            return cached[1]
        start = time.time_ns()
        digest = file_hash(path)
        if start - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLE_NS:
            self._cached[path.name] = (signature, digest)
            self._changed = True
        return digest

    def save(self) -> None:
        """Store new hashes; if the cache cannot be written, do nothing."""
        if self._changed and self._path is not None:
            with contextlib.suppress(StorageError):
                write_json(self._path, self._cached)


def _signature(numbers: Sequence[int]) -> Signature:
    size, modified, changed, inode = map(int, numbers)
    return size, modified, changed, inode


@cache
def versions(*names: str) -> dict[str, str]:
    """Return the versions of the named packages (`PYTHON` for the interpreter), and a hash of this
    project's source.

    Processes that work together must agree on all entries. If a package is not installed, its
    version is ``none``.
    """
    digest, root = xxhash.xxh3_64(), Path(errors.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return {**{name: _version(name) for name in names}, CODE: digest.hexdigest()}


def _version(name: str) -> str:
    if name == PYTHON:
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
