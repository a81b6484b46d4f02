"""Print plans and predicted step times on the terminal, and describe memory levels for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratarec.config.units import format_bytes, format_milliseconds
from stratarec.embedding.tiers import MEMORY_NAMES
from stratarec.reporting.html import ShownTable
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""Output of `Plan.to_dict`."""

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "slots": ("slot weights", "slot state"),
    "metadata": ("tags", "stamps", "bitmaps", "locations"),
    "weights": ("record weights",),
    "parameters": ("record parameters",),
    "state": ("record state",),
    "staging": ("staging",),
}
_HEADS = (
    *("table", "rows", "home", "precision", "cache slots", "hit rate", "home reads a step"),
    *(*_COLUMNS, "total", "ms/step"),
)
_TOTALS = ("memory", "part", "predicted", "budget")
COMPARED = ("memory", "part", "predicted", "used", "used / predicted", "remark")
# Small tables are combined in one row if together they are less than this share of all bytes.
_SMALL_SHARE = 0.01
# Columns with text; the other columns have numbers.
_TEXT = frozenset(("table", "home", "precision", "memory", "part"))


def print_plan(content: Content, age_seconds: float) -> None:
    """Print a plan's tables and totals on standard output.

    Parameters
    ----------
    content : mapping
        Output of `Plan.to_dict`. Its ``predicted`` may also have a ``forecast`` of the whole step.
    age_seconds : float
        Age of the measurements from which times were predicted.
    """
    console = make_console()
    print_table(console, _HEADS, table_rows(content), text=_TEXT)
    print_table(console, _TOTALS, total_rows(content), text=_TEXT, keys=2)
    for label, value, note in _figures(content):
        console.print(f"{label:34} {value} {note}".rstrip())
    console.print(f"{'speeds measured':34} {_ago(age_seconds)}; measure again with --measure")
    for note in content["notes"]:
        console.print(f"note: {note}")


