"""Places tables: measured tiers, budgets and access counts in, a `Plan` out. No file is touched.

After MTrainS (arXiv 2305.01515), which places tables over a machine's memories by the capacity and the bandwidth that
each of them needs; precision and cache size are chosen in the same step.

A program of a few thousand binaries picks one candidate a table under the byte budgets: one to four seconds for 26
tables. When nothing fits, the same program with bytes as the cost gives the least budget that would do. A table that
needs a cache as large as itself, for the rows of the batches in flight, is whole in level 0 at any precision.
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
from stratarec.hot.calibrator import HotProfile, calibrate, warn_inherited_ids
from stratarec.hot.config import HotConfig
from stratarec.hot.selection import Counts, RowRange, hottest_rows, parts_of, share_of_accesses, used_bytes
from stratarec.planning.bytes import (
    MEMORIES,
    SHARED_BYTES,
    Memory,
    Parts,
    add_parts,
    in_memory,
    output_bytes,
    workspace_bytes,
)
from stratarec.planning.candidates import Candidate, TableSpec, candidates, describe_tables
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Tiers, measure_tiers
from stratarec.planning.plan import Log, Plan, TablePlacement
from stratarec.planning.step_model import PENALTY, TableSeconds

_FIELDS: Mapping[Memory, str] = {
    "dram": "memory.dram",
    "mapped": "memory.mapped.budget",
    "block": "memory.block.budget",
}


def place(
    tables: Sequence[TableSpec], memory: MemoryConfig, tiers: Tiers, *, batch_size: int, ranks: int = 1,
    choices: Sequence[Sequence[Candidate]] | None = None,
) -> Plan:  # fmt: skip
    """The placement of least predicted time, with the penalties of lower precision, that the budgets allow.

    Parameters
    ----------
    tables : sequence of TableSpec
        Tables with what a batch asks of them.
    memory : MemoryConfig
        Budgets of each process, precision and cache.
    tiers : Tiers
        What the memories give; those that `memory` names must be in it.
    batch_size : int
        Recorded in the plan; lookups are in `tables`.
    ranks : int
        Processes that share the tables, each with logs and a workspace of its own.
    choices : sequence of sequences of Candidate
        The `candidates` of each table, which are the same whatever the budgets are, where they are known.

    Raises
    ------
    ConfigError
        When no placement fits, with the smallest budget of a process that is enough; for a precision of a table that
        does not exist.
    """
    memory.check_tables(table.name for table in tables)
    budgets = _budgets(memory.times(ranks), tiers)
    choices = choices or [candidates(table, memory, tiers) for table in tables]
    workspace = workspace_bytes(
        [table.lookups for table in tables],
        max((table.shape.width for table in tables), default=1),
        tiers.threads,
    )
    limits = [budgets.get(name) for name in MEMORIES]
    if budgets["dram"] is not None:
        limits[MEMORIES.index("dram")] = budgets["dram"] - ranks * workspace
    chosen = _least(choices, limits, None, ranks)
    if chosen is None:
        raise ConfigError(_explain(tables, choices, limits, memory, workspace, ranks))
    placements = tuple(each.placement for each in chosen)
    return Plan(
        tables=placements, budgets=budgets, batch_size=batch_size, lookahead=memory.lookahead,
        policy=memory.cache.policy, workspace_bytes=workspace, ranks=ranks,
        output_bytes=output_bytes(sum(table.outputs for table in tables)), fixed=_fixed(placements, tiers),
        notes=(*_notes(tables, chosen, memory), *_doubts(memory, tiers, ranks)),
    )  # fmt: skip


def _fixed(placements: Sequence[TablePlacement], tiers: Tiers) -> TableSeconds:
    """Of each group of tables of one width, home and codec."""
    groups = {(each.tier, each.width, each.codec) for each in placements}
    cached = sum(tier != "level0" for tier, *_ in groups)
    return TableSeconds(compute=tiers.engine.compute.step * len(groups), staging=tiers.engine.staging.step * cached)


def _budgets(memory: MemoryConfig, tiers: Tiers) -> dict[Memory, int | None]:
    """Budgets of the memories that exist, of all processes together; the free bytes of a path that has no budget."""
    budgets: dict[Memory, int | None] = {"dram": memory.dram}
    for name, config, tier in (("mapped", memory.mapped, tiers.mapped), ("block", memory.block, tiers.block)):
        if config is None:
            continue
        if tier is None:
            raise ConfigError(f"memory.{name} is set, but its path was not measured; expected it in the tiers")
        budgets[name] = tier.free_bytes if config.budget is None else config.budget  # type: ignore[index]
    return budgets


def _least(
    choices: Sequence[Sequence[Candidate]], limits: Sequence[int | None], memory: Memory | None, ranks: int
) -> list[Candidate] | None:
    """The choice of least cost, or of fewest bytes in `memory`."""
    sizes = [np.array([each.sizes for each in found], dtype=np.int64) for found in choices]
    logs = list(dict.fromkeys(each.placement.log for found in choices for each in found if each.placement.log))
    shared = [ranks * in_memory(SHARED_BYTES, name) for name in MEMORIES]
    if memory is None:
        costs, fees = [np.array([each.cost for each in found]) for found in choices], 0
    else:
        place = MEMORIES.index(memory)
        costs, fees = [size[:, place].astype(np.float64) for size in sizes], shared[place]
    # SciPy's solvers are loaded here: what places no table, as most commands, would wait for them.
    from stratarec.planning.solve import Groups, solve

    groups = Groups(
        member=[np.array([_index(logs, each.placement.log) for each in found]) for found in choices],
        sizes=np.array([shared] * len(logs), dtype=np.int64).reshape(len(logs), len(MEMORIES)),
        costs=np.full(len(logs), float(fees)),
    )
    chosen = solve(costs, sizes, limits, groups)
    return None if chosen is None else [found[choice] for found, choice in zip(choices, chosen, strict=True)]


def _index(logs: list[Log], log: Log | None) -> int:
    return -1 if log is None else logs.index(log)


def _used(chosen: Sequence[Candidate], memory: Memory, ranks: int) -> int:
    """Bytes of tables and of the logs that they share."""
    logs = ranks * len({each.placement.log for each in chosen} - {None})
    return sum(in_memory(each.placement.bytes, memory) for each in chosen) + logs * in_memory(SHARED_BYTES, memory)


def _explain(
    tables: Sequence[TableSpec], choices: Sequence[Sequence[Candidate]], limits: Sequence[int | None],
    memory: MemoryConfig, workspace: int, ranks: int,
) -> str:  # fmt: skip
    """Name each budget that is too small, its smallest value that is enough, and what needs most of it."""
    fixes, worst = [], ""
    each = f" for each of {ranks} processes" if ranks > 1 else ""
    for place, name in enumerate(MEMORIES):
        limit = limits[place]
        if limit is None or (name != "dram" and getattr(memory, name) is None):
            continue
        without = [None if other == place else bound for other, bound in enumerate(limits)]
        smallest = _least(choices, without, name, ranks)
        if smallest is None:
            continue
        shared = workspace if name == "dram" else 0
        needed, budget = -(-_used(smallest, name, ranks) // ranks) + shared, limit // ranks + shared
        fixes.append(f"{_FIELDS[name]} to at least {needed} ({readable(needed)}; it is {readable(budget)}){each}")
        worst = worst or _worst(smallest, name, shared, ranks)
    if not fixes:
        return f"no placement fits the budgets together: {worst or 'raise memory.dram'}"
    return f"the tables do not fit: {worst}. Set {', or '.join(fixes)}{_cheaper(tables, memory)}"


def _worst(chosen: Sequence[Candidate], memory: Memory, workspace: int, ranks: int) -> str:
    """Name what needs most of a memory: a table with its log, or the workspace of the update in each process."""
    most = max(chosen, key=lambda each: _used([each], memory, ranks))
    placed, needed = most.placement, _used([most], memory, ranks)
    if ranks * workspace > needed:
        where = " in each process" if ranks > 1 else ""
        return f"the update of a batch alone needs {workspace} bytes ({readable(workspace)}) of {memory}{where}"
    where = f" in {ranks} processes together" if ranks > 1 else ""
    text = f"table {placed.table!r} alone needs at least {needed} bytes ({readable(needed)}) of {memory}{where}"
    if placed.tier != "level0":
        text += (
            f", as {placed.codec.kind} in {placed.tier} with {placed.cache_rows:,} cache rows, of which the batches in "
            f"flight pin up to {placed.pinned:,}"
        )
    if placed.log is not None:
        text += f"; {readable(needed - in_memory(placed.bytes, memory))} of this is its log, which tables may share"
    return text


def _cheaper(tables: Sequence[TableSpec], memory: MemoryConfig) -> str:
    ways = []
    lowest = max(PENALTY, key=PENALTY.__getitem__)
    if any(memory.table_precision(table.name) not in ("auto", lowest) for table in tables):
        ways.append("allow a lower memory.precision")
    if memory.block is None:
        ways.append("name a block device in memory.block")
    ways += ["lower train.batch_size", "lower memory.lookahead"] if memory.lookahead else ["lower train.batch_size"]
    return "; or " + ", ".join(ways)


def _notes(tables: Sequence[TableSpec], chosen: Sequence[Candidate], memory: MemoryConfig) -> tuple[str, ...]:
    notes = []
    fraction = memory.cache.fraction
    raised, whole = [], []
    for table, each in zip(tables, chosen, strict=True):
        placed = each.placement
        if placed.tier == "level0" and memory.table_precision(table.name) not in ("auto", "fp32"):
            whole.append(table.name)
        elif placed.tier != "level0" and fraction is not None and placed.cache_rows > fraction * table.rows * 1.05:
            raised.append(table.name)
    if whole:
        which = "all tables" if len(whole) == len(tables) else ", ".join(whole)
        notes.append(
            f"float32 in DRAM, whatever memory.precision says: {which}; the rows of the batches under way need a cache "
            "as large as the table"
        )
    if raised:
        notes.append(f"more cache than memory.cache.fraction, for the rows in flight: {', '.join(raised)}")
    return tuple(notes)


def _doubts(memory: MemoryConfig, tiers: Tiers, ranks: int) -> list[str]:
    """Name the budgets that are larger than this machine has free, and a path without direct reads."""
    there: list[tuple[Memory, int | None, int]] = [("dram", memory.dram, tiers.dram.bytes)]
    if memory.block is not None and tiers.block is not None:
        there.append(("block", memory.block.budget, tiers.block.free_bytes))
    if memory.mapped is not None and tiers.mapped is not None:
        there.append(("mapped", memory.mapped.budget, tiers.mapped.free_bytes))
    each = f" for each of {ranks} processes" if ranks > 1 else ""
    notes = [
        f"{_FIELDS[name]} is {readable(budget)}{each}, but this machine has only {readable(free)}"
        for name, budget, free in there
        if budget is not None and budget * ranks > free
    ]
    if memory.block is not None and tiers.block is not None and not tiers.block.direct:
        notes.append(f"{memory.block.path} takes no direct reads: its speed was measured through the page cache")
    return notes


def make_plan(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    memory: MemoryConfig,
    *,
    batch_size: int,
    tiers: Tiers | None = None,
    ranks: int = 1,
    hot: Mapping[str, int] | None = None,
) -> Plan:
    """Where the tables of a model live on this machine.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Each named as its vocabulary.
    dataset : Dataset
        Gives the access counts.
    optimizer : RowOptimizerConfig
        Decides the state of a row.
    memory : MemoryConfig
        Budgets of each process, precision and cache.
    batch_size : int
        Samples a step.
    tiers : Tiers
        What the memories give; from `measure_tiers` by default.
    ranks : int
        Processes that share the tables.
    hot : mapping of str to int
        Table -> how many of its first rows are hot: no cache is asked for them.

    Raises
    ------
    ConfigError
        When nothing fits; names the budget and the least number that would do.
    """
    memory.check_tables(table.name for table in tables)
    described = describe_tables(tables, dataset, optimizer, batch_size=batch_size, hot=hot)
    return place(described, memory, tiers or measure_tiers(memory), batch_size=batch_size, ranks=ranks)


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
    rest = replace(memory, dram=hot.remaining_dram(memory.dram, ranks))
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
            return _with_hot_rows(plan, found, hot.budget, row_bytes, warn_inherited_ids(dataset))
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
