"""Many direct reads at once.

Asynchronous, from one thread. Threads that read would have to take the interpreter lock from the thread that trains,
twice for each of them at every call.
"""

from __future__ import annotations

import numpy as np

from stratarec.embedding.stores.dram import allocate_bytes
from stratarec.embedding.stores.log.layout import BlockLayout
from stratarec.kernels.blocks import ReadBuffers, Wanted, aio, as_bytes, as_tags, cpu, reads

# Neighbouring blocks are read by one call up to so many bytes.
# Larger pieces gain nothing where rows are scattered, and depth times this is memory that the budget counts.
_BUFFER_BYTES = 16 << 10


class Reader:
    """Keeps up to `depth` reads under way; for one caller at a time.

    Parameters
    ----------
    layout : Layout
        Of the segments that are read.
    depth : int
        Reads under way, each with a buffer of its own.
    """

    def __init__(self, layout: BlockLayout, depth: int) -> None:
        self._layout = layout
        size = max(_BUFFER_BYTES // layout.block_bytes, 1) * layout.block_bytes
        self.scratch = allocate_bytes(size * depth).view(np.uint64)
        self._buffers = ReadBuffers(
            spans=np.zeros((depth, 4), np.int64),
            requests=np.zeros(depth * aio.REQUEST_WORDS, np.uint64),
            addresses=np.zeros(depth, np.int64),
            events=np.zeros(depth * aio.EVENT_WORDS, np.int64),
            words=self.scratch,
            tags=as_tags(self.scratch),
            data=as_bytes(self.scratch),
        )
        # One thread at a depth of 128 reads as fast as 32 to 64 threads did, for less than half of their processor
        # time. 512 reads under way were a tenth faster than 128, for four times the buffers.
        self._context = aio.open_context(depth)

    def read(self, wanted: Wanted) -> int:
        """Read records into ``wanted.out``; -1, or a block that failed."""
        return int(reads.read_cells(self._context, wanted, self._buffers, self._layout.shape))

    def verify(self, descriptor: int, sequence: int, blocks: int) -> int:
        """Check a whole segment; -1, or the block that failed."""
        place = np.int32(descriptor), np.uint64(sequence), 0, blocks
        return int(cpu.verify_segment(*place, self.scratch, self._layout.shape))

    def close(self) -> None:
        """Give back what the system holds for this reader."""
        aio.close_context(self._context)
        self._context = 0
