"""Bytes that a placed table occupies in each memory, part by part.

A table's bytes are a mapping ``memory -> part -> bytes``. The memories are ``hbm`` (GPU memory),
``dram``, ``mapped`` and ``block``; *level 0* is ``hbm`` if rows are trained in GPU memory,
otherwise ``dram``. Sizes are per slot, per row, per batch or per SSD store:

    part                memory         per          contents
    slot weights        level 0        slot         float32 weights, where rows are trained
    slot state          level 0        slot         float32 optimizer state of the weights
    tags, stamps        dram           slot         the row in the slot, and its last use; 4 bytes
                                                    each
    record weights      of the home    row          encoded weights; an SSD store's frequent rows
                                                    are in dram, too
    record parameters   of the home    row          scale and offset of int8 and int4
    record state        of the home    row          optimizer state in the record
    record padding      hbm            row          home ``hbm`` only: records are whole words of 4
                                                    bytes
    bitmaps             dram           row          1 bit "written" (not for ``log``) and 1 bit
                                                    "changed"
    locations           dram           row          home ``log`` only: 4 bytes; 8 bytes above 2.8e9
                                                    rows
    staging             dram, hbm      batch        slots of lookups in flight, lists of moving
                                                    rows, and buffers for records (only for ``log``
                                                    or if level 0 is ``hbm``)
    workspace           level 0        batch        scratch memory of the update, which all tables
                                                    use in sequence
    log buffers         dram           store        buffers of the writer, compaction and readers
                                                    (upper bound)
    block padding       block          row          row numbers, checksums, unused ends of blocks
    dead space          block          row, store   outdated records that are not reclaimed yet
                                                    (upper bound)

A table that is entirely in level 0 has only slot weights and slot state. Tables of the same width,
home and codec share a store, and so also the parts that are counted per store. If they have very
many rows, they use two stores, if this needs fewer bytes for locations. The codec and the store
determine the sizes of records, blocks and locations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from stratarec.config.choices import OneOf
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.homes import HOMES
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.ssd_layout import (
    DEAD_BYTES,
    DEAD_SHARE,
    SsdConfig,
    location_bytes,
    plan_layout,
)
from stratarec.embedding.tiers import OVERFLOW_SHARE, cache_sets
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.runtime.memory import buffer_bytes
from stratarec.kernels.update import scratch_bytes
from stratarec.planning.config import Memory as Memory

Home: TypeAlias = Annotated[str, OneOf(lambda: ["level0", *HOMES])]
Parts: TypeAlias = Mapping[Memory, Mapping[str, int]]

MEMORIES: tuple[Memory, ...] = ("hbm", "dram", "mapped", "block")
LEVEL0: tuple[Memory, ...] = ("hbm", "dram")
"""Memories in which rows can be trained."""
TAG_BYTES = STAMP_BYTES = LOOKUP_SLOT_BYTES = 4
LIST_BYTES = 6 * 8 * 5 // 4  # six lists of rows and slots that move, int64, with a quarter to spare
MOST_SSD_ROWS = 2_800_000_000
"""Approximate number of rows of one SSD store up to which a location needs only 4 bytes."""
SSD_BUFFER_BYTES = 2 * SsdConfig().buffer_bytes + (1 << 20) + SsdConfig().depth * (16 << 10)
DEVICE_LOOKUP_BYTES = 64
"""Bytes of a batch's buffer in GPU memory per lookup: its slot, sorted slots and their order,
gradient addresses.
"""
WORKSPACE_MARGIN = 1.25
"""Assumed ratio of the lookups of the largest batch to the lookups of an average batch."""
RESERVES = frozenset({"dead space", "staging", "workspace", "log buffers"})
"""Parts with sizes that are upper bounds. A run that uses less does not contradict the plan."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Number of weights and size of the optimizer state of a row."""

    width: int
    """Number of weights (D)."""
    row_state: bool
    """Whether the optimizer stores one float per row."""
    full_state: int
    """Floats of optimizer state per weight."""
    clock: bool = False
    """Whether the row stores a step counter."""

    @classmethod
    def of(cls, width: int, optimizer: RowOptimizerConfig) -> RowShape:
        """Return the shape of a row of `width` weights under `optimizer`."""
        return cls(
            width=width,
            row_state=bool(optimizer.row_state),
            full_state=len(optimizer.full_state),
            clock=optimizer.clocked,
        )

    @property
    def state_floats(self) -> int:
        """Floats of optimizer state per row."""
        return self.row_state + self.width * self.full_state

    @property
    def slot_bytes(self) -> int:
        """Bytes per row in level 0: float32 weights, optimizer state and step counter."""
        return 4 * self.width + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state and step counter per row in level 0."""
        return 4 * (self.state_floats + self.clock)


def _record(codec: CodecConfig, shape: RowShape) -> RecordLayout:
    return RecordCodec(
        codec, width=shape.width, row_state=shape.row_state, full_state=shape.full_state, clock=shape.clock
    ).layout


def record_bytes(codec: CodecConfig, shape: RowShape) -> int:
    """Return the bytes of a record without padding: encoded weights, scale and offset, and
    optimizer state.
    """
    return _record(codec, shape).record_bytes


@dataclass(frozen=True, kw_only=True)
class SlotSplit:
    """Division of a table's cache slots into sets and overflow."""

    sets: int
    ways: int
    overflow: int
    """Slots after the sets, for rows that find their set full of pinned rows."""

    @classmethod
    def holding(cls, rows: int, ways: int) -> SlotSplit:
        """Return the split with the fewest slots whose sets, of `ways` slots each, can hold `rows`
        rows.
        """
        sets = max(1, -(-rows // ways))
        return cls(sets=sets, ways=ways, overflow=max(sets // (OVERFLOW_SHARE - 1), 1) * ways)

    @classmethod
    def within(cls, total: int, ways: int) -> SlotSplit:
        """Divide `total` slots into sets of `ways` slots as the cache does: at least one set and
        one overflow set.
        """
        sets, overflow_sets = cache_sets(total, ways)
        return cls(sets=sets, ways=ways, overflow=overflow_sets * ways)

    @property
    def in_sets(self) -> int:
        """Number of slots without the overflow."""
        return self.sets * self.ways

    @property
    def total(self) -> int:
        """Number of all slots, as in `TablePlacement.cache_rows`."""
        return self.in_sets + self.overflow


@dataclass(frozen=True, kw_only=True)
class BatchDemand:
    """Lookups of a batch that determine the size of staging buffers."""

    lookups: float
    """Number of ids per batch."""
    distinct: float
    """Number of distinct rows per batch, with a margin."""
    batches: int
    """Number of batches in flight: lookahead + 1."""


def level0_bytes(shape: RowShape, rows: int, level0: Memory = "dram") -> Parts:
    """Return the bytes of a table of `rows` rows that is entirely in the memory `level0`."""
    return {level0: {"slot weights": 4 * shape.width * rows, "slot state": shape.state_bytes * rows}}


def cached_bytes(
    shape: RowShape,
    rows: int,
    *,
    home: Home,
    codec: CodecConfig,
    slots: int,
    traffic: BatchDemand,
    level0: Memory = "dram",
    dram_rows: int = 0,
) -> Parts:
    """Return the bytes of a table whose rows have records at home and slots in a cache.

    Parameters
    ----------
    shape : RowShape
        Floats and optimizer state of a row.
    rows : int
        Number of rows, which all have a record.
    home : str
        Home of the records.
    codec : CodecConfig
        Precision of the records.
    slots : int
        Number of slots of the cache.
    traffic : BatchDemand
        Lookups of a batch.
    level0 : str
        Memory of the slots.
    dram_rows : int
        Number of records of an SSD store that are also in DRAM.
    """
    layout = _record(codec, shape)
    record = layout.record_bytes
    on_host = home != "hbm"
    buffered = home == "log" or (level0 == "hbm" and on_host)
    dram: dict[str, int] = {
        "tags": TAG_BYTES * slots,
        "stamps": STAMP_BYTES * slots,
        "bitmaps": (1 if home == "log" else 2) * -(-rows // 8) + 2 * -(-dram_rows // 8),
        "locations": location_bytes(rows, layout.record_bytes) if home == "log" else 0,
        # Buffers of further stores, if one store would have too many rows for locations of 4 bytes.
        "log buffers": int(2 * rows / MOST_SSD_ROWS * SSD_BUFFER_BYTES) if home == "log" else 0,
        "staging": staging_bytes(record if buffered else 0, slots, traffic),
    }
    on_device = {"staging": int(2 * record * traffic.distinct)} if level0 == "hbm" and on_host else {}
    at_home = _record_parts(layout, rows)
    if home == "log":
        blocks = ssd_bytes(record, rows)
        at_home["block padding"] = blocks - record * rows
        at_home["dead space"] = int(DEAD_SHARE * blocks)
    if not on_host:
        at_home["record padding"] = -record % 4 * rows
    records: list[Parts] = [{HOMES[home].memory: at_home}, {"dram": _record_parts(layout, dram_rows)}]
    return add_parts([level0_bytes(shape, slots, level0), {"hbm": on_device, "dram": dram}, *records])


def _record_parts(layout: RecordLayout, rows: int) -> dict[str, int]:
    return {
        "record weights": layout.parameters_at * rows,
        "record parameters": (layout.row_state_at - layout.parameters_at) * rows,
        "record state": (layout.record_bytes - layout.row_state_at) * rows,
    }


def staging_bytes(buffered: int, slots: int, traffic: BatchDemand) -> int:
    """Return the bytes of slots in flight, of one batch's lists of moving rows, and of its buffers.

    Parameters
    ----------
    buffered : int
        Bytes of the buffers per distinct row.
    slots : int
        Number of slots of the cache.
    traffic : BatchDemand
        Lookups of a batch.
    """
    lists = LIST_BYTES * (traffic.lookups + slots / OVERFLOW_SHARE)
    records = 1.25 * buffered * traffic.distinct
    return int(LOOKUP_SLOT_BYTES * traffic.lookups * traffic.batches + lists + records)


def workspace_bytes(lookups: Iterable[float], width: int, threads: int) -> int:
    """Return the bytes of scratch memory for the update. All tables use the same memory, one after
    another.

    Parameters
    ----------
    lookups : iterable of float
        Number of ids per batch of each table.
    width : int
        Width of the widest table.
    threads : int
        Number of threads that update tables.
    """
    return scratch_bytes(math.ceil(WORKSPACE_MARGIN * max(lookups, default=0.0)), width, threads)


def device_workspace_bytes(lookups: Iterable[float], width: int, lookahead: int) -> int:
    """Return the bytes of GPU memory for the buffers of batches and for the update of their rows.

    Parameters
    ----------
    lookups : iterable of float
        Number of ids per batch of each table.
    width : int
        Width of the widest table.
    lookahead : int
        Number of batches that are staged ahead.
    """
    # The batch in training, batches ahead of it, the copy that a CUDA graph reads, and temporary
    # memory of sorting.
    buffers = (lookahead + 3) * DEVICE_LOOKUP_BYTES
    # Partial sums for rows with many lookups: up to two vectors per 256 lookups.
    return math.ceil(WORKSPACE_MARGIN * sum(lookups) * (buffers + 2 * 4 * width / 256))


def output_bytes(values: float) -> int:
    """Return the bytes of the embedding layer's activations (`values` floats) and their gradients.

    No budget includes these bytes.
    """
    return 2 * buffer_bytes(math.ceil(values))


def block_bytes(record: int) -> int:
    """Return the bytes of one block of an SSD store of records of `record` bytes."""
    return plan_layout(1, record, SsdConfig()).block_bytes


def ssd_bytes(record: int, rows: int) -> int:
    """Return the bytes of all blocks for `rows` records. A record is never divided between two
    blocks.
    """
    return plan_layout(rows, record, SsdConfig()).padded_bytes


SHARED_BYTES: Parts = {"dram": {"log buffers": SSD_BUFFER_BYTES}, "block": {"dead space": DEAD_BYTES}}
"""Constant part of the bytes that an SSD store needs, for any tables."""


def add_parts(many: Iterable[Parts]) -> Parts:
    """Return the sums of the sizes of `many` tables by memory and part, without parts of zero
    bytes.
    """
    total: dict[Memory, dict[str, int]] = {}
    for parts in many:
        for memory, named in parts.items():
            into = total.setdefault(memory, {})
            for name, size in named.items():
                if size:
                    into[name] = into.get(name, 0) + size
    return {memory: total[memory] for memory in MEMORIES if total.get(memory)}


def in_memory(parts: Parts, memory: Memory) -> int:
    """Return the bytes of all parts in one memory."""
    return sum(parts.get(memory, {}).values())
