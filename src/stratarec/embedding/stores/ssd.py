"""The SSD store (home ``log``): rows on a block device. Many rows are read at once, without the
page cache.

Two threads may be active at once: the caller reads or writes rows, and the compactor moves them.
`_lock` guards the locations, the segment table and the buffers, and is locked for microseconds.
`_moving` is locked while a thread moves rows, for a whole pass. To lock both, a thread locks
`_moving` first.

The working directory is scratch: after a crash nothing in it is trusted, and `restore` rebuilds it
from a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, RLock

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.arrays import allocate_bytes, clear_bits, resident_bytes, set_rows
from stratarec.embedding.stores.base import Manifest, StoreBytes, check_rows
from stratarec.embedding.stores.frequent import FrequentRecords
from stratarec.embedding.stores.row_files import DeltaChain, require_same
from stratarec.embedding.stores.ssd_layout import Locations, SsdConfig, SsdLayout, plan_layout
from stratarec.embedding.stores.ssd_segments import (
    Appender,
    Background,
    Compactor,
    NoRoom,
    SegmentFiles,
    background_due,
    check_segments,
    dead_weight,
    keep_segments,
)
from stratarec.errors import CheckpointError, StorageError
from stratarec.io.scratch import lock_store
from stratarec.kernels.blocks import BLOCK_ALIGNMENT, ReadBuffers, ReadRequest, aio, as_bytes, cpu, reads


class SsdRecords:
    """A `RecordStore` on a block device.

    Rows are appended to immutable segment files in large writes. A location of 4 bytes per row (8
    if there are too many cells) is kept in DRAM. Reads are direct and parallel, and the checksum of
    every record is verified. Segments with few live rows are rewritten in the background. A
    checkpoint consists of hard links to the segments and of the locations that changed.

    Parameters
    ----------
    directory : Path
        Directory of segment files, on a local disk; used by one store at a time. Existing segments
        are removed.
    rows : int
        R.
    record_bytes : int
        Bytes of one record.
    config : SsdConfig
        Sizes, read depth and budget.
    frequent : sequence of (int, int)
        For each table, its first row, and the number of its first rows whose records are in DRAM.

    Raises
    ------
    StorageError
        If the directory cannot be used.
    """

    kind = "log"

    def __init__(
        self,
        directory: Path,
        *,
        rows: int,
        record_bytes: int,
        config: SsdConfig | None = None,
        frequent: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.rows = rows
        self.record_bytes = record_bytes
        self.array: NDArray[np.uint8] | None = None
        self.bits: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
        self.config = config or SsdConfig()
        self.layout = plan_layout(rows, record_bytes, self.config)
        self._lock = RLock()
        self._moving = Lock()
        self._frequent = FrequentRecords(frequent, record_bytes)
        self._guard = lock_store(Path(directory))
        self._lay_out(Path(directory), self.layout)
        self._chain = DeltaChain()
        self._background = Background(self._compact_quietly)

    def _lay_out(self, directory: Path, layout: SsdLayout) -> None:
        """Initialize an empty store with segments of `layout`."""
        self.layout = layout
        self.segments = SegmentFiles(directory, layout, self.config.budget_bytes)
        self._front = Appender(self.segments, self._lock, -layout.segment_bytes)
        self._locations = Locations(layout)
        self._compactor = Compactor(self.segments, self._locations, self._lock)
        self._back = self._compactor.appender
        self._reader = Reader(layout, self.config.depth, self.segments.alignment or BLOCK_ALIGNMENT)

    # Reading

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        check_rows(self, rows, out)
        written = self._frequent.copy(rows, out)
        entries = np.flatnonzero(~written)
        cells = np.empty(len(entries), np.int64)
        with self._lock:
            self.segments.close_retired()
            front, back, shape = self._front.buffer, self._back.buffer, self.layout.shape
            flat = out.reshape(-1)
            count = cpu.find(
                rows, entries, self._locations.of_row, front, back, shape, flat, written, cells
            )
            # Copies, because the compactor may remove a segment while it is read. The file of a
            # removed segment stays open until `close_retired`.
            descriptors, sequences = self.segments.descriptors.copy(), self.segments.sequences.copy()
        if count:
            # In ascending order, neighbouring cells can share a read.
            order = np.argsort(cells[:count])
            request = ReadRequest(
                descriptors, sequences, cells[order], entries[order], rows, out.reshape(-1)
            )
            bad = self._reader.read(request)
            if bad >= 0:
                raise self.segments.damage(*divmod(bad, self.layout.segment_blocks))
        return written

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        check_rows(self, rows)
        with self._lock:
            written: NDArray[np.bool_] = self._locations.of_row[rows] != 0
        return written | self._frequent.locate(rows)[1]

    def check(self) -> None:
        with self._moving:
            for slot in self.segments.used.tolist():
                entry = self.segments.entry(slot)
                bad = self._reader.verify(
                    int(self.segments.descriptors[slot]), entry.sequence, entry.blocks
                )
                if bad >= 0:
                    raise self.segments.damage(slot, bad)

    # Writing

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        check_rows(self, rows, records)
        self._background.raise_error()
        places = self._frequent.places(rows)
        frequent = places >= 0
        if frequent.any():
            self._frequent.write(places[frequent], records[frequent])
        self._append(rows, records, np.flatnonzero(~frequent))

    def _append(
        self, rows: NDArray[np.int64], records: NDArray[np.uint8], entries: NDArray[np.int64]
    ) -> None:
        """Append ``records[entries]`` to the segments."""
        flat, done = records.reshape(-1), 0
        while True:
            with self._lock:
                index = self._locations.index(self.segments.live)
                done = cpu.append(rows, entries, flat, done, index, self._front.buffer, self.layout.shape)
            if done == len(entries):
                return
            self._spill()

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        raise ValueError("an SSD store's records are not addressable memory; call write instead")

    def _spill(self) -> None:
        """Make room in the write buffer; compact if files have no room or too many dead cells."""
        self._with_room(self._front.make_room)
        with self._lock:
            self.segments.close_retired()
        # The writer compacts if the thread cannot keep up; otherwise amplification would have no
        # bound.
        if dead_weight(self.segments, self.config.most_amplification):
            with self._moving:
                self._compact_while(lambda: dead_weight(self.segments, self.config.most_amplification))
        elif background_due(self.segments, self.config.most_amplification):
            self._background.wake()

    def _with_room(self, action: Callable[[], None]) -> None:
        """Call `action`, which needs file space; compact as long as there is too little space."""
        full = _attempt(action)
        if full is None:
            return
        with self._moving:
            while full is not None:
                if not self._gains_space():
                    raise self._full(full) from full
                full = _attempt(action)

    def _gains_space(self) -> bool:
        try:
            return self._compactor.rewrite_one()
        except NoRoom:
            return False

    def _full(self, reason: NoRoom) -> StorageError:
        segments, room = self.segments, os.statvfs(self.segments.directory)
        needed = self.layout.buffer_blocks * self.layout.block_bytes
        return StorageError(
            f"{segments.directory} is full ({reason}): {needed} more bytes are needed, "
            f"{segments.file_bytes} are in use, {room.f_bavail * room.f_frsize} are free, and compaction "
            "cannot free any: raise memory.block.budget, free disk space, or choose a smaller "
            "precision for the tables"
        )

    def flush(self) -> None:
        self._background.raise_error()
        self._with_room(self._front.write_out)

    # Compaction

    def compact(self) -> None:
        """Rewrite segments as long as one has more than 5 % dead cells."""
        with self._moving:
            self._compact_while(lambda: True)

    def _compact_quietly(self) -> None:
        """Compact in the background, a segment at a time, so that a checkpoint waits briefly."""
        due = True
        while due:
            with self._moving:
                due = background_due(self.segments, self.config.most_amplification)
                try:
                    due = due and self._compactor.rewrite_one()
                except NoRoom:
                    # The writer raises the error when it runs out of room.
                    return

    def _compact_while(self, due: Callable[[], bool]) -> None:
        try:
            while due() and self._compactor.rewrite_one():
                pass
        except NoRoom as full:
            raise self._full(full) from full

    # Checkpoints

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        for rows, records in self._frequent.changed():
            self._append(rows, records, np.arange(len(rows), dtype=np.int64))
        self.flush()
        with self._moving:
            try:
                self._front.seal()
                self._back.seal()
            except NoRoom as full:
                raise self._full(full) from full
            # Sealed first: segments in checkpoints never change again, so a link is as good as a
            # copy.
            last = previous if self._chain.continues(previous) else None
            # Segments before locations: saved locations must not point to missing segments.
            segments = keep_segments(self.segments, directory, last)
            files = self._chain.save(
                directory,
                previous,
                self._locations.as_bytes,
                self._locations.written_rows,
                lambda: set_rows(self._locations.changed),
            )
            clear_bits(self._locations.changed)
            self._frequent.mark_saved()
        return {**self._identity, **self.layout.segmentation, "segments": segments, "files": files}

    @property
    def _identity(self) -> Manifest:
        return {"format": 2, "layout": "log", **self.layout.identity}

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """Restore a checkpoint; segments are linked, and their checksums are verified by later
        reads and `check`.
        """
        require_same(directory, manifest, self._identity, "segments", "files")
        # The checkpoint is validated before anything in the store changes.
        layout = self.layout.adopting(manifest, self.config)
        entries = check_segments(self.segments, directory, manifest)
        self._chain.verify(directory, manifest["files"])
        with self._moving, self._lock:
            self._clear()
            if layout != self.layout:
                self._reader.close()
                self._lay_out(self.segments.directory, layout)
            for entry in entries:
                self.segments.adopt(directory / entry.name, entry)
            for _ in self._chain.load(directory, manifest["files"], self._locations.as_bytes):
                pass
            segments = self.segments
            bad = cpu.count_live(self._locations.of_row, segments.live, segments.blocks, self.layout.shape)
            if bad >= 0:
                raise CheckpointError(f"{directory}: row {bad} is in no segment; use another checkpoint")

    def clear(self) -> None:
        with self._moving, self._lock:
            self._clear()

    def _clear(self) -> None:
        self._front.reset()
        self._back.reset()
        self.segments.clear()
        self._locations.clear()
        self._frequent.clear()
        self._chain = DeltaChain()

    # Resources

    def memory(self) -> StoreBytes:
        with self._lock:
            buffers = (
                self._front.buffer.data,
                self._back.buffer.data,
                self._compactor.stride,
                self._reader.scratch,
            )
            dram = resident_bytes(self._locations.of_row, self._locations.changed, *buffers)
            files = sum(
                os.fstat(int(self.segments.descriptors[slot])).st_blocks * 512
                for slot in self.segments.used
            )
        return StoreBytes(dram_bytes=dram, block_bytes=files) + self._frequent.memory()

    def close(self) -> None:
        # First: the background thread uses the reader's files and both locks.
        self._background.close()
        self._reader.close()
        self.clear()
        self._frequent.close()
        self._guard.close()


def _attempt(action: Callable[[], None]) -> NoRoom | None:
    try:
        action()
    except NoRoom as full:
        return full
    return None


# Maximum bytes of neighbouring cells that one call reads. Larger reads gain nothing if rows are
# scattered, and `depth` buffers of this size count towards the memory budget.
_BUFFER_BYTES = 16 << 10


class Reader:
    """Reads records with up to `depth` asynchronous reads in flight; for one caller at a time.

    One thread issues asynchronous reads. Several reading threads would each take the interpreter
    lock from the training thread twice per call.

    Parameters
    ----------
    layout : SsdLayout
        Layout of the segments.
    depth : int
        Reads in flight, each with its own buffer.
    alignment : int
        Reads begin and end at multiples of this.
    """

    def __init__(self, layout: SsdLayout, depth: int, alignment: int) -> None:
        self._layout = layout
        self._alignment = alignment
        size = max(_BUFFER_BYTES // layout.block_bytes, 1) * layout.block_bytes
        self.scratch = allocate_bytes(size * depth).view(np.uint64)
        self._buffers = ReadBuffers(
            spans=np.zeros((depth, 4), np.int64),
            requests=np.zeros(depth * aio.REQUEST_WORDS, np.uint64),
            addresses=np.zeros(depth, np.int64),
            events=np.zeros(depth * aio.EVENT_WORDS, np.int64),
            words=self.scratch,
            data=as_bytes(self.scratch),
        )
        # One thread at a depth of 128 reads as fast as 32 to 64 threads, with less than half of
        # their processor time. A depth of 512 was 10 % faster than 128, for four times the buffers.
        self._context = aio.open_context(depth)

    def read(self, request: ReadRequest) -> int:
        """Read records into ``request.out``; return -1, or a block that failed."""
        return int(
            reads.read_cells(self._context, request, self._buffers, self._alignment, self._layout.shape)
        )

    def verify(self, descriptor: int, sequence: int, blocks: int) -> int:
        """Verify all blocks of a segment; return -1, or the block that failed."""
        place = np.int32(descriptor), np.uint64(sequence), 0, blocks
        return int(cpu.verify_segment(*place, self.scratch, self._layout.shape))

    def close(self) -> None:
        """Release the system's context for asynchronous reads."""
        aio.close_context(self._context)
        self._context = 0
