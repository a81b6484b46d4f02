"""Configuration of tables outside level 0: their home and their cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from stratarec.config.validate import check_choice, check_ranges
from stratarec.embedding.config import CachePolicy, CodecConfig
from stratarec.embedding.homes import HOMES, HomeKind
from stratarec.errors import ConfigError

MEMORY_NAMES = {"hbm": "GPU memory", "dram": "DRAM", "mapped": "mapped", "block": "block"}
"""Memory that rows can be in -> its name in texts."""
OVERFLOW_SHARE = 16
"""One set in this many is an overflow set, for rows whose own set is full of rows in use."""
_OVERFLOW_PROBABILITY = 1e-9


@dataclass(frozen=True, kw_only=True)
class TableTier:
    """The home of one table's rows, and the float32 cache in level 0."""

    home: HomeKind = "dram"
    """``dram`` is an array, ``mapped`` a memory-mapped file, ``log`` an SSD store, which appends
    records to files on a block device, ``hbm`` an array in the memory of the GPU that trains the
    rows; `HOMES` may have more."""
    codec: CodecConfig = field(default_factory=CodecConfig)
    """Encoding of rows in the home."""
    cache_rows: int
    """Slots of level 0 for this table, including the overflow area."""
    hot_rows: int = 0
    """Number of hot rows: first rows of the table, with permanent slots besides the cache."""
    dram_rows: int = 0
    """Number of first rows whose records are in DRAM although the table's home is a ``log``."""

    def __post_init__(self) -> None:
        check_ranges(self, "", cache_rows="[1, inf)", hot_rows="[0, inf)", dram_rows="[0, inf)")


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Device of level 0, and the tables outside of it; other tables are in level 0, in float32."""

    device: str = "cpu"
    """Device in whose memory rows are trained: ``cpu``, or a GPU such as ``cuda``, on which the
    network is then too.
    """
    tables: Mapping[str, TableTier] = field(default_factory=dict)
    """Table name -> home and cache."""
    policy: CachePolicy = "lru"
    """Choice of the row that a full set evicts, a key of `POLICIES`."""
    ways: int = 32
    """Slots per set."""
    mapped_path: Path | None = None
    """Directory for ``mapped`` homes."""
    log_path: Path | None = None
    """Directory for ``log`` homes."""
    log_budget_bytes: int | None = None
    """Maximum file space of all ``log`` homes together; None for all free disk space."""
    lookahead: int = 1
    """Number of batches that are staged ahead in training."""

    def __post_init__(self) -> None:
        check_ranges(self, "", ways="[1, 256]")
        for name, tier in self.tables.items():
            check_choice(tier.home, f"table {name!r}: home", HOMES)
            if (field_name := HOMES[tier.home].path) and getattr(self, field_name) is None:
                raise ConfigError(
                    f"table {name!r} has home {tier.home!r}, but {field_name} is not "
                    "set; set it to a directory"
                )


def cache_sets(cache_rows: int, ways: int) -> tuple[int, int]:
    """Return the numbers of sets and overflow sets of a cache of at most `cache_rows` slots; at
    least one of each.

    `ways` is the number of slots of a set.
    """
    total = max(cache_rows // ways, 2)
    overflow = max(total // OVERFLOW_SHARE, 1)
    return total - overflow, overflow


@cache
def slots_for_batch(rows: int, ways: int) -> int:
    """Return the fewest slots that fit a batch of `rows` distinct rows with a probability of at
    least 1 - 1e-9.

    `ways` is the number of slots of a set.
    """
    least, most = 2, 2
    while _overflow_chance(rows, *cache_sets(most * ways, ways), ways) > _OVERFLOW_PROBABILITY:
        least, most = most + 1, 2 * most
    while least < most:
        middle = (least + most) // 2
        if _overflow_chance(rows, *cache_sets(middle * ways, ways), ways) > _OVERFLOW_PROBABILITY:
            least = middle + 1
        else:
            most = middle
    return most * ways


def _overflow_chance(rows: int, sets: int, overflow_sets: int, ways: int) -> float:
    """Return an upper bound on the probability that `rows` distinct rows do not fit into their sets
    and the overflow sets; rows are assigned to sets by hash.

    Chernoff's bound: the numbers of rows in different sets are negatively associated and binomially
    distributed.
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
