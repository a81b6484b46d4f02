"""Checksummed records in blocks: packing, verifying, and many direct reads at once.

A block is `block_words` 64-bit words (a multiple of 4 KiB) of one segment file: `per_block` *cells*
and zeros. A cell is the place of one record, in `cell_words` words::

    | checksum: 4 or 8 bytes | tag: 4 or 8 bytes | record | zeros |

The tag is the record's row + 1, or 0 if the cell is empty. The checksum covers every byte after it.
It also depends on the number of the segment and of the cell in it, so a cell that is stored in a
wrong place counts as damaged. A record can be verified without the rest of its block, so a read
needs only the device's logical blocks (often 512 bytes) that contain the cell. Cells are numbered
across all segments: cell ``(slot * segment_blocks + block) * per_block + k``. A *location* is the
number of a cell + 1, or 0 for none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_ALIGNMENT = 4096


class Shape(NamedTuple):
    """Sizes of blocks and segments, for kernels."""

    block_words: int
    """64-bit words of a block."""
    cell_words: int
    """64-bit words of a cell."""
    per_block: int
    """Cells of a block."""
    record_bytes: int
    tag_words: int
    """64-bit words of a cell's checksum and tag."""
    segment_blocks: int
    """Blocks of a segment."""


class Buffer(NamedTuple):
    """The blocks of an open segment that are filled next."""

    state: NDArray[np.int64]
    """``[4]`` numbers of cells: first of the segment, first of the buffer, next to fill, and end of
    the buffer.

    The last three are counted from the first cell of the segment (`cpu.BASE`, `FIRST`, `NEXT`,
    `LIMIT`).
    """
    words: NDArray[np.uint64]
    """The blocks as 64-bit words."""
    data: NDArray[np.uint8]
    """The blocks as bytes."""


class Index(NamedTuple):
    """Locations of records; kernels update them when a record moves."""

    locations: NDArray[np.unsignedinteger[Any]]
    """``[R]`` location of each row's record."""
    changed: NDArray[np.uint8]
    """One bit per row, set when its location changes."""
    live: NDArray[np.int64]
    """Number of live cells of each segment."""


class ReadRequest(NamedTuple):
    """Records to read, and the open files that contain them."""

    descriptors: NDArray[np.int32]
    """Open file of each segment."""
    sequences: NDArray[np.uint64]
    """Sequence number of each segment."""
    cells: NDArray[np.int64]
    """``[m]`` numbers of the cells to read, ascending."""
    entries: NDArray[np.int64]
    """``[m]``: index of each cell in `rows` and `out`."""
    rows: NDArray[np.int64]
    """Row of each record, which its tag must have."""
    out: NDArray[np.uint8]
    """Flat bytes, one record per entry of `rows`."""


class ReadBuffers(NamedTuple):
    """Buffers of reads in flight; each read has one entry or one equal part of every array."""

    spans: NDArray[np.int64]
    """``[depth, 4]``: cells and bytes of each read (`reads.FIRST`, `LAST`, `BEGIN`, `SIZE`)."""
    requests: NDArray[np.uint64]
    addresses: NDArray[np.int64]
    events: NDArray[np.int64]
    words: NDArray[np.uint64]
    """Memory that the reads write to, page-aligned as direct reads require."""
    data: NDArray[np.uint8]


def as_bytes(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """View 64-bit `words` as bytes."""
    return words.view(np.uint8)
