"""The ways in which a table can be placed, with the bytes and seconds of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stratarec.embedding.codecs.config import CodecConfig
from stratarec.planning.bytes import MEMORIES, Home, Parts, RowShape, Slots, Traffic, cached_bytes, in_memory
from stratarec.planning.bytes import level0_bytes as whole_bytes
from stratarec.planning.config import CodecKind, MemoryConfig
from stratarec.planning.cost import PENALTY, Demand, cached_seconds, level0_seconds
from stratarec.planning.hits import expected_misses
from stratarec.planning.plan import TablePlacement
from stratarec.planning.popularity import Popularity
from stratarec.planning.tiers import Tiers

PIN_MARGIN = 1.25
"""Slots over the rows that the batches in flight are expected to pin.

At a load of 1 / 1.25 a set of 32 ways gets 25.6 pinned rows on average, and 1.5 % of the rows find their set full: the
overflow of 1/16 holds four times that."""

AUTO_KINDS: tuple[CodecKind, ...] = ("fp32", "fp16", "int8", "int4")
"""What ``precision: auto`` chooses from; bf16 has the bytes of fp16 and fewer bits of precision."""

DEFAULT_FRACTION = 0.05
"""Of a cache for which there is neither a budget nor a fraction; as in arXiv 2010.11305."""

_GRID = 24
_LARGEST_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table to place."""

    name: str
    rows: int
    shape: RowShape
    lookups: float
    """Ids of a batch, all features of the table together."""
    popularity: Popularity
    """Of its rows."""

    @property
    def demand(self) -> Demand:
        """What a batch asks of it."""
        return Demand(lookups=self.lookups, distinct=self.popularity.distinct(self.lookups))

    def pinned(self, lookahead: int) -> int:
        """Rows that the batches in flight may pin at once, with `PIN_MARGIN`; no more than the table has.

        lookahead + 1 batches pin their distinct rows together, which popular rows make fewer than that many times the
        distinct rows of one.
        """
        expected = self.popularity.distinct(self.lookups * (lookahead + 1))
        return min(self.rows, math.ceil(PIN_MARGIN * expected))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to place a table."""

    placement: TablePlacement
    cost: float
    """Seconds of a step, with the penalty of a lower precision."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes in each of `MEMORIES`."""
        return tuple(in_memory(self.placement.bytes, memory) for memory in MEMORIES)


def candidates(table: TableSpec, memory: MemoryConfig, tiers: Tiers, *, second_level: bool = False) -> list[Candidate]:
    """All ways to place `table` that `memory` allows, best first among equals; never empty.

    A cache holds at least the pinned rows, whatever `memory.cache.fraction` says; a table for which such a cache would
    be as large as the table is whole in level 0.

    Parameters
    ----------
    second_level : bool
        Also try a second, encoded cache in DRAM over a log.
    """
    precision = memory.table_precision(table.name)
    kinds = AUTO_KINDS if precision == "auto" else (precision,)
    sizes = cache_sizes(table, memory)
    found = [_whole(table, memory, tiers)] if "fp32" in kinds or not sizes else []
    for slots in sizes:
        misses = _misses(table, memory, slots.in_sets)
        for home in _homes(memory):
            for kind in kinds:
                codec = memory.codec(kind)
                for level1 in (0, *(_second_levels(table, slots) if second_level and home == "log" else ())):
                    found.append(_cached(table, memory, tiers, home, codec, slots, level1, misses))  # noqa: PERF401
    return _undominated(found)


def cache_sizes(table: TableSpec, memory: MemoryConfig) -> list[Slots]:
    """Cache sizes to try, ascending: from the pinned rows to three quarters of the table, in equal ratios.

    Empty where no cache smaller than the table holds the pinned rows.
    """
    ways = memory.cache.ways
    least = Slots.holding(table.pinned(memory.lookahead), ways)
    fraction = memory.cache.fraction
    if fraction is None and memory.dram is None:
        fraction = DEFAULT_FRACTION
    if least.total >= table.rows:
        return []
    if fraction is not None:
        asked = Slots.within(max(least.total, round(fraction * table.rows)), ways)
        return [asked] if asked.total < table.rows else []
    largest = max(least.total, _LARGEST_FRACTION * table.rows)
    grid = {Slots.within(round(total), ways) for total in np.geomspace(least.total, largest, _GRID)}
    return sorted({least, *grid}, key=lambda slots: slots.total)


