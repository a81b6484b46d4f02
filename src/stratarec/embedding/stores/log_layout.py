"""Where records lie: cells in blocks, blocks in segments, and the location of each row in DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.config.validate import check_finite
from stratarec.embedding.stores.arrays import allocate_bits, allocate_bytes, clear_bits, set_rows
from stratarec.errors import CheckpointError, ConfigError
from stratarec.kernels.blocks import BLOCK_ALIGNMENT, CHECKSUM_BYTES, Index, Shape

# A table is some so many segments, which makes what compaction may leave unclaimed (a few segments) a small part of it.
_SEGMENTS = 64
_LARGEST_SEGMENT = 4 << 30
# Open segments, short ones that a checkpoint sealed, and room to move in.
_SPARE_SLOTS = 64
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How a log store uses its device."""

    segment_bytes: int = 0
    """Bytes of one segment file; 0 for a 64th of the records, between the buffer's size and 4 GiB."""
    # 4 MiB wrote no faster (2.1 GB/s), and two buffers of it were a ninth of a small budget.
    buffer_bytes: int = 1 << 20
    """Rows are gathered in DRAM up to so many bytes (twice that, with compaction's own) and written at once."""
    depth: int = 128
    """Reads under way at once."""
    budget_bytes: int = 0
    """The most file space in the store's directory; 0 for as much as the file system has."""
    most_amplification: float = 1.5
    """File bytes over the bytes of blocks that live rows need, beyond four segments; what is over it is compacted."""

    def __post_init__(self) -> None:
        check_finite(self, "log.")
        for name, least in (("segment_bytes", 0), ("buffer_bytes", 4096), ("depth", 1), ("budget_bytes", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"log.{name} is {getattr(self, name)}, expected at least {least}")
        if self.most_amplification < 1.1:
            raise ConfigError(f"log.most_amplification is {self.most_amplification}, expected at least 1.1")


# A log compacts beyond 1.5 times its live blocks and four segments of a 64th of the records, or of a buffer if larger.
DEAD_SHARE = LogConfig().most_amplification - 1 + 4 / _SEGMENTS
"""Of a log's blocks, what it may take beyond them."""
DEAD_BYTES = 4 * LogConfig().buffer_bytes
"""What any log may take beyond that."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """A layout that `plan_layout` chose; the same numbers mean the same bytes."""

    rows: int
    record_bytes: int
    tag_bytes: int
    """4, or 8 where row numbers need it."""
    block_bytes: int
    """4096, or the least multiple of it that holds one record."""
    per_block: int
    """Records in a block; none straddles two."""
    segment_blocks: int
    slots: int
    """The most segments there can be at once."""
    buffer_blocks: int

    @property
    def shape(self) -> Shape:
        """What kernels need."""
        return Shape(self.block_bytes // 8, self.per_block, self.record_bytes, self.tag_bytes // 4, self.segment_blocks)

    @property
    def location_type(self) -> np.dtype[Any]:
        """uint32, or uint64 where the cells need it."""
        return np.dtype(np.uint32 if self.slots * self.segment_blocks * self.per_block < 2**32 - 1 else np.uint64)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        return self.segment_blocks * self.block_bytes

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint's files must agree with. How long segments are is not in it, see `adopting`."""
        return {name: getattr(self, name) for name in ("rows", "record_bytes", "tag_bytes", "block_bytes", "per_block")}

    @property
    def segmentation(self) -> dict[str, Any]:
        """How blocks are numbered through segments: locations are of it."""
        return {name: getattr(self, name) for name in ("segment_blocks", "slots", "buffer_blocks")}

    @property
    def padded_bytes(self) -> int:
        """File bytes of all records, each once, in whole blocks."""
        return self.blocks * self.block_bytes

    @property
    def blocks(self) -> int:
        """Of all records, each once."""
        return -(-self.rows // self.per_block)

    def adopting(self, manifest: Mapping[str, Any], config: LogConfig) -> BlockLayout:
        """This layout with the segments of a checkpoint: a budget decides their length, and may change.

        Raises
        ------
        CheckpointError
            When the manifest lacks them, or `config` leaves no room for three.
        """
        try:
            made = replace(self, **{name: int(manifest[name]) for name in self.segmentation})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("the manifest of a log is damaged: it lacks the length of its segments") from error
        # The manifest decides sizes of arrays: what is absurd is refused before anything is allocated for it.
        most = max(
            2 * -(-self.blocks // made.segment_blocks) + _SPARE_SLOTS, _narrow(made.segment_blocks, self.per_block)
        )
        whole = made.buffer_blocks > 0 and made.segment_blocks > 0 and made.segment_blocks % made.buffer_blocks == 0
        if not whole or not 0 < made.slots <= most or made.buffer_blocks * self.block_bytes > _LARGEST_SEGMENT:
            raise CheckpointError(
                f"the manifest of a log is damaged: a store of {self.rows} rows never has {made.slots} segments of "
                f"{made.segment_blocks} blocks, in buffers of {made.buffer_blocks}; use another checkpoint"
            )
        if config.budget_bytes and config.budget_bytes < 3 * made.segment_bytes:
            raise CheckpointError(
                f"this log's share of memory.block.budget is {config.budget_bytes}, and this checkpoint needs three "
                f"segments of {made.segment_bytes} bytes; raise it"
            )
        return made


def _narrow(segment_blocks: int, per_block: int) -> int:
    """How many segments four bytes of location can tell apart."""
    return (2**32 - 2) // (segment_blocks * per_block)


def plan_layout(rows: int, record_bytes: int, config: LogConfig) -> BlockLayout:
    """The layout of a store of `rows` records.

    Raises
    ------
    ConfigError
        When `config` leaves no room for a segment.
    """
    tag_bytes = 4 if rows < 2**32 - 1 else 8
    cell_bytes = tag_bytes + record_bytes
    block_bytes = -(-(CHECKSUM_BYTES + cell_bytes) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    per_block = (block_bytes - CHECKSUM_BYTES) // cell_bytes
    buffer_blocks = max(1, config.buffer_bytes // block_bytes)
    all_blocks = max(1, -(-rows // per_block))
    wanted = config.segment_bytes // block_bytes or min(all_blocks // _SEGMENTS, _LARGEST_SEGMENT // block_bytes)
    if config.budget_bytes and not config.segment_bytes:
        # Compaction can only free whole segments: few long ones would leave a small budget no room to move in.
        wanted = min(wanted, config.budget_bytes // 16 // block_bytes)
    # Whole buffers, so that a write never straddles two segments.
    segment_blocks = max(1, wanted // buffer_blocks) * buffer_blocks
    needed = -(-all_blocks // segment_blocks)
    slots = 2 * needed + _SPARE_SLOTS
    # Locations of 4 bytes are more than a quarter of a table's memory under the smallest budgets: slots are given up
    # to keep them so short, as long as half as many again are left as all rows need.
    narrow = _narrow(segment_blocks, per_block)
    if slots > narrow >= int(1.5 * needed) + 16:
        slots = narrow
    if config.budget_bytes and config.budget_bytes < 3 * segment_blocks * block_bytes:
        raise ConfigError(
            f"this log's share of memory.block.budget is {config.budget_bytes}, expected at least three segments of "
            f"{segment_blocks * block_bytes} bytes; raise it"
        )
    return BlockLayout(
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
    """Bytes of DRAM that say where `rows` records lie."""
    return rows * plan_layout(rows, record_bytes, LogConfig()).location_type.itemsize


class Locations:
    """A location for each row (see `stratarec.kernels.blocks`) and a bit that says whether it changed since the last
    checkpoint; pages of rows that were never written do not exist.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self.of_row: NDArray[np.unsignedinteger[Any]] = self._new()
        self.changed = allocate_bits(layout.rows)

    def _new(self) -> NDArray[np.unsignedinteger[Any]]:
        kind = self._layout.location_type
        return allocate_bytes(self._layout.rows * kind.itemsize).view(kind)

    @property
    def as_bytes(self) -> NDArray[np.uint8]:
        """``[R, 4 or 8]`` uint8, the same memory."""
        return self.of_row.view(np.uint8).reshape(self._layout.rows, -1)

    def index(self, live: NDArray[np.int64]) -> Index:
        """What kernels keep as records move; `live` is that of `Segments`."""
        return Index(self.of_row, self.changed, live)

    def written_rows(self) -> Iterator[NDArray[np.int64]]:
        """Rows that have a location, ascending, in chunks."""
        for first in range(0, len(self.of_row), _CHUNK_ROWS):
            rows = np.flatnonzero(self.of_row[first : first + _CHUNK_ROWS])
            if len(rows):
                yield rows + first

    def changed_rows(self) -> Iterator[NDArray[np.int64]]:
        """Rows whose location changed since `forget_changes`, ascending, in chunks."""
        return set_rows(self.changed)

    def forget_changes(self) -> None:
        """Begin a new checkpoint's changes."""
        clear_bits(self.changed)

    def clear(self) -> None:
        """Have no row written, giving the memory back."""
        # New memory, not zeros: untouched pages cost nothing again.
        self.of_row = self._new()
        clear_bits(self.changed)
