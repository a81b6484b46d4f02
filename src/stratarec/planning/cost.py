"""Seconds of a step that a table costs where it is placed.

Bytes over a measured bandwidth, reads over a measured rate, and what the engine takes for a table, an id and a row
beside that (`engine_costs`), which is most of it where batches are small. With lookahead the device works beside the
processor. Float32 rows of level 0 are pooled and updated alike wherever a table's home is.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratarec.embedding.codecs import CodecConfig
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import Home, RowShape, block_bytes, record_bytes
from stratarec.planning.engine_costs import moved_by_staging, moved_in_level0
from stratarec.planning.memories import Tiers
from stratarec.planning.plan import Seconds

# Bytes that a log writes for each byte of a row, rewriting of segments included.
_LOG_WRITES = 2.0

PENALTY = {name: kind.penalty for name, kind in KINDS.items()}
"""What ``precision: auto`` gives for more precision, as a share of the table's compute seconds.

With 0.5 for int8, a table goes to a slower tier in float32 rather than into DRAM in int8 when that costs it less than
half its compute time; with 50 for int4 that codec is left for what nothing else can hold. The figures are a
judgement, not a measurement: int8 under a cache trains to the accuracy of float32 (arXiv 2010.11305), int4 does not
always."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a batch asks of a table."""

    lookups: float
    """Ids."""
    distinct: float
    """Distinct rows."""


def level0_seconds(shape: RowShape, demand: Demand, tiers: Tiers) -> Seconds:
    """Of pooling and of the update."""
    moved = moved_in_level0(shape, demand.lookups, demand.distinct, tiers.dram)
    return Seconds(compute=tiers.engine.compute.seconds(moved, demand.lookups, demand.distinct))


def cached_seconds(
    shape: RowShape,
    demand: Demand,
    tiers: Tiers,
    *,
    home: Home,
    codec: CodecConfig,
    ways: int,
    misses: float,
    device_misses: float,
) -> Seconds:
    """As `level0_seconds`, and the way of missing rows up and of their victims down.

    Parameters
    ----------
    misses : float
        Distinct rows of a batch that level 0 lacks; as many are written back for them.
    device_misses : float
        Those that no second level in DRAM holds either.
    """
    record = record_bytes(codec, shape)
    moved = moved_by_staging(shape, record, ways, demand.distinct, misses, tiers.dram)
    staging = tiers.engine.staging.seconds(moved, demand.lookups, misses)
    kind = KINDS[codec.kind]
    each = 1 / kind.encode_rate + 1 / kind.decode_rate
    staging += misses * 4 * shape.width * each / tiers.threads
    return Seconds(
        compute=level0_seconds(shape, demand, tiers).compute,
        staging=staging,
        device=_device_seconds(record, tiers, home, device_misses),
    )


def _device_seconds(record: int, tiers: Tiers, home: Home, misses: float) -> float:
    if home == "log" and tiers.block is not None:
        blocks = block_bytes(record) / tiers.block.read_bytes
        written = _LOG_WRITES * record / tiers.block.write_bytes_per_second
        return misses * (blocks / tiers.block.reads_per_second + written)
    if home == "mapped" and tiers.mapped is not None:
        return misses * 2 * record / tiers.mapped.row_bytes_per_second
    return 0.0