def _homes(memory: MemoryConfig) -> Iterator[Home]:
    yield "dram"
    if memory.mapped is not None:
        yield "mapped"
    if memory.block is not None:
        yield "log"


def _misses(table: TableSpec, memory: MemoryConfig, rows: float) -> float:
    return expected_misses(
        table.popularity, lookups=table.lookups, slots=rows, policy=memory.cache.policy, lookahead=memory.lookahead
    )


def _second_levels(table: TableSpec, slots: Slots) -> list[int]:
    sizes = np.geomspace(slots.total, max(slots.total, _LARGEST_FRACTION * table.rows), _GRID // 3)
    return sorted({round(size) for size in sizes if slots.total + size < table.rows})


def _whole(table: TableSpec, memory: MemoryConfig, tiers: Tiers) -> Candidate:
    seconds = level0_seconds(table.shape, table.demand, tiers)
    placement = TablePlacement(
        table=table.name, rows=table.rows, width=table.shape.width, tier="level0", codec=CodecConfig(),
        cache_rows=table.rows, ways=0, level1_rows=0, bytes=whole_bytes(table.shape, table.rows),
        lookups=table.lookups, distinct=table.demand.distinct, pinned=table.pinned(memory.lookahead), misses=0.0,
        seconds=seconds,
    )  # fmt: skip
    return Candidate(placement=placement, cost=seconds.total)


def _cached(
    table: TableSpec, memory: MemoryConfig, tiers: Tiers, home: Home, codec: CodecConfig, slots: Slots, level1: int,
    misses: float,
) -> Candidate:  # fmt: skip
    # Two levels that hold different rows and hand them to each other act as one cache of their joint size.
    device_misses = _misses(table, memory, slots.in_sets + level1) if level1 else misses
    seconds = cached_seconds(
        table.shape, table.demand, tiers,
        home=home, codec=codec, ways=slots.ways, misses=misses, device_misses=device_misses,
    )  # fmt: skip
    placement = TablePlacement(
        table=table.name, rows=table.rows, width=table.shape.width, tier=home, codec=codec,
        cache_rows=slots.total, ways=slots.ways, level1_rows=level1,
        bytes=_bytes(table, memory, home, codec, slots, level1),
        lookups=table.lookups, distinct=table.demand.distinct, pinned=table.pinned(memory.lookahead), misses=misses,
        seconds=seconds,
    )  # fmt: skip
    return Candidate(placement=placement, cost=seconds.total + PENALTY[codec.kind] * seconds.compute)


def _bytes(table: TableSpec, memory: MemoryConfig, home: Home, codec: CodecConfig, slots: Slots, level1: int) -> Parts:
    traffic = Traffic(
        lookups=table.lookups,
        distinct=min(table.rows, PIN_MARGIN * table.demand.distinct),
        batches=memory.lookahead + 1,
    )
    return cached_bytes(
        table.shape,
        table.rows,
        home=home,
        codec=codec,
        slots=slots.total,
        level1_rows=level1,
        counters=memory.cache.policy == "lfu",
        traffic=traffic,
    )


def _undominated(found: list[Candidate]) -> list[Candidate]:
    """Without those that another one beats or equals in cost and in every memory; no optimum is lost."""
    points = np.array([(each.cost, *each.sizes) for each in found])
    order = np.lexsort(points.T[::-1])
    kept: list[int] = []
    for index in order:
        if not kept or not (points[kept] <= points[index]).all(axis=1).any():
            kept.append(int(index))
    return [found[index] for index in kept]
