"""Many direct reads at once.

Threads, because each runs a compiled loop over `pread` that holds no interpreter lock. On two cores and a virtual NVMe
disk one thread reads 15 thousand blocks of 4 KiB a second and 64 read 74 to 87 thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.log.layout import Layout
from stratarec.embedding.stores.memory import allocate_bytes
from stratarec.kernels.blocks import as_bytes, as_tags, cpu

# Neighbouring blocks are read by one call up to so many bytes.
_SCRATCH_BYTES = 32 << 10
# Pieces a thread, of one read.
_PIECES = 8
T = TypeVar("T")


class Reader:
    """A pool of reading threads, each with its own aligned scratch memory."""

    def __init__(self, layout: Layout, threads: int) -> None:
        self._layout, self._threads = layout, threads
        size = max(_SCRATCH_BYTES // layout.block_bytes, 1) * layout.block_bytes
        self.scratch = allocate_bytes(size * threads).view(np.uint64)
        self._scratch = [self.scratch[i * size // 8 : (i + 1) * size // 8] for i in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stratarec-read")

    def read(
        self,
        descriptors: NDArray[np.int32],
        sequences: NDArray[np.uint64],
        cells: NDArray[np.int64],
        entries: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> int:
        """Read the records in `cells` ``[m]`` (ascending) into ``out[entries[i]]``; -1, or a block that failed."""
        flat, shape, counter = out.reshape(-1), self._layout.shape, np.zeros(1, np.int64)
        # Small enough that no thread has much left when the others are done, large enough to join neighbours.
        piece = max(len(cells) // (_PIECES * self._threads), 4)

        def part(number: int) -> int:
            scratch = self._scratch[number]
            views = scratch, as_tags(scratch), as_bytes(scratch)
            return int(
                cpu.read_pieces(descriptors, sequences, cells, entries, rows, piece, counter, *views, shape, flat)
            )

        return max(self._each(part, min(self._threads, -(-len(cells) // piece))))

    def verify(self, segments: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Check whole segments ``(descriptor, sequence, blocks)``; which of them failed at which block, or -1, -1."""
        shape = self._layout.shape

        def share(number: int) -> tuple[int, int]:
            for index in range(number, len(segments), self._threads):
                descriptor, sequence, blocks = segments[index]
                bad = cpu.verify_segment(
                    np.int32(descriptor), np.uint64(sequence), 0, blocks, self._scratch[number], shape
                )
                if bad >= 0:
                    return index, int(bad)
            return -1, -1

        return max(self._each(share, min(self._threads, max(len(segments), 1))))

    def _each(self, call: Callable[[int], T], parts: int) -> list[T]:
        if parts == 1:
            return [call(0)]
        return list(self._pool.map(call, range(parts)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
