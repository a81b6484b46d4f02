"""A plan as the embedding collection takes it."""

from __future__ import annotations

from pathlib import Path

from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.planning.config import MemoryConfig
from stratarec.planning.plan import Plan


def tier_config(plan: Plan, memory: MemoryConfig, name: str) -> TierConfig:
    """The tiers that `plan` places tables in; stores with files get a directory `name` under the paths of `memory`.

    Raises
    ------
    ConfigError
        When the plan needs a path that `memory` does not name.
    """
    tables = {
        placed.table: TableTier(
            home=placed.tier,
            codec=placed.codec,
            cache_rows=placed.cache_rows,
            level1_rows=placed.level1_rows,
            hot_head=placed.hot_head,
            hot_tail=placed.hot_tail,
        )
        for placed in plan.tables
        if placed.tier != "level0"
    }
    for home, field, path in (
        ("mapped", "memory.mapped.path", memory.mapped),
        ("log", "memory.block.path", memory.block),
    ):
        table = next((name for name, tier in tables.items() if tier.home == home), None)
        if table is not None and path is None:
            raise ConfigError(f"the plan places table {table!r} in a {home} home: set {field}, a directory for it")
    # A plan has one number of ways; a table whole in level 0 has none.
    ways = max((placed.ways for placed in plan.tables if placed.tier != "level0"), default=memory.cache.ways)
    return TierConfig(
        tables=tables,
        policy=plan.policy,
        ways=ways,
        lookahead=plan.lookahead,
        mapped_path=Path(memory.mapped.path) / name if memory.mapped else None,
        log_path=Path(memory.block.path) / name if memory.block else None,
        log_budget_bytes=memory.block.budget if memory.block else None,
    )
