"""Layout of an SSD store: cells in blocks, blocks in segments, locations of rows in DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.config.validate import check_ranges
from stratarec.embedding.stores.arrays import allocate_bits, allocate_bytes, clear_bits
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.blocks import BLOCK_ALIGNMENT, Index, Shape

# Number of segments of a table. It is large, so that the four segments of dead space that
# compaction tolerates are a small part of the table.
_SEGMENTS = 64
_LARGEST_SEGMENT = 4 << 30
# Slots for open segments, short segments that a checkpoint sealed, and compaction.
_SPARE_SLOTS = 64
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SsdConfig:
    """Sizes and limits of an SSD store."""

    segment_bytes: int = 0
    """Bytes of one segment file; 0 means a 64th of the records, but at least `buffer_bytes` and at
    most 4 GiB.
    """
    # Buffers of 4 MiB wrote no faster (2.1 GB/s), and two of them took a ninth of a small budget.
    buffer_bytes: int = 1 << 20
    """Bytes of rows that are gathered in DRAM and written at once; compaction has a second buffer
    of this size.
    """
    depth: int = 128
    """Reads in flight at once."""
    budget_bytes: int = 0
    """Maximum file space in the store's directory; 0 for all free space of the file system."""
    most_amplification: float = 1.5
    """Maximum ratio of file bytes to the bytes that live rows need; four segments more are always
    allowed.
    """

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "ssd.",
            segment_bytes="[0, inf)",
            buffer_bytes="[4096, inf)",
            depth="[1, inf)",
            budget_bytes="[0, inf)",
            most_amplification="[1.1, inf)",
        )


# It compacts if it exceeds 1.5 times its live blocks by more than four segments. A segment is a
# 64th of the records, or one buffer if that is larger.
DEAD_SHARE = SsdConfig().most_amplification - 1 + 4 / _SEGMENTS
"""Maximum dead space of an SSD store, as a share of its blocks."""
DEAD_BYTES = 4 * SsdConfig().buffer_bytes
"""Additional maximum dead space of any SSD store, in bytes."""


