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
from stratarec.io.atomic import file_hash, storage_error, write_atomic
from stratarec.io.sealed import own_file

RowSelection = Callable[[], Iterator[NDArray[np.int64]]]
"""Gives the rows of a file, ascending, in chunks; it is called more than once."""

# What is in memory beside the array. Resident rows were once copied whole for every checkpoint.
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


def _header(count: int, width: int) -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"format": "stratarec rows 1"},
            "rows": {"dtype": "I64", "shape": [count], "data_offsets": [0, count * 8]},
            "records": {"dtype": "U8", "shape": [count, width], "data_offsets": [count * 8, count * (8 + width)]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _pieces(select: RowSelection, array: Readable, count: int) -> Iterator[bytes | memoryview]:
    width = array.shape[1]
    yield _header(count, width)
    for rows in select():
        yield rows.astype("<i8", copy=False).data
    step = max(1, _PIECE_BYTES // width)
    for rows in select():
        for first in range(0, len(rows), step):
            yield array[rows[first : first + step]].reshape(-1).data


def read_rows(path: Path, count: int, width: int, total: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Rows and records of a file whose hash was found right, in pieces.

    Raises
    ------
    CheckpointError
        When it holds other than `count` ascending rows below `total` with records of `width` bytes.
    """
    rows, records = _arrays(path, count, width)
    step, before = max(1, _PIECE_BYTES // width), -1
    for first in range(0, count, step):
        piece = np.array(rows[first : first + step], np.int64)
        if piece[0] <= before or piece[-1] >= total or (piece[1:] <= piece[:-1]).any():
            raise CheckpointError(
                f"{path} has rows that do not ascend, or are beyond 0..{total - 1}; use another checkpoint"
            )
        before = int(piece[-1])
        yield piece, np.array(records[first : first + step])


def _arrays(path: Path, count: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The two tensors of a file, mapped; only what `write_rows` writes is read."""
    size = path.stat().st_size
    # Compared with what would have been written, never parsed: a file may be anybody's.
    header = _header(count, width)
    if size != len(header) + count * (8 + width):
        raise CheckpointError(f"{path} has {size} bytes, no file of {count} records of {width} bytes")
    content = np.memmap(path, np.uint8, mode="r")
    if content[: len(header)].tobytes() != header:
        raise CheckpointError(f"{path} is no file of rows and records; use another checkpoint")
    end = len(header) + count * 8
    return content[len(header) : end].view("<i8"), content[end:].reshape(count, width)


def verify_file(path: Path, expected: str) -> None:
    """`CheckpointError` that names `path` when it is missing, no regular file, or its hash is not `expected`."""
    try:
        found = file_hash(own_file(path.parent, path.name))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
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
        # Links share the inode, so whatever damages one name damages all; hashes are checked at every restore.
        os.link(source, target, follow_symlinks=False)
        return
    except OSError as error:
        reason = error.strerror
        if source.is_symlink() or not source.is_file():
            raise StorageError(f"cannot keep {source} in {target.parent}: {reason}") from error
        if os.path.lexists(target):
            raise storage_error(target, error) from error
    warnings.warn(
        f"{target.parent} takes no hard links from {source.parent} ({reason}): files are copied, which takes their "
        "time and space again at every checkpoint; put both on one file system",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        # What is there already is another's: it is neither written over nor removed.
        with source.open("rb") as found, target.open("xb") as made:
            try:
                shutil.copyfileobj(found, made, _PIECE_BYTES)
                made.flush()
                os.fsync(made.fileno())
            except BaseException:
                target.unlink()
                raise
    except OSError as error:
        raise storage_error(target, error) from error
