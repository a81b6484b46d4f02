"""Some rows of a byte array in one safetensors file: ``rows`` ``[n]`` int64 ascending and ``records`` ``[n, W]`` uint8.

Written and read in pieces, because an array may be most of the memory there is; any safetensors reader can open one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from stratarec.errors import CheckpointError, StorageError
from stratarec.files import file_hash, storage_error, sync, write_atomic

RowSelection = Callable[[], Iterator[NDArray[np.int64]]]
"""Gives the rows of a file, ascending, in chunks; it is called more than once."""

_PIECE_BYTES = 1 << 23


class Readable(Protocol):
    """What rows are taken from: ``[R, W]`` bytes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]: ...


def write_rows(path: Path, select: RowSelection, array: Readable) -> tuple[int, str]:
    """Write the selected rows of `array` ``[R, W]`` atomically; returns how many there were and the file's hash.

    Raises
    ------
    StorageError
        When the file cannot be written; `path` is then as it was.
    """
    count = sum(len(rows) for rows in select())
    digest = xxhash.xxh3_128()

    def write(file: BinaryIO) -> None:
        for piece in _pieces(select, array, count):
            digest.update(piece)
            file.write(piece)

    write_atomic(path, write)
    return count, digest.hexdigest()


def _pieces(select: RowSelection, array: Readable, count: int) -> Iterator[bytes | memoryview]:
    width = array.shape[1]
    header = json.dumps(
        {
            "__metadata__": {"format": "stratarec rows 1"},
            "rows": {"dtype": "I64", "shape": [count], "data_offsets": [0, count * 8]},
            "records": {"dtype": "U8", "shape": [count, width], "data_offsets": [count * 8, count * (8 + width)]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for rows in select():
        yield rows.astype("<i8", copy=False).data
    step = max(1, _PIECE_BYTES // width)
    for rows in select():
        for first in range(0, len(rows), step):
            yield array[rows[first : first + step]].reshape(-1).data


def read_rows(path: Path, count: int, width: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Rows and records of a file whose hash was found right, in pieces."""
    content = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(content[:8].view("<u8")[0])
    rows = content[start : start + count * 8].view("<i8")
    records = content[start + count * 8 :].reshape(count, width)
    step = max(1, _PIECE_BYTES // width)
    for first in range(0, count, step):
        yield np.array(rows[first : first + step], np.int64), np.array(records[first : first + step])


def verify_file(path: Path, expected: str) -> None:
    """`CheckpointError` that names `path` when it is missing, cannot be read, or its hash is not `expected`."""
    try:
        found = file_hash(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from error
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its hash does not match; use another checkpoint")


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, or a synced copy where the file system refuses links.

    Raises
    ------
    StorageError
        When neither can be done.
    """
    try:
        os.link(source, target)
        return
    except OSError as error:
        reason = error.strerror
        if not source.is_file():
            raise StorageError(f"cannot keep {source} in {target.parent}: {reason}") from error
    warnings.warn(
        f"{target.parent} takes no hard links from {source.parent} ({reason}): files are copied, which takes their "
        "time and space again at every checkpoint; put both on one file system",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        shutil.copyfile(source, target)
        sync(target)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise storage_error(target, error) from error