@dataclass(frozen=True, kw_only=True)
class SsdLayout:
    """A layout chosen by `plan_layout`; equal values mean equal bytes."""

    rows: int
    record_bytes: int
    tag_bytes: int
    """Bytes of the row number in a cell, and of its checksum: 4, or 8 for many rows."""
    block_bytes: int
    """The smallest multiple of 4096 that fits one cell."""
    per_block: int
    """Records in a block; no record spans two blocks."""
    segment_blocks: int
    slots: int
    """Maximum number of segments at once."""
    buffer_blocks: int

    @property
    def shape(self) -> Shape:
        """The sizes that kernels use."""
        return Shape(
            block_words=self.block_bytes // 8,
            cell_words=_cell_bytes(self.record_bytes, self.tag_bytes) // 8,
            per_block=self.per_block,
            record_bytes=self.record_bytes,
            tag_words=self.tag_bytes // 4,
            segment_blocks=self.segment_blocks,
        )

    @property
    def location_type(self) -> np.dtype[Any]:
        """Type of a location: uint32, or uint64 if there are too many cells for uint32."""
        return np.dtype(
            np.uint32 if self.slots * self.segment_blocks * self.per_block < 2**32 - 1 else np.uint64
        )

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        return self.segment_blocks * self.block_bytes

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be the same in a checkpoint. The length of segments may differ; see
        `adopting`.
        """
        return {
            name: getattr(self, name)
            for name in ("rows", "record_bytes", "tag_bytes", "block_bytes", "per_block")
        }

    @property
    def segmentation(self) -> dict[str, Any]:
        """Values that determine how blocks are numbered across segments, and so the locations."""
        return {name: getattr(self, name) for name in ("segment_blocks", "slots", "buffer_blocks")}

    @property
    def padded_bytes(self) -> int:
        """File bytes of all records, each stored once, in whole blocks."""
        return self.blocks * self.block_bytes

    @property
    def blocks(self) -> int:
        """Number of blocks of all records, each stored once."""
        return -(-self.rows // self.per_block)

    def adopting(self, manifest: Mapping[str, Any], config: SsdConfig) -> SsdLayout:
        """Return this layout with the segment length of a checkpoint. That length depends on an
        earlier budget.

        Raises
        ------
        CheckpointError
            If the manifest lacks the length, or `config` leaves no room for three segments.
        """
        try:
            layout = replace(self, **{name: int(manifest[name]) for name in self.segmentation})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the manifest of an SSD store is damaged: the length of its segments is missing"
            ) from error
        # The manifest determines sizes of arrays: impossible values are rejected before anything is
        # allocated.
        most = max(
            2 * -(-self.blocks // layout.segment_blocks) + _SPARE_SLOTS,
            _narrow(layout.segment_blocks, self.per_block),
        )
        valid = (
            layout.buffer_blocks > 0
            and layout.segment_blocks > 0
            and layout.segment_blocks % layout.buffer_blocks == 0
        )
        if (
            not valid
            or not 0 < layout.slots <= most
            or layout.buffer_blocks * self.block_bytes > _LARGEST_SEGMENT
        ):
            raise CheckpointError(
                f"the manifest of an SSD store is damaged: a store of {self.rows} rows never has "
                f"{layout.slots} "
                f"segments of {layout.segment_blocks} blocks, in buffers of {layout.buffer_blocks}; use "
                "another checkpoint"
            )
        if config.budget_bytes and config.budget_bytes < 3 * layout.segment_bytes:
            raise CheckpointError(
                f"this SSD store's share of memory.block.budget is {config.budget_bytes}, and this "
                f"checkpoint needs three segments of {layout.segment_bytes} bytes; raise it"
            )
        return layout


def _cell_bytes(record_bytes: int, tag_bytes: int) -> int:
    return -(-(2 * tag_bytes + record_bytes) // 8) * 8


def _narrow(segment_blocks: int, per_block: int) -> int:
    """Return the number of segments that locations of four bytes can address."""
    return (2**32 - 2) // (segment_blocks * per_block)


def plan_layout(rows: int, record_bytes: int, config: SsdConfig) -> SsdLayout:
    """Return the layout of a store of `rows` records.

    Raises
    ------
    ConfigError
        If `config` leaves no room for a segment.
    """
    tag_bytes = 4 if rows < 2**32 - 1 else 8
    cell_bytes = _cell_bytes(record_bytes, tag_bytes)
    block_bytes = -(-cell_bytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    per_block = block_bytes // cell_bytes
    buffer_blocks = max(1, config.buffer_bytes // block_bytes)
    all_blocks = max(1, -(-rows // per_block))
    segment = config.segment_bytes // block_bytes or min(
        all_blocks // _SEGMENTS, _LARGEST_SEGMENT // block_bytes
    )
    if config.budget_bytes and not config.segment_bytes:
        # Compaction can only free whole segments: few long ones would leave no room for it within a
        # small budget.
        segment = min(segment, config.budget_bytes // 16 // block_bytes)
    # A multiple of the buffer, so that no write spans two segments.
    segment_blocks = max(1, segment // buffer_blocks) * buffer_blocks
    needed = -(-all_blocks // segment_blocks)
    slots = 2 * needed + _SPARE_SLOTS
    # With the smallest budgets, locations of 4 bytes take more than a quarter of a table's memory.
    # The number of slots is reduced to keep locations this short, as long as 1.5 times the slots
    # that all rows need are left.
    narrow = _narrow(segment_blocks, per_block)
    if slots > narrow >= int(1.5 * needed) + 16:
        slots = narrow
    if config.budget_bytes and config.budget_bytes < 3 * segment_blocks * block_bytes:
        raise ConfigError(
            f"this SSD store's share of memory.block.budget is {config.budget_bytes}, expected at least "
            f"three segments of {segment_blocks * block_bytes} bytes; raise it"
        )
    return SsdLayout(
        rows=rows,
        record_bytes=record_bytes,
        tag_bytes=tag_bytes,
        block_bytes=block_bytes,
        per_block=per_block,
        segment_blocks=segment_blocks,
        slots=slots,
        buffer_blocks=buffer_blocks,
    )


def location_bytes(rows: int, record_bytes: int) -> int:
    """Return the bytes of DRAM for the locations of `rows` records of `record_bytes` bytes each."""
    return rows * plan_layout(rows, record_bytes, SsdConfig()).location_type.itemsize


class Locations:
    """The location of each row (see `stratarec.kernels.blocks`), and a bit per row: changed since
    the last checkpoint.

    Pages of rows that were never written take no memory.
    """

    def __init__(self, layout: SsdLayout) -> None:
        self._layout = layout
        self.of_row: NDArray[np.unsignedinteger[Any]] = self._new()
        self.changed = allocate_bits(layout.rows)

    def _new(self) -> NDArray[np.unsignedinteger[Any]]:
        kind = self._layout.location_type
        return allocate_bytes(self._layout.rows * kind.itemsize).view(kind)

    @property
    def as_bytes(self) -> NDArray[np.uint8]:
        """``[R, 4 or 8]`` uint8 view of the locations."""
        return self.of_row.view(np.uint8).reshape(self._layout.rows, -1)

    def index(self, live: NDArray[np.int64]) -> Index:
        """Return the index that kernels update when records move; `live` is `SegmentFiles.live`."""
        return Index(self.of_row, self.changed, live)

    def written_rows(self) -> Iterator[NDArray[np.int64]]:
        """Yield the rows that have a location, ascending, in chunks."""
        for first in range(0, len(self.of_row), _CHUNK_ROWS):
            # Without `!= 0`, numpy takes eight times as long: 50 s for the three passes over 10^9
            # rows.
            rows = np.flatnonzero(self.of_row[first : first + _CHUNK_ROWS] != 0)
            if len(rows):
                yield rows + first

    def clear(self) -> None:
        """Mark all rows as never written and release the memory."""
        # New memory instead of zeros: untouched pages cost nothing.
        self.of_row = self._new()
        clear_bits(self.changed)
