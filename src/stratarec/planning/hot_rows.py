"""Hot rows in a plan: beside the caches, out of the same DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stratarec.data.dataset import Dataset
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import ConfigError
from stratarec.hot.calibrator import calibrate
from stratarec.hot.config import HotConfig
from stratarec.hot.parts import Counts, Part, parts_of
from stratarec.hot.profile import HotProfile
from stratarec.planning.bytes import add_parts
from stratarec.planning.config import MemoryConfig
from stratarec.planning.plan import Plan, TablePlacement
from stratarec.planning.planner import make_plan
from stratarec.planning.tiers import Tiers


def make_hot_plan(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    memory: MemoryConfig,
    hot: HotConfig,
    *,
    batch_size: int,
    tiers: Tiers | None = None,
    ranks: int = 1,
) -> Plan:
    """As `make_plan`; of the DRAM, what `hot` asks for is for hot rows, and the rest is planned as ever.

    Predicted hit rates are those of the caches alone: with hot rows they are higher.

    Raises
    ------
    ConfigError
        When there is nothing to be hot: all tables lie whole in DRAM, or several ranks share them.
    """
    rest = replace(memory, dram=hot.leave(memory.dram))
    plan = make_plan(tables, dataset, optimizer, rest, batch_size=batch_size, tiers=tiers, ranks=ranks)
    if hot.budget is None:
        return plan
    if ranks > 1:
        raise ConfigError(f"hot.budget is for one process, and {ranks} are to share the tables; set it to null")
    if all(placed.tier == "level0" for placed in plan.tables):
        raise ConfigError(
            "hot.budget is set, and every table lies whole in DRAM: no row is hotter than others; set it to null, or "
            "memory.dram to less"
        )
    found = calibrate(dataset, _row_bytes(plan), hot.budget, curve=(), field="hot.budget")
    return _with_hot_rows(plan, found, hot.budget)


def hot_rows(plan: Plan, dataset: Dataset) -> tuple[list[Part], Counts]:
    """The parts of the tables, and how many first rows of each are hot or lie whole in level 0."""
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, 1))
    rows = [
        part.rows if plan[part.table].tier == "level0"
        else plan[part.table].hot_tail if part.whole else plan[part.table].hot_head
        for part in parts
    ]  # fmt: skip
    return parts, np.array(rows, dtype=np.int64)


def _row_bytes(plan: Plan) -> dict[str, int]:
    """Table -> bytes of a hot row; nothing for tables whose rows all are in level 0 anyway."""
    return {placed.table: 0 if placed.tier == "level0" else _slot_bytes(placed) for placed in plan.tables}


def _slot_bytes(placed: TablePlacement) -> int:
    dram = placed.bytes["dram"]
    return (dram["slot weights"] + dram.get("slot state", 0)) // placed.cache_rows


def _with_hot_rows(plan: Plan, profile: HotProfile, budget: int) -> Plan:
    found = {table.name: table for table in profile.tables}

    def with_rows(placed: TablePlacement) -> TablePlacement:
        if placed.tier == "level0":
            return placed
        table = found[placed.table]
        each = {part: placed.bytes["dram"].get(part, 0) // placed.cache_rows for part in ("slot weights", "slot state")}
        more = {part: size * table.hot for part, size in each.items()}
        return replace(
            placed, hot_head=table.head, hot_tail=table.tail, bytes=add_parts([placed.bytes, {"dram": more}])
        )  # fmt: skip

    point = profile.chosen
    note = (
        f"hot rows take {point.accesses:.1%} of the lookups, tables whole in DRAM included; "
        f"{point.inputs.share:.2%} of the inputs need no others"
    )
    dram = plan.budgets.get("dram")
    return replace(
        plan,
        tables=tuple(map(with_rows, plan.tables)),
        budgets={**plan.budgets, **({} if dram is None else {"dram": dram + budget})},
        notes=(*plan.notes, note),
    )
