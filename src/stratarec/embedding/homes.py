"""Sorting tables into groups, and opening the store of each group's home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stratarec.embedding.cache.row_cache import RowCache
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.groups import DenseGroup, TieredGroup
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.dram_records import DramRecords
from stratarec.embedding.stores.mapped import MappedRecords
from stratarec.embedding.tiers import HomeKind, TierConfig
from stratarec.errors import ConfigError

GroupKey = tuple[int, HomeKind, CodecConfig] | tuple[int]


def build_groups(
    tables: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    optimizer: RowOptimizerConfig,
    seed: int,
    tiers: TierConfig,
) -> list[DenseGroup | TieredGroup]:
    """One group for each width, home and codec that tables share.

    Raises
    ------
    ConfigError
        For a tier of a table that does not exist.
    """
    unknown = sorted(set(tiers.tables) - {table.name for table in tables})
    if unknown:
        raise ConfigError(f"tiers names table {unknown[0]!r}; there are {', '.join(table.name for table in tables)}")
    members: dict[GroupKey, list[EmbeddingBagConfig]] = {}
    for table in tables:
        tier = tiers.tables.get(table.name)
        key: GroupKey = (table.embedding_dim, tier.home, tier.codec) if tier else (table.embedding_dim,)
        members.setdefault(key, []).append(table)
    groups: list[DenseGroup | TieredGroup] = []
    for key, mine in members.items():
        if len(key) == 1:
            groups.append(DenseGroup(mine, columns, optimizer, seed))
            continue
        width, home, config = key
        codec = RecordCodec(
            config, width=width, row_state=bool(optimizer.row_state), full_state=bool(optimizer.full_state)
        )
        rows = sum(table.num_embeddings for table in mine)
        store = open_store(home, tiers, f"{width}-{config.kind}", rows, codec.record_bytes)
        cache = RowCache(
            mine, tiers.tables, policy=tiers.policy, ways=tiers.ways, optimizer=optimizer, codec=codec, store=store,
            seed=seed,
        )  # fmt: skip
        groups.append(TieredGroup(mine, columns, cache))
    return groups


def open_store(home: HomeKind, tiers: TierConfig, name: str, rows: int, record_bytes: int) -> RecordStore:
    """An empty store of the kind."""
    if home == "mapped":
        assert tiers.mapped_path is not None
        return MappedRecords(tiers.mapped_path / name, rows=rows, record_bytes=record_bytes)
    return DramRecords(rows=rows, record_bytes=record_bytes)


def open_log(directory: Path, *, rows: int, record_bytes: int) -> RecordStore:
    raise NotImplementedError
