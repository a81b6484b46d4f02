"""Hashes of files, remembered: one that has the size, times and inode of when it was hashed is not read again.

They are kept by folder under ``$XDG_CACHE_HOME/stratarec/hashes`` (``~/.cache`` by default). What was written a moment
before it was hashed is not remembered: it could change once more without its times telling.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import cache_directory, file_hash, read_json, write_json

# Times of files are as coarse as two seconds on some file systems.
_SETTLE_NS = 2_000_000_000
_THREADS = 2

Signature = tuple[int, int, int, int]


def file_hashes(
    paths: Sequence[Path], *, fresh: bool = False, advance: Callable[[int], object] = lambda done: None
) -> list[str]:
    """xxh3_128 of each file, read only where it is not known.

    Parameters
    ----------
    fresh : bool
        Read every file, whatever is remembered.
    advance : callable
        Told of the bytes of each file when its hash is there.

    Raises
    ------
    OSError
        When a file cannot be read.
    """
    files = [Path(os.path.abspath(path)) for path in paths]
    folders = {folder: _Folder(folder, fresh) for folder in {file.parent for file in files}}
    hashes = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, found in zip(files, pool.map(lambda file: folders[file.parent].hash(file), files), strict=True):
            hashes.append(found)
            advance(file.stat().st_size)
    for folder in folders.values():
        folder.save()
    return hashes


class _Folder:
    """What is remembered of the files of one folder."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self._path: Path | None = None
        self._known: dict[str, tuple[Signature, str]] = {}
        self._changed = False
        with contextlib.suppress(RuntimeError):  # a user without a home
            name = xxhash.xxh3_64_hexdigest(os.fsencode(folder))
            self._path = cache_directory() / "hashes" / f"{name}.json"
        if self._path is not None and not fresh:
            # What is missing or damaged is hashed again.
            with contextlib.suppress(DatasetError, LookupError, TypeError, ValueError, AttributeError):
                self._known = {
                    str(file): (_signature(entry[0]), str(entry[1])) for file, entry in read_json(self._path).items()
                }

    def hash(self, path: Path) -> str:
        status = path.stat()
        signature = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        known = self._known.get(path.name)
        if known is not None and known[0] == signature:
            return known[1]
        began = time.time_ns()
        found = file_hash(path)
        if began - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLE_NS:
            self._known[path.name] = (signature, found)
            self._changed = True
        return found

    def save(self) -> None:
        """Keep what is new; a cache that cannot be written is done without."""
        if self._changed and self._path is not None:
            with contextlib.suppress(StorageError):
                write_json(self._path, self._known)


def _signature(numbers: Sequence[int]) -> Signature:
    size, modified, changed, inode = map(int, numbers)
    return size, modified, changed, inode
