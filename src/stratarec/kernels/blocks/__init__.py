"""Checksummed blocks of records: packing, verifying, and many direct reads at once.

A block is `block_words` 64-bit words (a multiple of 4 KiB) of one segment file::

    | checksum: 8 bytes | row + 1 of each cell (4 or 8 bytes) | records | zeros |

The tag 0 is an empty cell. The checksum covers every byte after it and, through its seed, the segment's number and the
block's place, so a block in the wrong place counts as damaged, too. Cells are numbered across all segments:
cell ``(slot * segment_blocks + block) * per_block + k``, and a *location* is the cell's number plus one, 0 for none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_ALIGNMENT = 4096
CHECKSUM_BYTES = 8


class Shape(NamedTuple):
    """Sizes of a layout that kernels use."""

    block_words: int
    per_block: int
    record_bytes: int
    tag_words: int
    segment_blocks: int


class Buffer(NamedTuple):
    """The next blocks of an open segment."""

    state: NDArray[np.int64]
    """``[4]``, in cells: number of the segment's first cell; then, counted from it, the first cell of the buffer, the
    next cell to fill and the end of the buffer (`cpu.BASE`, `FIRST`, `NEXT`, `LIMIT`)."""
    tags: NDArray[np.uint32]
    """The blocks as 32-bit words."""
    data: NDArray[np.uint8]
    """The blocks as bytes."""


class Index(NamedTuple):
    """Locations of records, updated when records move."""

    locations: NDArray[np.unsignedinteger[Any]]
    """``[R]``."""
    changed: NDArray[np.uint8]
    """A bit per row."""
    live: NDArray[np.int64]
    """Live cells of each segment."""


class ReadRequest(NamedTuple):
    """Records to read, and the open files that contain them."""

    descriptors: NDArray[np.int32]
    """File of each segment."""
    sequences: NDArray[np.uint64]
    """Sequence number of each segment."""
    cells: NDArray[np.int64]
    """``[m]``, ascending."""
    entries: NDArray[np.int64]
    """``[m]``: index of each cell in `rows` and `out`."""
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    """Flat: one record per row."""


class ReadBuffers(NamedTuple):
    """Buffers of the reads in flight: one entry, or one part, for each."""

    spans: NDArray[np.int64]
    """``[depth, 4]``: extent of each read (`reads.FIRST`, `LAST`, `BEGIN`, `BLOCKS`)."""
    requests: NDArray[np.uint64]
    addresses: NDArray[np.int64]
    events: NDArray[np.int64]
    words: NDArray[np.uint64]
    """Targets of the reads, page-aligned as direct reads require."""
    tags: NDArray[np.uint32]
    data: NDArray[np.uint8]


def as_bytes(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the same memory as bytes."""
    return words.view(np.uint8)


def as_tags(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the same memory as 32-bit words."""
    return words.view(np.uint32)
