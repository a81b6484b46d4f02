"""Checksummed blocks of records: packing, verifying, and many direct reads at once.

A block is `block_words` 64-bit words (a multiple of 4 KiB) of one segment file::

    | checksum: 8 bytes | row + 1 of each cell (4 or 8 bytes) | records | zeros |

The tag 0 is an empty cell. The checksum covers every byte after it and, through its seed, the segment's number and the
block's place, so that a block that lies in the wrong place is damaged too. Cells are numbered through all segments:
cell ``(slot * segment_blocks + block) * per_block + k``, and a *location* is the cell's number plus one, 0 for none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_ALIGNMENT = 4096
CHECKSUM_BYTES = 8


class Shape(NamedTuple):
    """Numbers that kernels need of a layout."""

    block_words: int
    per_block: int
    record_bytes: int
    tag_words: int
    segment_blocks: int


class Buffer(NamedTuple):
    """The next blocks of an open segment, as kernels take them."""

    state: NDArray[np.int64]
    """``[4]``, in cells: number of the segment's first cell; then, counted from that one, the first cell of the buffer,
    the next one to fill and the one that would be too many (`cpu.BASE`, `FIRST`, `NEXT`, `LIMIT`)."""
    tags: NDArray[np.uint32]
    """The blocks as 32-bit words."""
    data: NDArray[np.uint8]
    """The same memory as bytes."""


class Index(NamedTuple):
    """What says where records lie, and is kept as they move."""

    locations: NDArray[np.unsignedinteger[Any]]
    """``[R]``."""
    changed: NDArray[np.uint8]
    """A bit a row."""
    live: NDArray[np.int64]
    """Live cells of each segment."""


class Wanted(NamedTuple):
    """Records to read, and the open files in which they lie."""

    descriptors: NDArray[np.int32]
    """Of each segment."""
    sequences: NDArray[np.uint64]
    """Likewise."""
    cells: NDArray[np.int64]
    """``[m]``, ascending."""
    entries: NDArray[np.int64]
    """``[m]``: which of `rows` and of `out` each cell is."""
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    """Flat: a record a row."""


class ReadBuffers(NamedTuple):
    """What as many reads as there may be at once need: one entry, or one part, for each of them."""

    spans: NDArray[np.int64]
    """``[depth, 4]``: what is being read (`reads.FIRST`, `LAST`, `BEGIN`, `BLOCKS`)."""
    requests: NDArray[np.uint64]
    addresses: NDArray[np.int64]
    events: NDArray[np.int64]
    words: NDArray[np.uint64]
    """Where to, page-aligned: direct reads demand it."""
    tags: NDArray[np.uint32]
    data: NDArray[np.uint8]


def as_bytes(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The same memory as bytes."""
    return words.view(np.uint8)


def as_tags(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The same memory as 32-bit words."""
    return words.view(np.uint32)
