"""Checkpoints of a byte array as a chain of files: a base with the written rows, then deltas with the changed ones.

A checkpoint directory holds its whole chain. The files of the one before are hard-linked into it, so a chain costs the
space of its deltas and any checkpoint may be deleted without harm to the others. When the deltas hold more than half as
many rows as the base, a new base begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.row_file import Readable, RowSelection, link_or_copy, read_rows, verify_file, write_rows
from stratarec.errors import CheckpointError
from stratarec.io.atomic import sync
from stratarec.io.sealed import Hash, Model, read_sealed, write_sealed

_NAME = "chain.json"
_FORMAT: Literal[2] = 2
# A restore reads every file, and each checkpoint links every file.
_MOST_FILES = 64


class _Note(Model):
    """Which checkpoint of an array the files beside it are."""

    format: Literal[2]
    token: Hash


def _read(directory: Path) -> _Note:
    return read_sealed(directory / _NAME, _Note, "use another checkpoint", CheckpointError)


def files_of(directory: Path, files: list[dict[str, Any]]) -> Iterator[Path]:
    """The files of a checkpoint of an array, once the note beside them is found to be one; else `CheckpointError`."""
    _read(directory)
    yield directory / _NAME
    for entry in files:
        yield directory / entry["name"]


class Rows(Readable, Protocol):
    """A byte array ``[R, W]``, or something that is read and written like one."""

    def __setitem__(self, rows: NDArray[np.int64], records: NDArray[np.uint8], /) -> None: ...


class Chain:
    """The files that the last checkpoint of one array consists of.

    Which rows changed since then is the caller's to know: it clears its marks when `save` has returned.
    """

    def __init__(self) -> None:
        self._files: list[dict[str, Any]] = []
        self._next = 0
        # Of the last checkpoint. Equal contents would not do as proof that it is the one: a run that went back to an
        # older checkpoint may write other records to the same places.
        self._token = ""

    @property
    def started(self) -> bool:
        """Whether there is a checkpoint that changes are counted from."""
        return bool(self._token)

    def continues(self, previous: Path | None) -> bool:
        """Whether `previous` is the checkpoint that changes are counted from."""
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
        """Write what restores `array` into `directory`; returns the list of files, base first.

        Raises
        ------
        StorageError
            When something cannot be written; the next checkpoint may still build on the one before.
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
        # Last: without it no later checkpoint takes these files for whole.
        write_sealed(directory / _NAME, {"format": _FORMAT, "token": token})
        sync(directory)
        self._files, self._next, self._token = files, self._next + 1, token
        return files

    def _grows(self, previous: Path, changes: int) -> bool:
        """Whether to add a delta to the files of `previous`, or to begin anew."""
        if not self.continues(previous) or len(self._files) >= _MOST_FILES:
            return False
        deltas = changes + sum(int(entry["rows"]) for entry in self._files[1:])
        # So all files together are at most one and a half times the base, and so is what a restore reads.
        if 2 * deltas > int(self._files[0]["rows"]):
            return False
        return all((previous / entry["name"]).is_file() for entry in self._files)

    def verify(self, directory: Path, files: list[dict[str, Any]]) -> None:
        """`CheckpointError` that names the file of `files` that is missing or damaged."""
        for entry in files:
            verify_file(directory / entry["name"], entry["hash"])

    def load(self, directory: Path, files: list[dict[str, Any]], array: Rows) -> Iterator[NDArray[np.int64]]:
        """Put the rows of verified `files` into `array`, giving them piece by piece; the next `save` builds on them."""
        total, width = array.shape
        for entry in files:
            for rows, records in read_rows(directory / entry["name"], entry["rows"], width, total):
                array[rows] = records
                yield rows
        self._files = list(files)
        # Beyond every name that is linked from here on.
        self._next = 1 + max(int(entry["name"].split("-")[1].split(".")[0]) for entry in files)
        try:
            self._token = _read(directory).token
        # The rows are verified by the manifest; without its note the next checkpoint is a full one, no more.
        except CheckpointError:
            self._token = ""


def require_same(directory: Path, manifest: dict[str, Any], expected: dict[str, Any], *lists: str) -> None:
    """`CheckpointError` that names the first field in which `manifest` is not as `expected`, or the list it lacks."""
    for name in lists:
        if not isinstance(manifest.get(name), list):
            raise CheckpointError(f"the manifest of the records in {directory} is damaged: it lacks {name}")
    for field, value in expected.items():
        if manifest.get(field) != value:
            raise CheckpointError(
                f"the records in {directory} have {field} {json.dumps(manifest.get(field))}, expected "
                f"{json.dumps(value)}; use a checkpoint of the same tables and codec"
            )
