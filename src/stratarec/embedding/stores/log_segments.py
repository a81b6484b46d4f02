"""Segment files of a log store, and the buffer that gathers records before they are written.

Segments are created, appended to, sealed and removed, never changed in place. A segment has a *slot*, which numbers its
cells and is reused after the segment is removed, and a *sequence* number, which names its file, seeds its checksums and
is never reused. Checkpoints contain hard links to the same files.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.arrays import allocate_bytes
from stratarec.embedding.stores.log_layout import BlockLayout
from stratarec.embedding.stores.row_files import link_or_copy
from stratarec.errors import CheckpointError, StorageError
from stratarec.io.atomic import make_directory, storage_error
from stratarec.io.sealed import own_file
from stratarec.kernels.blocks import Buffer, as_bytes, as_tags, cpu

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(Exception):
    """A segment cannot grow: the budget is spent or the file system is full. Compaction may help."""


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """A sealed segment as a checkpoint's manifest has it."""

    slot: int
    sequence: int
    blocks: int

    @property
    def name(self) -> str:
        """Of the file."""
        return f"segment-{self.sequence:010d}.log"


class Segments:
    """The segment files of one store.

    The arrays are indexed by slot. `descriptors` is -1 where there is no segment; kernels read from copies of it, so
    that a file removed under a running read stays open until the read is over (`retired`).
    """

    def __init__(self, directory: Path, layout: BlockLayout, budget_bytes: int) -> None:
        self.directory, self.layout, self.budget_bytes = directory, layout, budget_bytes
        self.descriptors = np.full(layout.slots, -1, np.int32)
        self.sequences = np.zeros(layout.slots, np.uint64)
        self.blocks = np.zeros(layout.slots, np.int64)
        self.live = np.zeros(layout.slots, np.int64)
        self.sealed = np.zeros(layout.slots, np.bool_)
        self.synced = np.zeros(layout.slots, np.bool_)
        self.retired: list[int] = []
        self.next_sequence = 1
        self.bytes_written = 0
        # A row is read once and kept by the caches above: pages of the system's cache would hold it a second time, in
        # memory that no budget counts.
        self._direct = hasattr(os, "O_DIRECT")
        make_directory(directory)
        # What a process that died left behind: no checkpoint refers to this directory.
        for path in directory.glob("segment-*.log"):
            path.unlink()

    def entry(self, slot: int) -> SegmentEntry:
        """The segment in `slot`."""
        return SegmentEntry(slot=slot, sequence=int(self.sequences[slot]), blocks=int(self.blocks[slot]))

    def path(self, slot: int) -> Path:
        """The file of the segment in `slot`."""
        return self.directory / self.entry(slot).name

    @property
    def used(self) -> NDArray[np.int64]:
        """Slots that hold a segment."""
        return np.flatnonzero(self.descriptors >= 0)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segments."""
        return int(self.blocks.sum()) * self.layout.block_bytes

    def create(self) -> int:
        """A new empty segment's slot; `NoRoom` when every slot is taken."""
        free = np.flatnonzero(self.descriptors < 0)
        if not len(free):
            raise NoRoom(f"all {self.layout.slots} segments are in use")
        slot = int(free[0])
        self.sequences[slot], self.next_sequence = self.next_sequence, self.next_sequence + 1
        self.blocks[slot] = self.live[slot] = 0
        self.sealed[slot] = self.synced[slot] = False
        # Exclusive: a file of that name would be another store's.
        self.descriptors[slot] = self._open(self.path(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return slot

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC
        try:
            if self._direct:
                try:
                    return open_file(path, flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                # tmpfs and some network file systems.
                self._leave_direct()
                if flags & os.O_CREAT:
                    path.unlink(missing_ok=True)
            return open_file(path, flags)
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoom(error.strerror) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise StorageError(
                    f"{path} cannot be opened: {error.strerror}, and {len(self.used)} segments of this log are; raise "
                    "the limit (ulimit -n)"
                ) from error
            raise storage_error(path, error) from error

    def refuses_direct(self, slot: int) -> bool:
        """Whether the file system takes direct input and output when a file is opened and refuses it now.

        If so, all files do without it from here on, and what failed may be tried again.
        """
        if not self._direct:
            return False
        try:
            os.preadv(int(self.descriptors[slot]), [mmap.mmap(-1, self.layout.block_bytes)], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._leave_direct()
                return True
        return False

    def _leave_direct(self) -> None:
        self._direct = False
        for descriptor in self.descriptors[self.used].tolist():
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        warnings.warn(
            f"the file system of {self.directory} refuses direct input and output: reads go through the page cache, "
            "whose memory no figure here counts; name a directory on a local disk",
            RuntimeWarning,
            stacklevel=3,
        )

    def append(self, slot: int, words: NDArray[np.uint64], allowance: int) -> None:
        """Write whole blocks to the end of a segment.

        Parameters
        ----------
        words : ndarray
            ``[blocks * block_words]`` uint64, page-aligned.
        allowance : int
            Bytes by which the budget may be exceeded: compaction must write before it can free.

        Raises
        ------
        NoRoom
            When the budget or the file system has no room; the segment is as it was.
        """
        if self.budget_bytes and self.file_bytes + words.nbytes > self.budget_bytes + allowance:
            raise NoRoom(f"its share of memory.block.budget is {self.budget_bytes}")
        descriptor, start = int(self.descriptors[slot]), int(self.blocks[slot]) * self.layout.block_bytes
        try:
            self._write(descriptor, words.view(np.uint8).data, start)
        except OSError as error:
            # What was written of it has no place in `blocks`, and would shift whatever is appended next.
            os.ftruncate(descriptor, start)
            if error.errno in _FULL:
                raise NoRoom(error.strerror) from error
            raise storage_error(self.path(slot), error) from error

    def _write(self, descriptor: int, content: memoryview, start: int) -> None:
        done = 0
        while done < len(content):
            done += self._write_some(descriptor, content[done:], start + done)

    def _write_some(self, descriptor: int, content: memoryview, start: int) -> int:
        try:
            return os.pwrite(descriptor, content, start)
        except OSError as error:
            # Direct writes may be refused at once, or for the rest of one that was cut short.
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._leave_direct()
            return 0

    def remove(self, slot: int) -> None:
        """Remove a segment without live rows; its descriptor stays open until `close_retired`."""
        assert not self.live[slot], f"segment {self.path(slot)} has {self.live[slot]} live rows"
        # The name goes at once, which gives space back as soon as no read is left; a checkpoint has its own link.
        self.path(slot).unlink(missing_ok=True)
        self.retired.append(int(self.descriptors[slot]))
        self.descriptors[slot] = -1
        self.blocks[slot] = 0
        self.sealed[slot] = False

    def close_retired(self) -> None:
        """Close the files of removed segments; no read may be running."""
        while self.retired:
            os.close(self.retired.pop())

    def sync(self, slot: int) -> None:
        """Make a sealed segment durable."""
        if not self.synced[slot]:
            # Once: a sealed segment does not change. Nothing else is synced, since after a crash the working directory
            # is not trusted.
            os.fsync(int(self.descriptors[slot]))
            self.synced[slot] = True

    def adopt(self, source: Path, entry: SegmentEntry) -> None:
        """Take a checkpoint's segment file over, under another name of the same file."""
        path = self.directory / entry.name
        # A link, not the checkpoint's own name: this one is removed when compaction has emptied the segment.
        path.unlink(missing_ok=True)
        link_or_copy(source, path)
        self.descriptors[entry.slot] = self._open(path, os.O_RDONLY)
        self.sequences[entry.slot], self.blocks[entry.slot] = entry.sequence, entry.blocks
        self.sealed[entry.slot] = self.synced[entry.slot] = True
        # Never one that was used before: checksums are seeded by it, and files of checkpoints are named by it.
        self.next_sequence = max(self.next_sequence, entry.sequence + 1)

    def clear(self) -> None:
        """Remove every segment."""
        self.live[:] = 0
        for slot in self.used:
            self.remove(int(slot))
        self.close_retired()

    def damage(self, slot: int, block: int) -> StorageError:
        """What is wrong with a block that could not be read, in words."""
        path, entry, size = self.path(slot), self.entry(slot), self.layout.block_bytes
        where = f"{path}: block {block} of segment {entry.sequence} (offset {block * size})"
        try:
            # Looked at again only to say what is wrong: the read itself knows no more than that it failed.
            there = path.stat().st_size
            if there < entry.blocks * size:
                return StorageError(f"{where} is lost: the file is truncated to {there} of {entry.blocks * size} bytes")
            with path.open("rb") as file:
                os.pread(file.fileno(), size, block * size)
        except OSError as error:
            return StorageError(f"{where} cannot be read: {error.strerror}; restore a checkpoint")
        return StorageError(f"{where} is damaged: its checksum does not match; restore a checkpoint")


def open_file(path: Path, flags: int) -> int:
    """`os.open`, raising the process's own limit of open files where the system lets it: each segment is a file."""
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft in (hard, resource.RLIM_INFINITY):
            raise
        more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        return os.open(path, flags, 0o644)


def keep_segments(segments: Segments, directory: Path, last: Path | None) -> list[dict[str, Any]]:
    """Sync the segments, all sealed, and link them into `directory`; their entries for the manifest.

    A file that the last checkpoint has too is linked from there: the working directory may be on another file system,
    from which it was copied once already.
    """
    entries = []
    for slot in segments.used:
        segments.sync(int(slot))
        entry = segments.entry(int(slot))
        before = None if last is None else last / entry.name
        source = before if before is not None and _same(before, segments, entry) else segments.path(int(slot))
        link_or_copy(source, directory / entry.name)
        entries.append(asdict(entry))
    return entries


def _same(path: Path, segments: Segments, entry: SegmentEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.blocks * segments.layout.block_bytes


def check_segments(segments: Segments, directory: Path, manifest: dict[str, Any]) -> list[SegmentEntry]:
    """The segments of a manifest; `CheckpointError` names the file that is missing or truncated."""
    entries = [SegmentEntry(**fields) for fields in manifest["segments"]]
    for entry in entries:
        path, size = directory / entry.name, entry.blocks * segments.layout.block_bytes
        try:
            own_file(directory, entry.name)
        except ValueError as error:
            raise CheckpointError(f"{error}; use another checkpoint") from error
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, expected {size}; use another checkpoint"
            )
    return entries


class Appender:
    """Gathers records in blocks that already have their place in a segment, and writes them many at a time.

    `buffer` is what kernels read and advance. It is looked at under `lock`, which is not held while a full buffer is
    written: nobody but its owner adds to a buffer.
    """

    def __init__(self, segments: Segments, lock: RLock, allowance: int) -> None:
        layout = segments.layout
        self._segments, self._lock, self._allowance = segments, lock, allowance
        self._layout = layout
        self._words = allocate_bytes(layout.buffer_blocks * layout.block_bytes).view(np.uint64)
        self._state = np.zeros(4, np.int64)
        self.buffer = Buffer(self._state, as_tags(self._words), as_bytes(self._words))
        self.slot = -1

    def make_room(self) -> None:
        """Write a full buffer out and open a segment where none is.

        Raises
        ------
        NoRoom, StorageError
            When that cannot be done; the buffer is as it was and its rows are still read from it.
        """
        if self.slot >= 0 and self._state[cpu.NEXT] == self._state[cpu.LIMIT]:
            self.write_out()
        if self.slot < 0:
            with self._lock:
                self.slot = self._segments.create()
                # Cells have numbers before they are written: a row in the buffer has its location already.
                base = self.slot * self._layout.segment_blocks * self._layout.per_block
                self._state[:] = (base, 0, 0, self._layout.buffer_blocks * self._layout.per_block)

    def write_out(self) -> None:
        """Write what the buffer holds, the last block padded with empty cells; a full segment is sealed."""
        cells = int(self._state[cpu.NEXT] - self._state[cpu.FIRST])
        if cells:
            blocks = -(-cells // self._layout.per_block)
            words = self._words[: blocks * self._layout.block_bytes // 8]
            entry = self._segments.entry(self.slot)
            # Without the lock: the cells are filled, and readers only copy them.
            cpu.seal(words, self._layout.shape, blocks, np.uint64(entry.sequence), entry.blocks)
            self._segments.append(self.slot, words, self._allowance)
            # Only now do readers look for these rows in the file: it holds them since the line above. The buffer is
            # zeroed because an empty cell's tag is 0.
            with self._lock:
                words[:] = 0
                self._segments.bytes_written += words.nbytes
                self._segments.blocks[self.slot] += blocks
                first = int(self._segments.blocks[self.slot]) * self._layout.per_block
                end = self._layout.segment_blocks * self._layout.per_block
                self._state[1:] = (first, first, min(first + self._layout.buffer_blocks * self._layout.per_block, end))
        if self.slot >= 0 and self._segments.blocks[self.slot] == self._layout.segment_blocks:
            self._seal()

    def seal(self) -> None:
        """Write what the buffer holds and close the segment, however short."""
        if self.slot >= 0:
            self.write_out()
        if self.slot >= 0:
            self._seal()

    def _seal(self) -> None:
        with self._lock:
            self._segments.sealed[self.slot] = True
            # An empty file cannot be told from a truncated one.
            if not self._segments.blocks[self.slot]:
                self._segments.remove(self.slot)
            self.forget()

    def forget(self) -> None:
        """Be without a segment; what the buffer held is gone."""
        self.slot = -1
        self._state[:] = 0
        self._words[:] = 0
