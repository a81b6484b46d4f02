"""Hot rows in a plan: beside the caches, out of the same DRAM.

Of tables under a cache alone, for tables whole in level 0 are hot for nothing; what is left of ``memory.dram`` is
planned for the lookups that are left, so that caches pin and hold less. They stand in the plan, which a run keeps, so a
resumed run has the same. A hot batch then has nothing to look up in a directory and nothing to move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stratarec.config.units import readable
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.errors import ConfigError
from stratarec.hot.calibrator import HotProfile, calibrate, passed_over
from stratarec.hot.config import HotConfig
from stratarec.hot.selection import Counts, RowRange, hottest_rows, parts_of, share_of_accesses, used_bytes
from stratarec.planning.bytes import Memory, Parts, add_parts
from stratarec.planning.config import MemoryConfig
from stratarec.planning.memories import Tiers
from stratarec.planning.placement import make_plan
from stratarec.planning.plan import Plan, TablePlacement


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
    """As `make_plan`; of the DRAM, what `hot` asks for is for hot rows, and the rest for what others ask of it.

    Which tables lie whole in level 0 decides which rows are worth budget, and the other way round: they are planned
    without hot rows first, then with those, until no table leaves level 0 again.

    Raises
    ------
    ConfigError
        When there is nothing to be hot: all tables lie whole in DRAM.
    """
    rest = replace(memory, dram=hot.leave(memory.dram, ranks))
    plan = make_plan(tables, dataset, optimizer, memory, batch_size=batch_size, tiers=tiers, ranks=ranks)
    if ranks > 1:
        if hot.copies is None:
            return plan
        plan = make_plan(tables, dataset, optimizer, rest, batch_size=batch_size, tiers=tiers, ranks=ranks)
        row_bytes = {table.name: _row_bytes(table, optimizer) for table in tables}
        return _with_copies(plan, parts_of(dataset, row_bytes), hot.copies)
    if hot.budget is None:
        return plan
    whole = _whole(plan)
    while True:
        if len(whole) == len(plan.tables):
            raise ConfigError(
                "hot.budget is set, and every table lies whole in DRAM: no row is hotter than others; set it to null, "
                "or memory.dram to less"
            )
        row_bytes = {table.name: _row_bytes(table, optimizer) * (table.name not in whole) for table in tables}
        found = calibrate(dataset, row_bytes, hot.budget, curve=(), field="hot.budget")
        rows = {table.name: table.hot for table in found.tables if table.name not in whole}
        plan = make_plan(tables, dataset, optimizer, rest, batch_size=batch_size, tiers=tiers, hot=rows)
        if whole <= _whole(plan):
            return _with_hot_rows(plan, found, hot.budget, row_bytes, passed_over(dataset))
        whole &= _whole(plan)


def _with_copies(plan: Plan, parts: Sequence[RowRange], budget: int) -> Plan:
    """The plan of several processes, each with copies of the rows that are looked up most for their bytes."""
    most = np.array([part.rows for part in parts])
    rows = hottest_rows(parts, budget) if budget < used_bytes(parts, most) else most
    copied = {part.table: many for part, many in zip(parts, rows.tolist(), strict=True)}
    row_bytes = {part.table: part.row_bytes for part in parts}

    def placed(table: TablePlacement) -> TablePlacement:
        # The owner of a row under a cache has a slot for it, too.
        holders = plan.ranks + (table.tier != "level0")
        more: Parts = {"dram": {"copies": holders * copied[table.table] * row_bytes[table.table]}}
        return replace(table, copied_rows=copied[table.table], bytes=add_parts([table.bytes, more]))

    note = (
        f"every process has copies of {int(rows.sum()):,} hot rows, {readable(used_bytes(parts, rows))}, which take "
        f"{share_of_accesses(parts, rows):.1%} of the lookups"
    )
    tables = tuple(map(placed, plan.tables))
    return replace(plan, tables=tables, budgets=_add_dram(plan, plan.ranks * budget), notes=(*plan.notes, note))


def _add_dram(plan: Plan, size: int) -> Mapping[Memory, int | None]:
    """Add the bytes of hot rows to the budget of DRAM that was left for all else."""
    dram = plan.budgets.get("dram")
    return plan.budgets if dram is None else {**plan.budgets, "dram": dram + size}


def _whole(plan: Plan) -> set[str]:
    return {placed.table for placed in plan.tables if placed.tier == "level0"}


def _row_bytes(table: EmbeddingBagConfig, optimizer: RowOptimizerConfig) -> int:
    return RecordCodec.of(CodecConfig(), table.embedding_dim, optimizer).record_bytes


def hot_rows(plan: Plan, dataset: Dataset) -> tuple[list[RowRange], Counts]:
    """The parts of the tables, and how many first rows of each are hot or lie whole in level 0."""
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, 1))
    placed = [plan[part.table] for part in parts]
    rows = [each.rows if each.tier == "level0" else each.hot_rows for each in placed]
    return parts, np.array(rows, dtype=np.int64)


def _with_hot_rows(
    plan: Plan, profile: HotProfile, budget: int, row_bytes: Mapping[str, int], remark: str
) -> Plan:  # fmt: skip
    found = {table.name: table for table in profile.tables}

    def with_rows(placed: TablePlacement) -> TablePlacement:
        if placed.tier == "level0" or not row_bytes[placed.table]:
            return placed
        table = found[placed.table]
        each = {part: placed.bytes["dram"].get(part, 0) // placed.cache_rows for part in ("slot weights", "slot state")}
        more = {part: size * table.hot for part, size in each.items()}
        return replace(placed, hot_rows=table.hot, bytes=add_parts([placed.bytes, {"dram": more}]))

    point = profile.chosen
    note = (
        f"hot rows take {point.accesses:.1%} of the lookups, tables whole in DRAM included; "
        f"{point.inputs.share:.2%} of the inputs need no others"
    )
    return replace(
        plan,
        tables=tuple(map(with_rows, plan.tables)),
        budgets=_add_dram(plan, budget),
        notes=(*plan.notes, *([remark] if remark else []), note),
    )
