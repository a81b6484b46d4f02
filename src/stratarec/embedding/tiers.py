"""Which tables leave level 0, where they are at home then, and how they are cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from stratarec.embedding.codecs import CodecConfig
from stratarec.errors import ConfigError
from stratarec.kernels.cache import POLICIES

HomeKind = Literal["dram", "mapped", "log"]
if TYPE_CHECKING:
    CachePolicy: TypeAlias = str
else:
    CachePolicy = Literal[tuple(POLICIES)]
"""A key of `kernels.cache.POLICIES`, which is the one list of policies."""

OVERFLOW_SHARE = 16
"""One set in so many is kept for rows whose own set is full of rows in use."""
_CHANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TableTier:
    """The home of one table's rows, and the float32 cache over it."""

    home: HomeKind = "dram"
    """``dram`` is an array, ``mapped`` an array in a mapped file, ``log`` an append-only log on a block device."""
    codec: CodecConfig = field(default_factory=CodecConfig)
    """How a row is encoded at rest."""
    cache_rows: int
    """Slots of level 0 for this table, the overflow area included."""
    hot_rows: int = 0
    """So many first rows have slots of their own beside the cache's and never leave them."""

    def __post_init__(self) -> None:
        if self.cache_rows < 1:
            raise ConfigError(f"cache_rows is {self.cache_rows}, expected at least 1")
        if self.hot_rows < 0:
            raise ConfigError(f"hot_rows is {self.hot_rows}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Tables that do not lie whole in level 0; the others do, in float32."""

    tables: Mapping[str, TableTier] = field(default_factory=dict)
    """Table name -> home and cache."""
    policy: CachePolicy = "lru"
    """Which row of a full set goes: the least recently used, the least often used, or the one of the highest id."""
    ways: int = 32
    """Slots of a set."""
    mapped_path: Path | None = None
    """Directory of ``mapped`` homes."""
    log_path: Path | None = None
    """Directory of ``log`` homes."""
    log_budget_bytes: int | None = None
    """File space that all ``log`` homes together may take; None for what the disk has."""
    lookahead: int = 1
    """Batches that a training run stages ahead."""

    def __post_init__(self) -> None:
        if not 1 <= self.ways <= 256:
            raise ConfigError(f"ways is {self.ways}, expected 1 to 256")
        for home, path in (("mapped", self.mapped_path), ("log", self.log_path)):
            named = [name for name, tier in self.tables.items() if tier.home == home]
            if named and path is None:
                raise ConfigError(f"table {named[0]!r} is at home in {home!r}: give {home}_path, a directory")


def cache_sets(cache_rows: int, ways: int) -> tuple[int, int]:
    """Sets and overflow sets that `cache_rows` slots make: one of each at least, and no more slots than asked for."""
    total = max(cache_rows // ways, 2)
    overflow = max(total // OVERFLOW_SHARE, 1)
    return total - overflow, overflow


@cache
def slots_for_batch(rows: int, ways: int) -> int:
    """Return the fewest slots in which a batch of so many distinct rows finds room, but for a chance of 1e-9."""
    least, most = 2, 2
    while _overflow_chance(rows, *cache_sets(most * ways, ways), ways) > _CHANCE:
        least, most = most + 1, 2 * most
    while least < most:
        middle = (least + most) // 2
        if _overflow_chance(rows, *cache_sets(middle * ways, ways), ways) > _CHANCE:
            least = middle + 1
        else:
            most = middle
    return most * ways


def _overflow_chance(rows: int, sets: int, overflow_sets: int, ways: int) -> float:
    """Return a bound on the chance that rows in sets by hash exceed these by more than the overflow sets hold.

    Chernoff's bound: numbers of rows in different sets are negatively associated, each of a binomial distribution.
    """
    room = overflow_sets * ways
    if rows <= ways + room:
        return 0.0
    if rows > sets * ways + room:
        return 1.0
    count = np.arange(1, min(rows, 4 * ways + 64) + 1)
    log_odds = np.log((rows - count + 1) / count) - np.log(sets - 1)
    log_share = np.append(0.0, np.cumsum(log_odds)) + rows * np.log1p(-1 / sets)
    excess = np.maximum(np.append(0, count) - ways, 0)
    rates = np.geomspace(0.01, 4, 60)[:, None]
    with np.errstate(over="ignore"):
        moments = np.exp(log_share + rates * excess).sum(axis=1)
    return float(np.exp(min(0.0, (sets * np.log(moments) - rates[:, 0] * (room + 1)).min())))
