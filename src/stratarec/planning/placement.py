"""Compute a `Plan` from measured tiers, budgets and access counts. No file is written.

As in MTrainS (arXiv 2305.01515), tables are placed over a machine's memories by the capacity and
bandwidth that they need. Here, precision and cache size are chosen in the same step.

An integer program with a few thousand binary variables chooses one candidate per table within the
byte budgets; it takes one to four seconds for 26 tables. If nothing fits, the same program with
bytes as the cost gives the smallest sufficient budget. A table is entirely in level 0, whatever its
precision, if the rows of the batches in flight need a cache as large as the table.

**Frequent rows** of a table in an SSD store may have their records in DRAM, so that DRAM holds the
frequent rows of several tables instead of all rows of some.

**Hot rows** of tables under a cache are part of the plan. A run saves the plan, so a resumed run
has the same hot rows. They have separate slots in level 0. The rest of the budget is planned for
the remaining lookups, for which smaller caches are sufficient. A hot batch needs no search in a
cache's directory and moves no rows. Hot rows are of no use for tables that are entirely in level 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig, EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import MEMORY_NAMES
from stratarec.errors import ConfigError
from stratarec.hot.calibrator import HotProfile, calibrate, warn_inherited_ids, warn_little_skew
from stratarec.hot.config import HotConfig
from stratarec.hot.selection import Counts, RowRange, parts_of
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import (
    MEMORIES,
    SHARED_BYTES,
    Memory,
    add_parts,
    device_workspace_bytes,
    in_memory,
    output_bytes,
    workspace_bytes,
)
from stratarec.planning.candidates import Candidate, TableSpec, candidates, describe_tables, resolve_policy
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.machine import BlockTier, Tiers, measure_tiers
from stratarec.planning.plan import Plan, SsdStore, TablePlacement
from stratarec.planning.step_model import TableSeconds

_FIELDS: Mapping[Memory, str] = {
    "hbm": "memory.hbm",
    "dram": "memory.dram",
    "mapped": "memory.mapped.budget",
    "block": "memory.block.budget",
}

# Cache of the pinned rows alone, and a device whose speed does not matter, to find out whether
# tables would fit.
_SMALLEST_CACHE = 1e-9
_ANY_BLOCK = BlockTier(
    path="",
    write_bytes_per_second=1e9,
    reads_per_second=1e5,
    read_bytes=4096,
    parallel=1,
    direct=True,
    free_bytes=1 << 60,
)


def place(
    tables: Sequence[TableSpec],
    memory: MemoryConfig,
    tiers: Tiers,
    *,
    batch_size: int,
    ranks: int = 1,
    choices: Sequence[Sequence[Candidate]] | None = None,
) -> Plan:
    """Return the plan with the smallest cost (predicted time and penalties for lower precision)
    within the budgets.

    Parameters
    ----------
    tables : sequence of TableSpec
        Tables to place, with the lookups of a batch.
    memory : MemoryConfig
        Budgets of each process, precision and cache.
    tiers : Tiers
        Measured rates. They must include the memories that `memory` names.
    batch_size : int
        Samples per batch. It is only recorded in the plan, because `tables` already contain the
        lookups of a batch.
    ranks : int
        Number of processes that share the tables. Each has its own SSD stores and workspace.
    choices : sequence of sequences of Candidate
        Result of `candidates` for each table, if it was computed already. It does not depend on
        budgets.

    Raises
    ------
    ConfigError
        If no placement fits; the message has the smallest sufficient budget of a process. Also if
        `memory` has a precision for a table that does not exist.
    """
    memory.check_tables(table.name for table in tables)
    memory = resolve_policy(memory, tables)
    budgets, workspace = _budgets(memory.times(ranks), tiers), _workspace(tables, memory, tiers)
    choices = choices or [candidates(table, memory, tiers) for table in tables]
    limits = _limits(budgets, memory, ranks * workspace)
    chosen = _least(choices, limits, None, ranks)
    if chosen is None:
        advice = "".join(f", or {way}" for way in _cheaper(tables, memory, tiers, batch_size, ranks))
        raise ConfigError(_explain(choices, limits, memory, workspace, ranks) + advice)
    placements = tuple(option.placement for option in chosen)
    return Plan(
        tables=placements,
        budgets=budgets,
        batch_size=batch_size,
        lookahead=memory.lookahead,
        policy=memory.cache.policy,
        workspace_bytes=workspace,
        ranks=ranks,
        output_bytes=output_bytes(sum(table.outputs for table in tables)),
        fixed=_fixed(placements, tiers),
        notes=(*_notes(tables, chosen, memory), *_doubts(memory, tiers, ranks)),
    )


def _workspace(tables: Sequence[TableSpec], memory: MemoryConfig, tiers: Tiers) -> int:
    """Return the bytes in level 0 of a process that the update of a batch needs."""
    lookups = [table.lookups for table in tables]
    widest = max((table.shape.width for table in tables), default=1)
    if memory.hbm:
        return device_workspace_bytes(lookups, widest, memory.lookahead)
    return workspace_bytes(lookups, widest, tiers.threads)


def _limits(budgets: Mapping[Memory, int | None], memory: MemoryConfig, workspace: int) -> list[int | None]:
    """Return the bytes of tables that each of `MEMORIES` can hold; None for no limit."""
    limits = [budgets.get(name) for name in MEMORIES]
    level0 = budgets[memory.level0]
    if level0 is not None:
        limits[MEMORIES.index(memory.level0)] = level0 - workspace
    return limits


def _fixed(placements: Sequence[TablePlacement], tiers: Tiers) -> TableSeconds:
    """Return the costs per step of all groups of tables (`WorkCosts.step`).

    Tables with the same width, home and codec are one group.
    """
    groups = {(option.tier, option.width, option.codec) for option in placements}
    cached = sum(tier != "level0" for tier, *_ in groups)
    return TableSeconds(
        compute=tiers.costs.compute.step * len(groups), staging=tiers.costs.staging.step * cached
    )


def _budgets(memory: MemoryConfig, tiers: Tiers) -> dict[Memory, int | None]:
    """Return the budget of each memory, for all processes together.

    If a path has no budget, it is the number of bytes that are free there.
    """
    budgets: dict[Memory, int | None] = {"hbm": memory.hbm} if memory.hbm else {}
    budgets["dram"] = memory.dram
    for name, config, tier in (
        ("mapped", memory.mapped, tiers.mapped),
        ("block", memory.block, tiers.block),
    ):
        if config is None:
            continue
        if tier is None:
            raise ConfigError(f"memory.{name} is set, but its path is not in the measured tiers")
        budgets[name] = tier.free_bytes if config.budget is None else config.budget  # type: ignore[index]
    return budgets


def _least(
    choices: Sequence[Sequence[Candidate]], limits: Sequence[int | None], memory: Memory | None, ranks: int
) -> list[Candidate] | None:
    """Return one candidate per table within `limits`: with the smallest total cost, or, if `memory`
    is given, with the fewest bytes in that memory. None if nothing fits.
    """
    sizes = [np.array([option.sizes for option in options], dtype=np.int64) for options in choices]
    stores = list(
        dict.fromkeys(
            option.placement.ssd for options in choices for option in options if option.placement.ssd
        )
    )
    shared = [ranks * in_memory(SHARED_BYTES, name) for name in MEMORIES]
    if memory is None:
        costs, fees = [np.array([option.cost for option in options]) for options in choices], 0
    else:
        place = MEMORIES.index(memory)
        costs, fees = [size[:, place].astype(np.float64) for size in sizes], shared[place]
    # Imported here because SciPy's solvers load slowly, and most commands do not place tables.
    from stratarec.planning.solve import Groups, solve

    numbers: dict[SsdStore | None, int] = {
        None: -1,
        **{store: number for number, store in enumerate(stores)},
    }
    groups = Groups(
        member=[np.array([numbers[option.placement.ssd] for option in options]) for options in choices],
        sizes=np.array([shared] * len(stores), dtype=np.int64).reshape(len(stores), len(MEMORIES)),
        costs=np.full(len(stores), float(fees)),
    )
    chosen = solve(costs, sizes, limits, groups)
    return (
        None
        if chosen is None
        else [options[choice] for options, choice in zip(choices, chosen, strict=True)]
    )


def _used(chosen: Sequence[Candidate], memory: Memory, ranks: int) -> int:
    """Return the bytes in one memory of the chosen candidates and of the SSD stores that they
    share.
    """
    of_stores = (
        ranks * len({option.placement.ssd for option in chosen} - {None}) * in_memory(SHARED_BYTES, memory)
    )
    return sum(in_memory(option.placement.bytes, memory) for option in chosen) + of_stores


def _explain(
    choices: Sequence[Sequence[Candidate]],
    limits: Sequence[int | None],
    memory: MemoryConfig,
    workspace: int,
    ranks: int,
) -> str:
    """Return an error message with each budget that is too small, its smallest sufficient value,
    and the largest consumer.
    """
    fixes, worst = [], ""
    of_each = f" for each of {ranks} processes" if ranks > 1 else ""
    for place, name in enumerate(MEMORIES):
        limit = limits[place]
        if limit is None or getattr(memory, name) is None:
            continue
        without = [None if other == place else bound for other, bound in enumerate(limits)]
        smallest = _least(choices, without, name, ranks)
        if smallest is None:
            continue
        shared = workspace if name == memory.level0 else 0
        needed, budget = -(-_used(smallest, name, ranks) // ranks) + shared, limit // ranks + shared
        fixes.append(
            f"{_FIELDS[name]} to at least {needed} ({format_bytes(needed)}; it is "
            f"{format_bytes(budget)}){of_each}"
        )
        worst = worst or _worst(smallest, name, shared, ranks)
    if not fixes:
        return f"no placement fits the budgets together: {worst or 'raise memory.dram'}"
    return f"the tables do not fit: {worst}. Set {', or '.join(fixes)}"


def _worst(chosen: Sequence[Candidate], memory: Memory, workspace: int, ranks: int) -> str:
    """Return a text about a memory's largest consumer: a table with its SSD store, or the workspace
    of the update.
    """
    name, most = MEMORY_NAMES[memory], max(chosen, key=lambda option: _used([option], memory, ranks))
    placed, needed = most.placement, _used([most], memory, ranks)
    if ranks * workspace > needed:
        where = " in each process" if ranks > 1 else ""
        return f"the update of a batch alone needs {workspace} bytes ({format_bytes(workspace)}) of {name}{where}"
    where = f" in {ranks} processes together" if ranks > 1 else ""
    text = f"table {placed.table!r} alone needs at least {needed} bytes ({format_bytes(needed)}) of {name}{where}"
    if placed.tier != "level0":
        text += (
            f", as {placed.codec.kind} in {placed.tier} with {placed.cache_rows:,} cache rows, of which "
            f"the batches in flight pin up to {placed.pinned:,}"
        )
    if placed.ssd is not None:
        of_store = format_bytes(needed - in_memory(placed.bytes, memory))
        text += f"; {of_store} of this is for its SSD store, which tables can share"
    return text


def _cheaper(
    tables: Sequence[TableSpec], memory: MemoryConfig, tiers: Tiers, batch_size: int, ranks: int
) -> list[str]:
    """Return the changes of a recipe, other than larger budgets, of which each alone makes the
    tables fit.
    """
    lowest = max(KINDS, key=lambda kind: KINDS[kind].penalty)
    ways = []
    if any(memory.table_precision(table.name) not in ("auto", lowest) for table in tables) and _fit(
        tables, replace(memory, precision="auto"), tiers, ranks
    ):
        ways.append("set memory.precision to auto")
    if memory.hbm and _fit(tables, replace(memory, hbm=None), tiers, ranks):
        ways.append("set memory.hbm to 0")
    if memory.block is None:
        block = replace(memory, block=BlockConfig(path="rows"))
        if _fit(tables, block, replace(tiers, block=_ANY_BLOCK), ranks):
            ways.append("name a block device in memory.block")
    for size in (batch_size // 2, batch_size // 4, batch_size // 8):
        smaller = [replace(table, lookups=table.lookups * size / batch_size) for table in tables]
        if size and _fit(smaller, memory, tiers, ranks):
            ways.append(f"lower train.batch_size to {size}")
            break
    if memory.lookahead and _fit(tables, replace(memory, lookahead=0), tiers, ranks):
        ways.append("set memory.lookahead to 0")
    return ways


def _fit(tables: Sequence[TableSpec], memory: MemoryConfig, tiers: Tiers, ranks: int) -> bool:
    """Whether some placement fits the budgets. Only the smallest caches are tried."""
    memory = replace(memory, cache=replace(memory.cache, fraction=_SMALLEST_CACHE))
    choices = [candidates(table, memory, tiers) for table in tables]
    workspace = ranks * _workspace(tables, memory, tiers)
    limits = _limits(_budgets(memory.times(ranks), tiers), memory, workspace)
    return _least(choices, limits, None, ranks) is not None


def _notes(
    tables: Sequence[TableSpec], chosen: Sequence[Candidate], memory: MemoryConfig
) -> tuple[str, ...]:
    notes = []
    fraction = memory.cache.fraction
    raised, uncached = [], []
    for table, option in zip(tables, chosen, strict=True):
        placed = option.placement
        if placed.tier == "level0" and memory.table_precision(table.name) not in ("auto", "fp32"):
            uncached.append(table.name)
        elif (
            placed.tier != "level0"
            and fraction is not None
            and placed.cache_rows > fraction * table.rows * 1.05
        ):
            raised.append(table.name)
    if uncached:
        which = "all tables" if len(uncached) == len(tables) else ", ".join(uncached)
        notes.append(
            f"float32 in {MEMORY_NAMES[memory.level0]}, whatever memory.precision says: {which}; the rows "
            "of the batches in flight need a cache as large as the table"
        )
    if raised:
        notes.append(f"more cache than memory.cache.fraction, for the rows in flight: {', '.join(raised)}")
    return tuple(notes)


def _doubts(memory: MemoryConfig, tiers: Tiers, ranks: int) -> list[str]:
    """Return remarks on budgets that are larger than the memory of this machine, and on a path
    without direct reads.
    """
    there: list[tuple[Memory, int | None, int]] = [("dram", memory.dram, tiers.dram.bytes)]
    if tiers.hbm is not None:
        there.append(("hbm", memory.hbm, tiers.hbm.bytes))
    if memory.block is not None and tiers.block is not None:
        there.append(("block", memory.block.budget, tiers.block.free_bytes))
    if memory.mapped is not None and tiers.mapped is not None:
        there.append(("mapped", memory.mapped.budget, tiers.mapped.free_bytes))
    of_each = f" for each of {ranks} processes" if ranks > 1 else ""
    notes = [
        f"{_FIELDS[name]} is {format_bytes(budget)}{of_each}, but this machine has "
        f"only {format_bytes(free)}"
        for name, budget, free in there
        if budget is not None and budget * ranks > free
    ]
    if memory.block is not None and tiers.block is not None and not tiers.block.direct:
        notes.append(
            f"{memory.block.path} does not support direct reads: its speed was "
            "measured through the page cache"
        )
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
    """Plan the tables of a model on this machine, without hot rows.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Tables of the model. Each has the name of its vocabulary.
    dataset : Dataset
        Data set from which the access counts are read.
    optimizer : RowOptimizerConfig
        Optimizer of the rows, which determines the size of a row's state.
    memory : MemoryConfig
        Budgets of each process, precision and cache.
    batch_size : int
        Samples per step.
    tiers : Tiers
        Measured rates; by default from `measure_tiers`.
    ranks : int
        Number of processes that share the tables.
    hot : mapping of str to int
        Table -> number of hot rows, which are its first rows. The cache is not used for them.

    Raises
    ------
    ConfigError
        If nothing fits. The message names the budget and its smallest sufficient value.
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
    """Plan the tables of a model on this machine, with hot rows if `hot.budget` reserves part of
    level 0 for them.

    Only tables under a cache get hot rows, but the bytes of hot rows change which tables are under
    a cache. So tables are planned first without hot rows and then with them, repeatedly, until no
    further table leaves level 0.

    Parameters
    ----------
    hot : HotConfig
        Budget of hot rows.
    tables, dataset, optimizer, memory, batch_size, tiers, ranks
        As for `make_plan`.

    Raises
    ------
    ConfigError
        If all tables are entirely in level 0, so that no row can be hot.
    """
    plan = make_plan(tables, dataset, optimizer, memory, batch_size=batch_size, tiers=tiers, ranks=ranks)
    if ranks > 1 or hot.budget is None:
        return plan
    level0 = memory.level0
    remaining = memory.with_level0_budget(hot.remaining(memory.level0_budget, f"memory.{level0}"))
    uncached = _uncached(plan)
    while True:
        if len(uncached) == len(plan.tables):
            raise ConfigError(
                f"hot.budget is set, but every table is entirely in {MEMORY_NAMES[level0]} and needs no "
                f"hot rows; set it to null, or lower memory.{level0}"
            )
        row_bytes = {
            table.name: _row_bytes(table, optimizer) * (table.name not in uncached) for table in tables
        }
        profile = calibrate(dataset, row_bytes, hot.budget)
        rows = {name: count for name, count in profile.rows.items() if name not in uncached}
        plan = make_plan(
            tables, dataset, optimizer, remaining, batch_size=batch_size, tiers=tiers, hot=rows
        )
        if uncached <= _uncached(plan):
            return _with_hot_rows(
                plan, profile, row_bytes, (warn_inherited_ids(dataset), warn_little_skew(profile))
            )
        uncached &= _uncached(plan)


