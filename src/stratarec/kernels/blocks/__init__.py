"""Checksummed blocks of records: packing, verifying, and many direct reads at once.

A block is `block_words` 64-bit words (a multiple of 4 KiB) of one segment file::

    | checksum: 8 bytes | row + 1 of each cell (4 or 8 bytes) | records | zeros |

The tag 0 is an empty cell. The checksum covers every byte after it and, through its seed, the segment's number and the
block's place, so that a block that lies in the wrong place is damaged too. Cells are numbered through all segments:
cell ``(slot * segment_blocks + block) * per_block + k``, and a *location* is the cell's number plus one, 0 for none.
"""

from __future__ import annotations

from typing import NamedTuple

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


class State(NamedTuple):
    """Places in the state of an open segment ``[4]`` int64, in cells; all but `base` count from the segment's first."""

    base: int = 0
    first: int = 1
    next: int = 2
    limit: int = 3


def as_bytes(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The same memory as bytes."""
    return words.view(np.uint8)


def as_tags(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The same memory as 32-bit words."""
    return words.view(np.uint32)
