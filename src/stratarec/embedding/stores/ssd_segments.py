"""Segment files of an SSD store, the buffer that gathers records before they are written, and
compaction.

Segments are created, appended to, sealed and removed, never changed in place. A segment has a
*slot*, which numbers its cells and is reused after the segment is removed, and a *sequence* number,
which names its file, seeds its checksums and is never reused. Checkpoints contain hard links to the
same files.

Compaction is greedy: the segment with the fewest live rows costs the least to move for the space
that it frees. Moved rows go to separate segments, because rows that survived one compaction are
likely to survive the next.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.arrays import allocate_bytes
from stratarec.embedding.stores.row_files import link_or_copy
from stratarec.embedding.stores.ssd_layout import Locations, SsdLayout
from stratarec.errors import CheckpointError, StorageError
from stratarec.io.atomic import make_directory, storage_error
from stratarec.io.sealed import regular_file_below
from stratarec.kernels.blocks import BLOCK_ALIGNMENT, Buffer, as_bytes, cpu

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(Exception):
    """A segment cannot grow because the budget is used up or the file system is full. Compaction
    may help.
    """


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """Entry of a sealed segment in a checkpoint's manifest."""

    slot: int
    """Slot of the segment, which is its index in the arrays of `SegmentFiles`."""
    sequence: int
    """Number of the segment in the order of creation, from 1; it is never reused."""
    blocks: int
    """Number of blocks that were written."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"segment-{self.sequence:010d}.log"


class SegmentFiles:
    """The segment files of one store.

    Parameters
    ----------
    directory : Path
        Directory of the files; segments that are left in it are removed.
    layout : SsdLayout
        Sizes of blocks and segments, and number of slots.
    budget_bytes : int
        Maximum bytes of all files; 0 for no limit.

    Notes
    -----
    The arrays are indexed by slot. `descriptors` is -1 for a slot without a segment. Kernels read
    from copies of `descriptors`, so a file that is removed during a read stays open until the read
    is over (`retired`).
    """

    def __init__(self, directory: Path, layout: SsdLayout, budget_bytes: int) -> None:
        self.directory = directory
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.descriptors = np.full(layout.slots, -1, np.int32)
        self.sequences = np.zeros(layout.slots, np.uint64)
        self.blocks = np.zeros(layout.slots, np.int64)
        self.live = np.zeros(layout.slots, np.int64)
        self.sealed = np.zeros(layout.slots, np.bool_)
        self.synced = np.zeros(layout.slots, np.bool_)
        self.retired: list[int] = []
        self.next_sequence = 1
        self.bytes_written = 0
        # A row is read once and then cached in level 0: the page cache would store it a second
        # time, in memory that no budget counts.
        self._direct = getattr(os, "O_DIRECT", 0)
        make_directory(directory)
        # Left by a process that died: no checkpoint refers to this directory.
        for path in directory.glob("segment-*.log"):
            path.unlink()
        self.alignment = direct_alignment(directory) if self._direct else 0
        """Alignment of reads: the device's logical block, or 0 without direct reads."""
        if self._direct and not self.alignment:
            self._direct = 0
            warnings.warn(
                f"the file system of {directory} does not support direct I/O: reads use the page cache, "
                "whose memory the reported figures do not include; choose a directory on a local disk",
                RuntimeWarning,
                stacklevel=3,
            )

    def entry(self, slot: int) -> SegmentEntry:
        """Return the entry of the segment in `slot`."""
        return SegmentEntry(slot=slot, sequence=int(self.sequences[slot]), blocks=int(self.blocks[slot]))

    def path(self, slot: int) -> Path:
        """Return the file of the segment in `slot`."""
        return self.directory / self.entry(slot).name

    @property
    def used(self) -> NDArray[np.int64]:
        """Slots with a segment."""
        return np.flatnonzero(self.descriptors >= 0)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return int(self.blocks.sum()) * self.layout.block_bytes

    def create(self) -> int:
        """Create an empty segment and return its slot; `NoRoom` if every slot is in use."""
        free = np.flatnonzero(self.descriptors < 0)
        if not len(free):
            raise NoRoom(f"all {self.layout.slots} segments are in use")
        slot = int(free[0])
        self.sequences[slot], self.next_sequence = self.next_sequence, self.next_sequence + 1
        self.blocks[slot] = self.live[slot] = 0
        self.sealed[slot] = self.synced[slot] = False
        # Exclusive: an existing file of that name would belong to another store.
        self.descriptors[slot] = self._open(self.path(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return slot

    def _open(self, path: Path, flags: int) -> int:
        try:
            return open_file(path, flags | os.O_CLOEXEC | self._direct)
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoom(error.strerror) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise StorageError(
                    f"{path} cannot be opened: {error.strerror}; this SSD store has {len(self.used)} open "
                    "segments: raise the limit of open files (ulimit -n)"
                ) from error
            raise storage_error(path, error) from error

    def append(self, slot: int, words: NDArray[np.uint64], allowance: int) -> None:
        """Write whole blocks to the end of a segment.

        Parameters
        ----------
        slot : int
            Slot of the segment.
        words : ndarray
            ``[blocks * block_words]`` uint64, page-aligned.
        allowance : int
            Bytes by which the budget may be exceeded: compaction writes before it frees space.

        Raises
        ------
        NoRoom
            If the budget or the file system has no room; the segment is unchanged.
        """
        if self.budget_bytes and self.file_bytes + words.nbytes > self.budget_bytes + allowance:
            raise NoRoom(f"its share of memory.block.budget is {self.budget_bytes}")
        descriptor, start = int(self.descriptors[slot]), int(self.blocks[slot]) * self.layout.block_bytes
        try:
            # On a full file system, fewer bytes may be written without an error.
            if os.pwrite(descriptor, words.view(np.uint8).data, start) < words.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # A partial write is not counted in `blocks` and would shift the blocks that are
            # appended next.
            os.ftruncate(descriptor, start)
            if error.errno in _FULL:
                raise NoRoom(error.strerror) from error
            raise storage_error(self.path(slot), error) from error

    def remove(self, slot: int) -> None:
        """Remove the segment in `slot`, without live rows; `close_retired` closes its file."""
        assert not self.live[slot], f"segment {self.path(slot)} has {self.live[slot]} live rows"
        # Unlinked at once, so space is freed when the last read ends; a checkpoint has its own
        # link.
        self.path(slot).unlink(missing_ok=True)
        self.retired.append(int(self.descriptors[slot]))
        self.descriptors[slot] = -1
        self.blocks[slot] = 0
        self.sealed[slot] = False

    def close_retired(self) -> None:
        """Close the files of removed segments; no read may be in progress."""
        while self.retired:
            os.close(self.retired.pop())

    def sync(self, slot: int) -> None:
        """Make the sealed segment in `slot` durable."""
        if not self.synced[slot]:
            # Once: a sealed segment does not change. Nothing else is synced, because the working
            # directory is not trusted after a crash.
            os.fsync(int(self.descriptors[slot]))
            self.synced[slot] = True

    def adopt(self, source: Path, entry: SegmentEntry) -> None:
        """Add the segment `entry` of a checkpoint through a hard link to its file `source`."""
        path = self.directory / entry.name
        # A separate link, because compaction removes the file of an empty segment; the checkpoint
        # keeps its own link.
        path.unlink(missing_ok=True)
        link_or_copy(source, path)
        self.descriptors[entry.slot] = self._open(path, os.O_RDONLY)
        self.sequences[entry.slot], self.blocks[entry.slot] = entry.sequence, entry.blocks
        self.sealed[entry.slot] = self.synced[entry.slot] = True
        # Never reused: it seeds checksums, and files of checkpoints are named by it.
        self.next_sequence = max(self.next_sequence, entry.sequence + 1)

    def clear(self) -> None:
        """Remove every segment."""
        self.live[:] = 0
        for slot in self.used:
            self.remove(int(slot))
        self.close_retired()

    def damage(self, slot: int, block: int) -> StorageError:
        """Return the error for unreadable block number `block` of the segment in `slot`."""
        path, entry, size = self.path(slot), self.entry(slot), self.layout.block_bytes
        where = f"{path}: block {block} of segment {entry.sequence} (offset {block * size})"
        try:
            # Read again to find the cause: the failed read itself does not report it.
            found_bytes = path.stat().st_size
            if found_bytes < entry.blocks * size:
                return StorageError(
                    f"{where} is lost: file truncated to {found_bytes} of {entry.blocks * size} bytes"
                )
            with path.open("rb") as file:
                os.pread(file.fileno(), size, block * size)
        except OSError as error:
            return StorageError(f"{where} cannot be read: {error.strerror}; restore a checkpoint")
        return StorageError(f"{where} is damaged: its checksum does not match; restore a checkpoint")


# Logical blocks of devices. The smallest comes first: a read moves and pins fewer bytes.
_ALIGNMENTS = (512, BLOCK_ALIGNMENT)


def direct_alignment(directory: Path) -> int:
    """Return the alignment for reads around the page cache in `directory`; 0 if impossible."""
    path, block = directory / "direct-probe", mmap.mmap(-1, BLOCK_ALIGNMENT)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            # Some file systems accept the flag and refuse the first access.
            os.pwrite(descriptor, block, 0)
            return next((size for size in _ALIGNMENTS if _can_read(descriptor, block, size)), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Other errors will be raised for the first segment.
        return 0 if error.errno == errno.EINVAL else BLOCK_ALIGNMENT
    finally:
        path.unlink(missing_ok=True)


def _can_read(descriptor: int, block: mmap.mmap, size: int) -> bool:
    with memoryview(block) as view:
        try:
            return os.preadv(descriptor, [view[-size:]], BLOCK_ALIGNMENT - size) == size
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False


def open_file(path: Path, flags: int) -> int:
    """Open a file; if necessary and allowed, raise the limit of open files (one per segment)."""
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft in (hard, resource.RLIM_INFINITY):
            raise
        more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        return os.open(path, flags, 0o644)


def keep_segments(segments: SegmentFiles, directory: Path, last: Path | None) -> list[dict[str, Any]]:
    """Sync the sealed segments and link them into `directory`; return their entries for the
    manifest.

    A file that the last checkpoint contains is linked from there: the working directory may be on
    another file system, from which the file was already copied once.
    """
    entries = []
    for slot in segments.used:
        segments.sync(int(slot))
        entry = segments.entry(int(slot))
        before = None if last is None else last / entry.name
        source = (
            before if before is not None and _same(before, segments, entry) else segments.path(int(slot))
        )
        link_or_copy(source, directory / entry.name)
        entries.append(asdict(entry))
    return entries


def _same(path: Path, segments: SegmentFiles, entry: SegmentEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.blocks * segments.layout.block_bytes


def check_segments(segments: SegmentFiles, directory: Path, manifest: dict[str, Any]) -> list[SegmentEntry]:
    """Return the segments of the checkpoint in `directory`, after checking the sizes of their
    files.

    Raises
    ------
    CheckpointError
        If a file is missing or truncated. The message names the file.
    """
    entries = [SegmentEntry(**fields) for fields in manifest["segments"]]
    for entry in entries:
        path, size = directory / entry.name, entry.blocks * segments.layout.block_bytes
        try:
            regular_file_below(directory, entry.name)
        except ValueError as error:
            raise CheckpointError(f"{error}; use another checkpoint") from error
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, expected "
                f"{size}; use another checkpoint"
            )
    return entries


class Appender:
    """Gathers records in blocks that already have their place in a segment, and writes many blocks
    at a time.

    Parameters
    ----------
    segments : SegmentFiles
        Segment files of the store.
    lock : RLock
        Lock of the store.
    allowance : int
        Bytes by which the budget may be exceeded (`SegmentFiles.append`).

    Notes
    -----
    Kernels read and fill `buffer` under `lock`. A full buffer is written without the lock, because
    only the owner adds to a buffer.
    """

    def __init__(self, segments: SegmentFiles, lock: RLock, allowance: int) -> None:
        layout = segments.layout
        self._segments = segments
        self._lock = lock
        self._allowance = allowance
        self._layout = layout
        self._words = allocate_bytes(layout.buffer_blocks * layout.block_bytes).view(np.uint64)
        self._state = np.zeros(4, np.int64)
        self.buffer = Buffer(self._state, self._words, as_bytes(self._words))
        self.slot = -1

    def make_room(self) -> None:
        """Write out a full buffer, and open a segment if there is none.

        Raises
        ------
        NoRoom, StorageError
            If that fails; the buffer is unchanged and its rows are still read from it.
        """
        if self.slot >= 0 and self._state[cpu.NEXT] == self._state[cpu.LIMIT]:
            self.write_out()
        if self.slot < 0:
            with self._lock:
                self.slot = self._segments.create()
                # Cells are numbered before they are written: a row in the buffer already has its
                # location.
                base = self.slot * self._layout.segment_blocks * self._layout.per_block
                self._state[:] = (base, 0, 0, self._layout.buffer_blocks * self._layout.per_block)

    def write_out(self) -> None:
        """Write the contents of the buffer, padding the last block with empty cells; seal the
        segment if it is full.
        """
        cells = int(self._state[cpu.NEXT] - self._state[cpu.FIRST])
        if cells:
            blocks = -(-cells // self._layout.per_block)
            words = self._words[: blocks * self._layout.block_bytes // 8]
            entry = self._segments.entry(self.slot)
            # Without the lock: the cells are complete, and readers only copy them.
            cpu.seal(words, self._layout.shape, blocks, np.uint64(entry.sequence), entry.blocks)
            self._segments.append(self.slot, words, self._allowance)
            # From here on readers look for these rows in the file, which contains them since the
            # line above. The buffer is zeroed because the tag of an empty cell is 0, and so is the
            # padding of cells.
            with self._lock:
                words[:] = 0
                self._segments.bytes_written += words.nbytes
                self._segments.blocks[self.slot] += blocks
                first = int(self._segments.blocks[self.slot]) * self._layout.per_block
                end = self._layout.segment_blocks * self._layout.per_block
                self._state[1:] = (
                    first,
                    first,
                    min(first + self._layout.buffer_blocks * self._layout.per_block, end),
                )
        if self.slot >= 0 and self._segments.blocks[self.slot] == self._layout.segment_blocks:
            self._seal()

    def seal(self) -> None:
        """Write the contents of the buffer and seal the segment, even if it is not full."""
        if self.slot >= 0:
            self.write_out()
        if self.slot >= 0:
            self._seal()

    def _seal(self) -> None:
        with self._lock:
            self._segments.sealed[self.slot] = True
            # An empty file cannot be distinguished from a truncated one.
            if not self._segments.blocks[self.slot]:
                self._segments.remove(self.slot)
            self.reset()

    def reset(self) -> None:
        """Discard the contents of the buffer and the reference to the segment."""
        self.slot = -1
        self._state[:] = 0
        self._words[:] = 0


# Background compaction begins slightly before the bound, so that writers seldom wait for it.
_EARLY = 0.96
# Bytes that are read and moved at a time, under the lock.
_STRIDE_BYTES = 1 << 20
# Rewriting a segment with a larger share of live rows costs more than it frees.
_MOST_LIVE = 0.95


def dead_weight(segments: SegmentFiles, most_amplification: float) -> bool:
    """Whether there are over `most_amplification` cells per live row, four segments not counted."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 4 * segments.layout.segment_blocks * segments.layout.per_block
    return cells > most_amplification * int(segments.live.sum()) + free


def background_due(segments: SegmentFiles, most_amplification: float) -> bool:
    """Whether the background thread should compact: space is near its bound, or slots are few."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 2 * segments.layout.segment_blocks * segments.layout.per_block
    # Two segments instead of the four of `dead_weight`: the thread should finish before writers
    # must wait.
    early = cells > _EARLY * most_amplification * int(segments.live.sum()) + free
    return early or len(segments.used) > segments.layout.slots - 12


def next_to_rewrite(segments: SegmentFiles) -> int:
    """Return the slot of the segment to rewrite next, or -1 if none would free space."""
    sealed = np.flatnonzero(segments.sealed)
    if not len(sealed):
        return -1
    live, cells = segments.live[sealed], segments.blocks[sealed] * segments.layout.per_block
    # If slots run out instead of bytes (short segments that checkpoints sealed use one each), the
    # segment with the fewest live rows is selected, whatever its share of live rows.
    if len(segments.used) > segments.layout.slots - 12:
        return int(sealed[np.argmin(live)])
    best = int(np.argmin(live / cells))
    return int(sealed[best]) if live[best] <= _MOST_LIVE * cells[best] else -1


class Compactor:
    """Moves live rows out of segments; one caller at a time."""

    def __init__(self, segments: SegmentFiles, locations: Locations, lock: RLock) -> None:
        self._segments = segments
        self._locations = locations
        self._lock = lock
        self.appender = Appender(segments, lock, allowance=0)
        layout = segments.layout
        self.stride = allocate_bytes(max(_STRIDE_BYTES // layout.block_bytes, 1) * layout.block_bytes).view(
            np.uint64
        )

    def rewrite_one(self) -> bool:
        """Rewrite the segment that frees the most space; return False if none frees any.

        Raises
        ------
        NoRoom
            If there is no room for the moved rows; every row is then in its old or its new place.
        StorageError
            If the segment is damaged; it is kept.
        """
        # From here on writers may supersede rows of the segment, but never add any, because it is
        # sealed.
        with self._lock:
            slot = next_to_rewrite(self._segments)
        if slot < 0:
            return False
        entry = self._segments.entry(slot)
        stride = len(self.stride) // self._segments.layout.shape.block_words
        for first in range(0, entry.blocks, stride):
            # The remaining rows were superseded while the first ones were moved.
            if not self._segments.live[slot]:
                break
            self._move(entry, first, min(stride, entry.blocks - first))
        with self._lock:
            self._segments.remove(slot)
        return True

    def _move(self, entry: SegmentEntry, first: int, blocks: int) -> None:
        layout, target = self._segments.layout, self.appender
        shape, per_block = layout.shape, layout.per_block
        words = self.stride[: blocks * shape.block_words]
        descriptor = int(self._segments.descriptors[entry.slot])
        # Without the lock: a sealed segment does not change, and `_moving` keeps it from being
        # removed.
        bad = cpu.read_checked(descriptor, np.uint64(entry.sequence), first, blocks, words, shape)
        # Damaged blocks are not skipped: their rows would be lost silently when the segment is
        # removed.
        if bad >= 0:
            raise self._segments.damage(entry.slot, first + bad)
        source = words, as_bytes(words), (entry.slot * layout.segment_blocks + first) * per_block
        done, cells = 0, blocks * per_block
        while True:
            with self._lock:
                index = self._locations.index(self._segments.live)
                done = cpu.relocate(*source, done, cells, index, target.buffer, shape)
            if done == cells:
                return
            # Without the lock, because it writes a megabyte; readers find the rows in the buffer
            # meanwhile.
            target.make_room()


class Background:
    """A thread that calls `work` when woken. `raise_error` raises an exception of `work` in the
    caller's thread.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._wake = Event()
        self._ends = False
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def wake(self) -> None:
        """Schedule a call of `work`."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="stratarec-compaction", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ends:
                return
            try:
                self._work()
            # An exception in a thread would be lost; the caller's next write raises it.
            except Exception as error:
                self._error = error

    def raise_error(self) -> None:
        """Raise the exception of the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread."""
        # Set before the wake-up, which would otherwise begin another pass.
        self._ends = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