def print_comparison(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print planned and used bytes of each memory, and whether the plan was wrong."""
    print_table(make_console(), COMPARED, comparison_rows(rows), text=_TEXT, keys=2)


def comparison_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row with planned and used bytes for each entry of ``memory`` in a result."""
    return [
        (
            MEMORY_NAMES.get(row["memory"], row["memory"]),
            row["part"],
            format_bytes(row["predicted"]),
            format_bytes(row["used"]),
            f"{row['used'] / row['predicted']:.3f}" if row["predicted"] else "-",
            "off by more than 5 %" if row["defect"] else "",
        )
        for row in rows
    ]


def table_rows(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each table, the largest first; small tables are combined in one row."""
    tables = sorted(content["tables"], key=lambda table: -_total(table))
    everything = sum(map(_total, tables))
    large, small_bytes = list(tables), 0
    while len(large) > 1 and small_bytes + _total(large[-1]) < _SMALL_SHARE * everything:
        small_bytes += _total(large.pop())
    small = tables[len(large) :]
    if len(small) == 1:
        large, small = tables, []
    return [_line(table) for table in large] + ([_fold(small)] if small else [])


def total_rows(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each part of each memory with its bytes in all processes, and a row with sum
    and budget.
    """
    lines: list[tuple[str, ...]] = []
    for memory, budget in content["budgets"].items():
        parts = content["predicted"]["parts"].get(memory, {})
        lines += [(MEMORY_NAMES[memory], part, format_bytes(size), "") for part, size in parts.items()]
        limit = "no limit" if budget is None else format_bytes(budget // content["ranks"])
        limit += (
            f" in each of {content['ranks']} processes"
            if budget is not None and content["ranks"] > 1
            else ""
        )
        lines.append((MEMORY_NAMES[memory], "total", format_bytes(sum(parts.values())), limit))
    return lines


def _parts(tables: Iterable[Content], memory: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for table in tables:
        for part, size in table["bytes"].get(memory, {}).items():
            sums[part] = sums.get(part, 0) + size
    return sums


def _total(table: Content) -> int:
    return sum(sum(parts.values()) for parts in table["bytes"].values())


def _line(table: Content) -> tuple[str, ...]:
    uncached = table["tier"] == "level0"
    return (
        table["table"],
        f"{table['rows']:,}",
        HOMES[table["tier"]] + _frequent(table),
        table["codec"]["kind"],
        "-"
        if uncached
        else f"{table['cache_rows']:,} ({table['cache_rows'] / table['rows']:.2%})" + _hot(table),
        *_rates([table]),
        *_sizes([table]),
    )


def _hot(table: Content) -> str:
    return f" + {table['hot_rows']:,} hot" if table["hot_rows"] else ""


def _frequent(table: Content) -> str:
    return f" ({table['dram_rows'] / table['rows']:.0%} of the rows in DRAM)" if table["dram_rows"] else ""


def _fold(tables: Sequence[Content]) -> tuple[str, ...]:
    kinds = {HOMES[table["tier"]] for table in tables}
    precisions = {table["codec"]["kind"] for table in tables}
    return (
        f"{len(tables)} small tables",
        f"{sum(table['rows'] for table in tables):,}",
        "/".join(sorted(kinds)),
        "/".join(sorted(precisions)),
        "",
        *_rates(tables),
        *_sizes(tables),
    )


def _rates(tables: Sequence[Content]) -> tuple[str, str]:
    """Return the hit rate of level 0, and the number of rows that a step reads from homes (below
    level 0).
    """
    distinct = sum(table["distinct"] for table in tables)
    hits = 1 - sum(table["misses"] for table in tables) / distinct if distinct else 1.0
    return f"{hits:.1%}", f"{sum(table['misses'] for table in tables):,.0f}"


def _sizes(tables: Sequence[Content]) -> tuple[str, ...]:
    parts: dict[str, int] = {}
    for memory in MEMORY_NAMES:
        for part, size in _parts(tables, memory).items():
            parts[part] = parts.get(part, 0) + size
    sizes = [sum(parts.get(part, 0) for part in column) for column in _COLUMNS.values()]
    seconds = sum(sum(table["seconds"].values()) for table in tables)
    return (
        *(format_bytes(size) if size else "-" for size in sizes),
        format_bytes(sum(parts.values())),
        f"{seconds * 1e3:.2f}",
    )


def _figures(content: Content) -> list[tuple[str, str, str]]:
    """Return the main figures of a plan, each with a label, a value and a remark."""
    ranks = content["ranks"]
    predicted = content["predicted"]
    level0, float32 = max(predicted["bytes"][level0_of(content)], 1), max(predicted["float32_bytes"], 1)
    ratio = f"({float32 / level0:.2f}x less)" if level0 <= float32 else f"({level0 / float32:.2f}x more)"
    fast = [
        (MEMORY_NAMES[name], predicted["bytes"][name])
        for name in ("hbm", "dram")
        if name in predicted["bytes"]
    ]
    is_cached = any(table["tier"] != "level0" for table in content["tables"])
    step = predicted.get("forecast")
    speed = step["samples"] / step["step"] if step else 0
    note = (
        f"({speed:,.0f} samples/s; network {format_milliseconds(step['network'])}, as timed now)"
        if step
        else ""
    )
    return [
        *([("processes", f"{ranks}", "(bytes below are of all processes together)")] if ranks > 1 else []),
        (f"all float32 in {fast[0][0]}", format_bytes(predicted["float32_bytes"]), ""),
        *(
            (name, format_bytes(size), ratio if place == 0 else "")
            for place, (name, size) in enumerate(fast)
        ),
        (
            "activations of the embedding layer",
            format_bytes(content["output_bytes"]),
            "(not part of the budget)",
        ),
        *([("eviction policy", content["policy"], "")] if is_cached else []),
        (
            "predicted hit rate",
            f"{predicted['hit_rate']:.1%}",
            "(of the rows that batches look up in cached tables)",
        ),
        ("embedding step", f"{predicted['step_seconds'] * 1e3:.2f} ms", "(predicted)"),
        *([("whole step", format_milliseconds(step["step"]), note)] if step else []),
    ]


def level0_of(content: Content) -> str:
    """Return the memory in which rows are trained."""
    return "hbm" if "hbm" in content["budgets"] else "dram"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


_STEP_HEADS = (
    "exchange",
    "wire",
    "towers",
    "ratio",
    "compute",
    "reduce",
    "inside",
    "between",
    "ms",
    "speed",
)


def print_steps(
    rows: Sequence[Mapping[str, Any]], best: Mapping[str, str], assumed: Sequence[str], verdict: str = ""
) -> None:
    """Print predicted step times in milliseconds, the fastest exchanges, and the assumptions.

    Parameters
    ----------
    rows : sequence of mapping
        Exchanges with ``exchange``, ``wire``, ``towers``, ``ratio``, the seconds of the parts of a
        step, and their sum ``step``. Speeds are relative to the first.
    best : mapping of str to str
        What an exchange changes (nothing, rounding, the model) -> the fastest such exchange.
    assumed : sequence of str
        Assumptions, one sentence each.
    verdict : str
        Text that says whether towers would make a step shorter; empty if towers are not possible.
    """
    console = make_console()
    first = rows[0]["step"]
    cells = [
        (
            row["exchange"],
            row["wire"],
            f"{row['towers'] or '-'}",
            f"{row['ratio']:g}" if row["towers"] else "-",
            *(_ms(row[part]) for part in ("compute", "reduction", "inside", "between", "step")),
            f"{first / row['step']:.2f}x",
        )
        for row in rows
    ]
    print_table(console, _STEP_HEADS, cells, text=("exchange", "wire"), keys=4)
    for kind, name in best.items():
        console.print(f"fastest, {kind}: {name}")
    if verdict:
        console.print(verdict)
    for line in assumed:
        console.print(f"assumed: {line}")


def print_parts(steps: Sequence[Mapping[str, Any]], batch_size: int, lines: Sequence[str]) -> None:
    """Print the parts of predicted steps in milliseconds, followed by `lines`.

    Parameters
    ----------
    steps : sequence of mapping
        For each option: where the network and the rows are, the seconds of each part, and the
        seconds of the step.
    """
    console = make_console()
    cells = [
        (
            *(value if isinstance(value, str) else _ms(value) for value in step.values()),
            f"{batch_size / step['step']:,.0f}",
        )
        for step in steps
    ]
    heads = [*steps[0], "samples/s"]
    print_table(console, heads, cells, text=heads[:2], keys=2)
    for line in lines:
        console.print(line)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


HOMES = {
    "level0": "level 0",
    "dram": "DRAM",
    "mapped": "mapped file",
    "log": "SSD store on a block device",
    "hbm": "GPU memory",
}
_SLOTS, _TAGS = ("slot weights", "slot state"), ("tags", "stamps")
_WORK = ("staging", "workspace")
_MEMORY = {"mapped": "mapped", "log": "block"}
_RECORDS = ("record weights", "record parameters", "record state")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One memory level of a run or a plan, with its bytes."""

    name: str
    words: str
    planned: int | None
    """Planned bytes; None without a plan."""
    used: int | None
    """Bytes that a run used; None if they are not known."""
    flow: str = ""
    """Text about the rows that move between this level and the level above."""
    share: float = 0.0
    """Size in per cent of the largest level."""

    @property
    def figure(self) -> str:
        """Planned and used bytes as text."""
        used, planned = (None if size is None else format_bytes(size) for size in (self.used, self.planned))
        if used is None:
            return f"{planned} planned"
        return used if planned is None else f"{used}, {planned} planned"


def levels(plan: Content | None, parts: Mapping[str, int] | None, caches: Sequence[Content]) -> list[Level]:
    """Return the memory levels of a plan, a run, or both.

    Parameters
    ----------
    parts : mapping of str to int
        Bytes that a run used, from `LookupEngine.bytes_by_part`.
    caches : sequence of mapping
        Hits and misses of cached tables, from `CacheFigures`.
    """
    if plan is None:
        memory_levels = [
            _level(
                "Level 0, in DRAM",
                "all rows in float32, where training reads and updates them",
                None,
                parts,
                "level0",
            ),
            _work(None, parts),
        ]
    else:
        memory_levels = list(_planned(plan, parts, caches))
    most = max(max(level.used or 0, level.planned or 0) for level in memory_levels) or 1
    widths = [
        100 * (level.planned or 0 if level.used is None else level.used) / most for level in memory_levels
    ]
    return [
        Level(**{**vars(level), "share": width}) for level, width in zip(memory_levels, widths, strict=True)
    ]


def _planned(plan: Content, parts: Mapping[str, int] | None, caches: Sequence[Content]) -> Iterable[Level]:
    tables, memories, level0 = plan["tables"], plan["predicted"]["parts"], level0_of(plan)
    dram = memories.get("dram", {})
    cached = [table for table in tables if table["tier"] != "level0"]
    slots = sum(table["cache_rows"] + table["hot_rows"] for table in tables)
    rows = sum(table["rows"] for table in tables)
    words = (
        f"float32, where training reads and updates rows: slots for {slots:,} of {rows:,} rows; all "
        f"rows would take {format_bytes(plan['predicted']['float32_bytes'])}"
        if cached
        else (f"all {rows:,} rows in float32, where training reads and updates them")
    )
    yield _level(
        f"Level 0, in {MEMORY_NAMES[level0]}",
        words,
        _sum(memories.get(level0, {}), _SLOTS),
        parts,
        "level0",
    )
    if cached:
        homes = {table["tier"] for table in cached}
        inside = _sum(dram, set(dram) - {*_SLOTS, *_TAGS, *_WORK})
        records = "dram" in homes or any(table["dram_rows"] for table in cached)
        names = ["encoded rows at rest"] if records else []
        names += (
            ["buffers of the SSD store, and the location of each of its rows"] if "log" in homes else []
        )
        index = "SSD store buffers and index, in DRAM" if "log" in homes else "Flags of rows, in DRAM"
        name = "Home, in DRAM" if records else index
        flow = _flow(plan, caches)
        yield _level(name, "; ".join([*names, "flags of written rows"]), inside, parts, "home_dram", flow)
        if "hbm" in homes:
            kinds = "/".join(sorted({table["codec"]["kind"] for table in cached if table["tier"] == "hbm"}))
            size = sum(
                value for part, value in memories.get("hbm", {}).items() if part.startswith("record ")
            )
            yield _level("Home, in GPU memory", f"rows at rest as {kinds}", size, parts, "home_hbm")
        files = homes & {"mapped", "log"}
        for tier in sorted(files):
            kinds = "/".join(sorted({table["codec"]["kind"] for table in cached if table["tier"] == tier}))
            size = sum(memories.get(_MEMORY[tier], {}).values())
            # A run counts the bytes of both kinds of files together.
            used = parts if len(files) == 1 else None
            yield _level(f"Home, in a {HOMES[tier]}", f"rows at rest as {kinds}", size, used, "home_block")
        words = f"which row is in which slot of level 0; eviction policy {plan['policy']}"
        yield _level("Directory, in DRAM", words, _sum(dram, _TAGS), parts, "metadata")
    work = sum(_sum(memories.get(name, {}), _WORK) for name in ("hbm", "dram"))
    yield _work(work, parts, "GPU memory and DRAM" if level0 == "hbm" else "DRAM")


def _work(planned: int | None, parts: Mapping[str, int] | None, where: str = "DRAM") -> Level:
    work = None if parts is None else {"work": sum(parts.get(name, 0) for name in _WORK)}
    words = "scratch memory of the update, and staging buffers" + (
        "; planned as an upper bound" if planned else ""
    )
    return _level(f"Work space, in {where}", words, planned, work, "work")


def _level(
    name: str, words: str, planned: int | None, parts: Mapping[str, int] | None, part: str, flow: str = ""
) -> Level:
    used = None if parts is None else parts.get(part, 0)
    return Level(name=name, words=words, planned=planned, used=used, flow=flow)


def _sum(parts: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(parts.get(name, 0) for name in names)


def _flow(plan: Content, caches: Sequence[Content]) -> str:
    """Return a text about the rows and bytes that move between level 0 and homes in a step."""
    cached = [table for table in plan["tables"] if table["tier"] != "level0"]
    record = {table["table"]: record_bytes(table) for table in cached}
    distinct_planned, missed_planned = (
        sum(table[name] for table in cached) for name in ("distinct", "misses")
    )
    if not caches:
        size = sum(table["misses"] * record[table["table"]] for table in cached)
        return (
            f"planned: of the {distinct_planned:,.0f} rows of a batch "
            f"{_hits(distinct_planned, missed_planned)} are in "
            f"level 0; {missed_planned:,.0f} ({format_bytes(round(size))}) are fetched in a step, and as "
            "many are evicted"
        )
    distinct, missed = (sum(cache[name] for cache in caches) for name in ("distinct", "missed"))
    size = sum(cache["missed"] * record.get(cache["table"], 0) for cache in caches)
    return (
        f"of the {distinct:,.0f} rows of a batch {_hits(distinct, missed)} were in level 0; {missed:,.0f} "
        f"({format_bytes(round(size))}) were fetched in a step, and as many evicted (planned: "
        f"{distinct_planned:,.0f} rows, {_hits(distinct_planned, missed_planned)}, "
        f"{missed_planned:,.0f} fetched)"
    )


def record_bytes(table: Content) -> float:
    """Return the bytes of a stored row."""
    size: int = sum(parts.get(name, 0) for parts in table["bytes"].values() for name in _RECORDS)
    return size / int(table["rows"])


def _hits(distinct: float, missed: float) -> str:
    return f"{1 - missed / distinct:.1%}" if distinct else "-"


def cached_tables(plan: Content | None, caches: Sequence[Content]) -> ShownTable:
    """Return a table with the planned and measured hit rates of each cached table, most misses
    first.
    """
    measured = {cache["table"]: cache for cache in caches}
    tables = [] if plan is None else [table for table in plan["tables"] if table["table"] in measured]
    tables.sort(key=lambda table: -measured[table["table"]]["missed"])
    rows = [
        (
            table["table"],
            f"{table['rows']:,}",
            HOMES[table["tier"]] + _frequent(table),
            table["codec"]["kind"],
            f"{table['cache_rows'] / table['rows']:.1%}",
            _hits(table["distinct"], table["misses"]),
            _hits(measured[table["table"]]["distinct"], measured[table["table"]]["missed"]),
            f"{table['misses']:,.0f}",
            f"{measured[table['table']]['missed']:,.0f}",
        )
        for table in tables
    ]
    heads = (
        "table",
        "rows",
        "home",
        "precision there",
        "slots, of its rows",
        "hit rate planned",
        "hit rate measured",
        "rows a step planned",
        "rows a step measured",
    )
    return ShownTable(heads=heads, rows=rows)
