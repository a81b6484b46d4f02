"""The rows that are in slots, as records by slot number: what a checkpoint of a cache holds besides its home.

A record is ``[row int64, stamp int32, count uint32, float32 row]``; a slot that was emptied has row -1. Which slots
changed since the last checkpoint follows from their stamps, so training keeps no marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.cache.directory import Directory
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.slots import SlotMemory
from stratarec.embedding.stores.deltas import Chain
from stratarec.embedding.stores.row_file import read_rows, verify_file
from stratarec.embedding.tables.row_arrays import FloatRows, Indices
from stratarec.errors import CheckpointError, TrainingError
from stratarec.io.atomic import make_directory

_HEAD = np.dtype([("row", "<i8"), ("stamp", "<i4"), ("count", "<u4")])
_FOLDER = "slots"


class SlotRecords:
    """Saves and restores what a directory and its slots hold, in a chain of files.

    Parameters
    ----------
    directory, memory
        Of the cache.
    codec : RecordCodec
        Of float32 rows.
    """

    def __init__(self, directory: Directory, memory: SlotMemory, codec: RecordCodec) -> None:
        self._directory, self._memory, self._codec = directory, memory, codec
        self._chain = Chain()
        self._saved_at = 0
        self.shape = (directory.slots, _HEAD.itemsize + codec.record_bytes)

    def save(self, directory: Path, previous: Path | None, settled: int) -> dict[str, Any]:
        """Write the slots, or those stamped since `previous`, into ``<directory>/slots``; returns the manifest.

        Parameters
        ----------
        settled : int
            As in `TableGroup.save`.
        """
        folder = directory / _FOLDER
        make_directory(folder)
        files = self._chain.save(
            folder,
            None if previous is None else previous / _FOLDER,
            self,
            self._directory.used,
            lambda: self._directory.stamped_since(self._saved_at),
        )
        self._saved_at = settled
        return {"files": files, "record_bytes": self.shape[1]}

    def restore(self, directory: Path, manifest: Mapping[str, Any], stamp: int) -> None:
        """Fill an empty directory and its slots by what `save` wrote."""
        folder = directory / _FOLDER
        self._chain.verify(folder, manifest["files"])
        # Pieces are put in place as they are asked for.
        for _ in self._chain.load(folder, manifest["files"], self):
            pass
        # Names and sizes were checked, not what the slots say of each other: one row must not be in two.
        fault = self._directory.fault(stamp)
        if fault:
            raise CheckpointError(f"{folder} is damaged: {fault}; use another checkpoint")
        self._saved_at = stamp

    def shift(self, by: int) -> None:
        """See `Directory.shift`."""
        self._saved_at = max(self._saved_at - by, 0)

    def __getitem__(self, slots: Indices, /) -> NDArray[np.uint8]:
        """Records of slots: what a file is written from."""
        rows = self._directory.rows_in(slots)
        head = np.empty(len(slots), dtype=_HEAD)
        head["row"], head["stamp"] = rows, self._directory.stamps_in(slots)
        head["count"] = self._directory.counts_in(slots)
        floats = np.zeros((len(slots), self._codec.record_bytes), dtype=np.uint8)
        held = np.flatnonzero(rows >= 0)
        # float32 is not rounded: whose noise it would be does not matter.
        keys = np.zeros(len(held), dtype=np.uint64)
        bad = self._memory.encode(self._codec, slots[held], floats, held, keys, 0)
        if bad >= 0:
            raise TrainingError(
                f"row {rows[held[bad]]} of the cached tables of width {self._codec.width} is not finite"
            )
        return np.concatenate([head.view(np.uint8).reshape(len(slots), -1), floats], axis=1)

    def __setitem__(self, slots: Indices, records: NDArray[np.uint8], /) -> None:
        """Let slots hold what their records say."""
        head, floats = _split(records)
        self._directory.adopt(slots, head["row"], head["stamp"], head["count"])
        held = np.flatnonzero(head["row"] >= 0)
        self._memory.decode(self._codec, floats, held, slots[held])


def _split(records: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    head = np.ascontiguousarray(records[:, : _HEAD.itemsize]).view(_HEAD)[:, 0]
    return head, np.ascontiguousarray(records[:, _HEAD.itemsize :])


def saved_slots(
    directory: Path, manifest: Mapping[str, Any], codec: RecordCodec, *, slots: int, rows: int
) -> Iterator[tuple[Indices, FloatRows]]:
    """The rows that were in slots when a checkpoint was written, piece by piece, each once.

    Parameters
    ----------
    slots, rows : int
        How many there are of each.
    """
    folder, files, width = directory / _FOLDER, manifest["files"], int(manifest["record_bytes"])
    exact = codec.exact()
    for entry in files:
        verify_file(folder / entry["name"], entry["hash"])
    # For each slot the last file that has it: a row may have been in another slot before.
    newest = np.full(slots, -1, dtype=np.int16)
    for number, entry in enumerate(files):
        for places, _ in read_rows(folder / entry["name"], entry["rows"], width, slots):
            newest[places] = number
    for number, entry in enumerate(files):
        for places, records in read_rows(folder / entry["name"], entry["rows"], width, slots):
            head, floats = _split(records)
            if (head["row"] >= rows).any():
                raise CheckpointError(f"{folder / entry['name']} has rows beyond 0..{rows - 1}; use another checkpoint")
            valid = np.flatnonzero((newest[places] == number) & (head["row"] >= 0))
            found = FloatRows.allocate(len(valid), codec.width, **codec.layout.kept)
            exact.decode(floats, valid, found, np.arange(len(valid), dtype=np.int64))
            yield head["row"][valid].astype(np.int64), found
