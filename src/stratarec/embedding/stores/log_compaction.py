"""Which segments to rewrite, how, and the thread that does so.

Greedy: the segment with the least live rows costs the least to move for the space that it gives back. What is moved
goes to segments of its own, because rows that lived through one compaction are likely to live through the next.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, RLock, Thread

import numpy as np

from stratarec.embedding.stores.arrays import allocate_bytes
from stratarec.embedding.stores.log_layout import Locations
from stratarec.embedding.stores.log_segments import Appender, SegmentEntry, Segments
from stratarec.kernels.blocks import as_bytes, as_tags, cpu

# Compaction begins a little before the bound, so that writers seldom wait for it.
_EARLY = 0.96
# So many bytes are read and moved at a time, the lock being held while they are moved.
_STRIDE_BYTES = 1 << 20
# A segment fuller than this gives back less than it costs.
_MOST_LIVE = 0.95


def dead_weight(segments: Segments, most_amplification: float) -> bool:
    """Whether the segments are larger than `most_amplification` times what is live in them, four segments aside."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 4 * segments.layout.segment_blocks * segments.layout.per_block
    return cells > most_amplification * int(segments.live.sum()) + free


def background_due(segments: Segments, most_amplification: float) -> bool:
    """Whether the background thread should compact: early by space, or because slots run out."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 2 * segments.layout.segment_blocks * segments.layout.per_block
    # Two segments aside where `dead_weight` has four: the thread should be done before writers must wait.
    early = cells > _EARLY * most_amplification * int(segments.live.sum()) + free
    return early or len(segments.used) > segments.layout.slots - 12


def victim(segments: Segments) -> int:
    """The slot to rewrite next, or -1 when that would gain nothing."""
    sealed = np.flatnonzero(segments.sealed)
    if not len(sealed):
        return -1
    live, cells = segments.live[sealed], segments.blocks[sealed] * segments.layout.per_block
    # Slots run out, not bytes: short segments that checkpoints sealed take one each, so the fewest rows win, however
    # full they are.
    if len(segments.used) > segments.layout.slots - 12:
        return int(sealed[np.argmin(live)])
    best = int(np.argmin(live / cells))
    return int(sealed[best]) if live[best] <= _MOST_LIVE * cells[best] else -1


class Compactor:
    """Moves live rows out of segments; one caller at a time."""

    def __init__(self, segments: Segments, locations: Locations, lock: RLock) -> None:
        self._segments, self._locations, self._lock = segments, locations, lock
        self.appender = Appender(segments, lock, allowance=0)
        layout = segments.layout
        self.stride = allocate_bytes(max(_STRIDE_BYTES // layout.block_bytes, 1) * layout.block_bytes).view(np.uint64)

    def rewrite_one(self) -> bool:
        """Rewrite the segment that gains most; False when none gains anything.

        Raises
        ------
        NoRoom
            When what is moved finds no room; every row is then in its old or its new place.
        StorageError
            When the segment is damaged; it stays.
        """
        # Writers may kill rows of the victim from here on; they never add any, since it is sealed.
        with self._lock:
            slot = victim(self._segments)
        if slot < 0:
            return False
        entry = self._segments.entry(slot)
        stride = len(self.stride) // self._segments.layout.shape.block_words
        for first in range(0, entry.blocks, stride):
            # What is left of it died while its beginning was moved.
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
        wanted = descriptor, np.uint64(entry.sequence), first, blocks, words, shape
        # Without the lock: a sealed segment does not change, and `_moving` keeps it from being removed.
        bad = cpu.read_checked(*wanted)
        if bad >= 0 and self._segments.refuses_direct(entry.slot):
            bad = cpu.read_checked(*wanted)
        # Not skipped over: rows of a damaged block would be lost without a word when the segment is removed.
        if bad >= 0:
            raise self._segments.damage(entry.slot, first + bad)
        source = as_tags(words), as_bytes(words), (entry.slot * layout.segment_blocks + first) * per_block
        done, cells = 0, blocks * per_block
        while True:
            with self._lock:
                index = self._locations.index(self._segments.live)
                done = cpu.relocate(*source, done, cells, index, target.buffer, shape)
            if done == cells:
                return
            # Outside of the lock, since it writes a megabyte; readers find its rows in the buffer meanwhile.
            target.make_room()


class Background:
    """A thread that calls `work` when woken; what it raises is kept for the caller's next call."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._wake, self._ends = work, Event(), False
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def wake(self) -> None:
        """Have `work` called soon."""
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
        """Raise what the thread met, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread."""
        # Before the wake, which would otherwise begin another pass.
        self._ends = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