def _uncached(plan: Plan) -> set[str]:
    return {placed.table for placed in plan.tables if placed.tier == "level0"}


def _row_bytes(table: EmbeddingBagConfig, optimizer: RowOptimizerConfig) -> int:
    return RecordCodec.of(CodecConfig(), table.embedding_dim, optimizer).record_bytes


def hot_rows(plan: Plan, dataset: Dataset) -> tuple[list[RowRange], Counts]:
    """Return the tables of `dataset`, and for each the number of first rows that never leave level
    0 under `plan`.

    These are the hot rows, or all rows of a table that is entirely in level 0.
    """
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, 1))
    placed = [plan[part.table] for part in parts]
    rows = [option.rows if option.tier == "level0" else option.hot_rows for option in placed]
    return parts, np.array(rows, dtype=np.int64)


def _with_hot_rows(
    plan: Plan, profile: HotProfile, row_bytes: Mapping[str, int], remarks: tuple[str, ...]
) -> Plan:
    def with_rows(placed: TablePlacement) -> TablePlacement:
        if placed.tier == "level0" or not row_bytes[placed.table]:
            return placed
        hot = profile.rows[placed.table]
        slots = placed.bytes[plan.level0]
        slot = {part: slots.get(part, 0) // placed.cache_rows for part in ("slot weights", "slot state")}
        more = {part: size * hot for part, size in slot.items()}
        return replace(placed, hot_rows=hot, bytes=add_parts([placed.bytes, {plan.level0: more}]))

    point, level0 = profile.chosen, plan.budgets.get(plan.level0)
    note = (
        f"hot rows take {point.accesses:.1%} of the lookups, including tables entirely in level 0; "
        f"{point.inputs.share:.2%} of the inputs need only hot rows"
    )
    return replace(
        plan,
        tables=tuple(map(with_rows, plan.tables)),
        budgets=plan.budgets
        if level0 is None
        else {**plan.budgets, plan.level0: level0 + point.budget_bytes},
        notes=(*plan.notes, *filter(None, remarks), note),
    )
