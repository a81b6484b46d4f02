"""Rows of a byte array in safetensors files, and checkpoints of an array as a chain of such files.

A file has ``rows`` ``[n]`` int64, ascending, and ``records`` ``[n, W]`` uint8. It is written and
read in pieces, because an array may take most of the memory; any safetensors reader can open it.

A chain is a base file with the written rows, followed by delta files with the changed rows. A
checkpoint directory contains its whole chain: files of the previous checkpoint are hard-linked, so
a chain costs the space of its deltas and any checkpoint can be deleted without harm to the others.
If the deltas contain more than half as many rows as the base, a new base is written.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from stratarec.errors import CheckpointError, StorageError
from stratarec.io.atomic import file_hash, storage_error, sync, write_atomic
from stratarec.io.sealed import Hash, Model, newer_format, read_sealed, regular_file_below, write_sealed

RowSelection = Callable[[], Iterator[NDArray[np.int64]]]
"""Returns the rows of a file, ascending, in chunks; it is called more than once."""

# Size of the copies in memory. An earlier version copied all resident rows for every checkpoint.
_PIECE_BYTES = 1 << 23


class Readable(Protocol):
    """A readable array of ``[R, W]`` bytes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]: ...


def write_rows(path: Path, select: RowSelection, array: Readable) -> tuple[int, str]:
    """Write rows of an array to a file, completely or not at all; return their number and the
    file's hash.

    Parameters
    ----------
    path : Path
        File to write.
    select : callable
        Returns the rows to write, ascending, in chunks; it is called more than once.
    array : Readable
        ``[R, W]`` bytes.

    Raises
    ------
    StorageError
        If the file cannot be written; `path` is then unchanged.
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
            "records": {
                "dtype": "U8",
                "shape": [count, width],
                "data_offsets": [count * 8, count * (8 + width)],
            },
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


def read_rows(
    path: Path, count: int, width: int, total: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield rows and records of a file whose hash was verified, in pieces.

    Parameters
    ----------
    path : Path
        File that `write_rows` wrote.
    count : int
        Number of rows in the file.
    width : int
        Bytes of a record.
    total : int
        Number of rows of the array, R.

    Raises
    ------
    CheckpointError
        If the file does not have `count` ascending rows below `total` with records of `width`
        bytes.
    """
    rows, records = _arrays(path, count, width)
    step, before = max(1, _PIECE_BYTES // width), -1
    for first in range(0, count, step):
        piece = np.array(rows[first : first + step], np.int64)
        if piece[0] <= before or piece[-1] >= total or (piece[1:] <= piece[:-1]).any():
            raise CheckpointError(
                f"{path} has rows that are not ascending or outside 0..{total - 1}; use another checkpoint"
            )
        before = int(piece[-1])
        yield piece, np.array(records[first : first + step])


def _arrays(path: Path, count: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the two tensors of a file, memory-mapped; only files in the format of `write_rows` are
    accepted.
    """
    size = path.stat().st_size
    # Compared with the expected header, never parsed: the file may come from an untrusted source.
    header = _header(count, width)
    if size != len(header) + count * (8 + width):
        raise CheckpointError(f"{path} has {size} bytes, which do not fit {count} records of {width} bytes")
    content = np.memmap(path, np.uint8, mode="r")
    if content[: len(header)].tobytes() != header:
        raise CheckpointError(f"{path} is not a file of rows and records; use another checkpoint")
    end = len(header) + count * 8
    return content[len(header) : end].view("<i8"), content[end:].reshape(count, width)


def verify_file(path: Path, expected: str) -> None:
    """Raise `CheckpointError` unless `path` is a regular file with the hash `expected`."""
    try:
        actual = file_hash(regular_file_below(path.parent, path.name))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
    if actual != expected:
        raise CheckpointError(f"{path} is damaged: its hash does not match; use another checkpoint")


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `target` to the file `source`, or create a synced copy if the file system refuses
    links.

    Raises
    ------
    StorageError
        If both fail.
    """
    try:
        # Links share the inode, so damage to one name damages all; hashes are checked at every
        # restore.
        os.link(source, target, follow_symlinks=False)
        return
    except OSError as error:
        reason = error.strerror
        if source.is_symlink() or not source.is_file():
            raise StorageError(f"cannot keep {source} in {target.parent}: {reason}") from error
        if os.path.lexists(target):
            raise storage_error(target, error) from error
    warnings.warn(
        f"{target.parent} does not support hard links from {source.parent} ({reason}): every checkpoint "
        "copies all files, which takes time and space; put both directories on one file system",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        # An existing file belongs to somebody else: it is neither overwritten nor removed.
        with source.open("rb") as source_file, target.open("xb") as target_file:
            try:
                shutil.copyfileobj(source_file, target_file, _PIECE_BYTES)
                target_file.flush()
                os.fsync(target_file.fileno())
            except BaseException:
                target.unlink()
                raise
    except OSError as error:
        raise storage_error(target, error) from error


_NAME = "chain.json"
_FORMAT: Literal[2] = 2
# A restore reads every file, and each checkpoint links every file.
_MOST_FILES = 64


class _Note(Model):
    """File that identifies the checkpoint to which the other files of its directory belong."""

    format: Literal[2]
    token: Hash


def _read(directory: Path) -> _Note:
    return read_sealed(directory / _NAME, _Note, "use another checkpoint", CheckpointError)


def files_of(directory: Path, files: list[dict[str, Any]]) -> Iterator[Path]:
    """Yield the paths of the files of an array's checkpoint in `directory`; `files` is the result
    of `DeltaChain.save`.

    Raises
    ------
    CheckpointError
        If its note cannot be read.
    """
    _read(directory)
    yield directory / _NAME
    for entry in files:
        yield directory / entry["name"]


class Rows(Readable, Protocol):
    """A readable and writable array of ``[R, W]`` bytes."""

    def __setitem__(self, rows: NDArray[np.int64], records: NDArray[np.uint8], /) -> None: ...


class DeltaChain:
    """The files of the last checkpoint of one array.

    The caller tracks which rows changed since then, and clears its marks when `save` has returned.
    """

    def __init__(self) -> None:
        self._files: list[dict[str, Any]] = []
        self._next = 0
        # Identifies the last checkpoint. Its rows and sizes would not: a run that returned to an
        # older checkpoint may write different records to the same rows.
        self._token = ""

    @property
    def started(self) -> bool:
        """Whether there is a last checkpoint, since which the caller tracks changes."""
        return bool(self._token)

    def continues(self, previous: Path | None) -> bool:
        """Whether `previous` is the last checkpoint, since which the caller tracks changes."""
        if previous is None or not self.started:
            return False
        try:
            return _read(previous).token == self._token
        except CheckpointError:
            return False

    def save(
        self,
        directory: Path,
        previous: Path | None,
        array: Rows,
        written: RowSelection,
        changed: RowSelection,
    ) -> list[dict[str, Any]]:
        """Write to `directory` the files from which `array` can be restored; return the list of
        files, base first.

        Parameters
        ----------
        directory : Path
            New and empty directory.
        previous : Path or None
            Directory of the last checkpoint. If it is, only changed rows are written, and its files
            are linked.
        array : Rows
            ``[R, W]`` bytes.
        written, changed : callable
            Return all rows to save, and the rows that changed since the last checkpoint, ascending,
            in chunks.

        Raises
        ------
        StorageError
            If a file cannot be written; the next checkpoint may still build on the previous one.
        """
        changes = sum(len(rows) for rows in changed())
        files, select = [], written
        if previous is not None and self._grows(previous, changes):
            for entry in self._files:
                link_or_copy(previous / entry["name"], directory / entry["name"])
            files, select = list(self._files), changed
        if changes or not files:
            name = f"rows-{self._next:06d}.safetensors"
            count, digest = write_rows(directory / name, select, array)
            files.append({"name": name, "rows": count, "hash": digest})
        token = os.urandom(16).hex()
        # Last: without the note, no later checkpoint builds on these files.
        write_sealed(directory / _NAME, {"format": _FORMAT, "token": token})
        sync(directory)
        self._files = files
        self._next = self._next + 1
        self._token = token
        return files

    def _grows(self, previous: Path, changes: int) -> bool:
        """Whether to add a delta to the files of `previous` instead of writing a new base."""
        if not self.continues(previous) or len(self._files) >= _MOST_FILES:
            return False
        deltas = changes + sum(int(entry["rows"]) for entry in self._files[1:])
        # This limits the size of all files, which a restore reads, to one and a half times the
        # base.
        if 2 * deltas > int(self._files[0]["rows"]):
            return False
        return all((previous / entry["name"]).is_file() for entry in self._files)

    def verify(self, directory: Path, files: list[dict[str, Any]]) -> None:
        """Raise a `CheckpointError` that names the file of `files` that is missing or damaged."""
        for entry in files:
            verify_file(directory / entry["name"], entry["hash"])

    def load(
        self, directory: Path, files: list[dict[str, Any]], array: Rows
    ) -> Iterator[NDArray[np.int64]]:
        """Load the rows of verified `files` into `array` and yield them in pieces; the next `save`
        builds on them.
        """
        total, width = array.shape
        for entry in files:
            for rows, records in read_rows(directory / entry["name"], entry["rows"], width, total):
                array[rows] = records
                yield rows
        self._files = list(files)
        # Greater than the number in any existing name.
        self._next = 1 + max(int(entry["name"].split("-")[1].split(".")[0]) for entry in files)
        try:
            self._token = _read(directory).token
        # The rows were verified with the manifest. Without the note, the next checkpoint is a full
        # one.
        except CheckpointError:
            self._token = ""


def require_same(directory: Path, manifest: dict[str, Any], expected: dict[str, Any], *lists: str) -> None:
    """Raise a `CheckpointError` unless the manifest of the records in `directory` is of the
    expected store.

    Parameters
    ----------
    directory : Path
        Directory of the records, for the message.
    manifest : dict
        Manifest to check.
    expected : dict
        Fields and the values that they must have.
    *lists : str
        Fields that must be lists.
    """
    for name in lists:
        if not isinstance(manifest.get(name), list):
            raise CheckpointError(
                f"the manifest of the records in {directory} is damaged: {name} is missing"
            )
    for field, value in expected.items():
        if manifest.get(field) != value:
            if field == "format" and (fault := newer_format(manifest.get(field), value)):
                raise CheckpointError(f"the records in {directory} have {fault}")
            raise CheckpointError(
                f"the records in {directory} have {field} {json.dumps(manifest.get(field))}, expected "
                f"{json.dumps(value)}; use a checkpoint of the same tables and codec"
            )
