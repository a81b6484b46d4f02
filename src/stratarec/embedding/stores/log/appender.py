"""An open segment and the buffer that gathers its next blocks."""

from __future__ import annotations

from threading import RLock

import numpy as np

from stratarec.embedding.stores.dram import allocate_bytes
from stratarec.embedding.stores.log.segments import Segments
from stratarec.kernels.blocks import Buffer, as_bytes, as_tags, cpu


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
