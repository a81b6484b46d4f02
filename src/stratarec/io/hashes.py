"""Hashes of files, with a cache, and versions of libraries and of this project's code.

The cache is a file per folder under ``$XDG_CACHE_HOME/stratarec/hashes`` (``~/.cache`` by default). A file is hashed
again unless its size, times and inode are those of the cached hash. A file that was written just before it was hashed
is not cached: it could change again within the resolution of its times.
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

# Some file systems store times in units of two seconds.
_SETTLE_NS = 2_000_000_000
_THREADS = 2
CODE, PYTHON = "code of stratarec with the hash", "Python"
"""Entries of `versions` for the project's code and the interpreter."""

Signature = tuple[int, int, int, int]


def file_hashes(
    paths: Sequence[Path], *, fresh: bool = False, advance: Callable[[int], object] = lambda done: None
) -> list[str]:
    """Return the xxh3_128 hash of each file, from the cache where possible.

    Parameters
    ----------
    fresh : bool
        Read every file, and ignore the cache.
    advance : callable
        Called with the bytes of each file when its hash is known.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    files = [Path(os.path.abspath(path)) for path in paths]
    folders = {folder: _FolderCache(folder, fresh) for folder in {file.parent for file in files}}
    hashes = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, digest in zip(files, pool.map(lambda file: folders[file.parent].hash(file), files), strict=True):
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
            # Without a readable cache, files are hashed again.
            with contextlib.suppress(DatasetError, LookupError, TypeError, ValueError, AttributeError):
                self._cached = {
                    str(file): (_signature(entry[0]), str(entry[1])) for file, entry in read_json(self._path).items()
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
        """Write new hashes; a cache that cannot be written is ignored."""
        if self._changed and self._path is not None:
            with contextlib.suppress(StorageError):
                write_json(self._path, self._cached)


def _signature(numbers: Sequence[int]) -> Signature:
    size, modified, changed, inode = map(int, numbers)
    return size, modified, changed, inode


@cache
def versions(*names: str) -> dict[str, str]:
    """Return the versions of the named packages, or of `PYTHON`, and a hash of the project's source as `CODE`.

    Processes that work together must agree on all of them. A package that is not installed has the version ``none``.
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
