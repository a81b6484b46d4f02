"""An open segment and the buffer that gathers its next blocks."""

from __future__ import annotations

from threading import RLock

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.log.segments import Segments
from stratarec.embedding.stores.memory import allocate_bytes
from stratarec.kernels.blocks import State, as_bytes, as_tags, cpu

_AT = State()


class Appender:
    """Gathers records in blocks that already have their place in a segment, and writes them many at a time.

    `state` (see `State`) is what kernels read and advance; it and `data` are looked at under `lock`, which is not held
    while a full buffer is written: nobody but its owner adds to a buffer.
    """

    def __init__(self, segments: Segments, lock: RLock, allowance: int) -> None:
        layout = segments.layout
        self._segments, self._lock, self._allowance = segments, lock, allowance
        self._layout = layout
        self._words = allocate_bytes(layout.buffer_blocks * layout.block_bytes).view(np.uint64)
        self.state = np.zeros(4, np.int64)
        self.slot = -1

    @property
    def data(self) -> NDArray[np.uint8]:
        """The buffer."""
        return as_bytes(self._words)

    @property
    def tags(self) -> NDArray[np.uint32]:
        """The buffer."""
        return as_tags(self._words)

    def make_room(self) -> None:
        """Write a full buffer out and open a segment where none is.

        Raises
        ------
        NoRoom, StorageError
            When that cannot be done; the buffer is as it was and its rows are still read from it.
        """
        if self.slot >= 0 and self.state[_AT.next] == self.state[_AT.limit]:
            self.write_out()
        if self.slot < 0:
            with self._lock:
                self.slot = self._segments.create()
                base = self.slot * self._layout.segment_blocks * self._layout.per_block
                self.state[:] = (base, 0, 0, self._layout.buffer_blocks * self._layout.per_block)

    def write_out(self) -> None:
        """Write what the buffer holds, the last block padded with empty cells; a full segment is sealed."""
        cells = int(self.state[_AT.next] - self.state[_AT.first])
        if cells:
            blocks = -(-cells // self._layout.per_block)
            words = self._words[: blocks * self._layout.block_bytes // 8]
            entry = self._segments.entry(self.slot)
            cpu.seal(words, self._layout.shape, blocks, np.uint64(entry.sequence), entry.blocks)
            self._segments.append(self.slot, words, self._allowance)
            with self._lock:
                words[:] = 0
                self._segments.bytes_written += words.nbytes
                self._segments.blocks[self.slot] += blocks
                first = int(self._segments.blocks[self.slot]) * self._layout.per_block
                end = self._layout.segment_blocks * self._layout.per_block
                self.state[1:] = (first, first, min(first + self._layout.buffer_blocks * self._layout.per_block, end))
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
            if not self._segments.blocks[self.slot]:
                self._segments.remove(self.slot)
            self.forget()

    def forget(self) -> None:
        """Be without a segment; what the buffer held is gone."""
        self.slot = -1
        self.state[:] = 0
        self._words[:] = 0
