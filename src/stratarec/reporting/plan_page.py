"""A plan for people: tables on the terminal, a page of what fills each memory; predicted steps on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratarec.config.units import milliseconds, readable
from stratarec.reporting.html import ShownTable, write_html
from stratarec.reporting.memory_levels import HOMES, levels
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""What `Plan.to_dict` gives."""

_NAMES = {"dram": "DRAM", "mapped": "mapped", "block": "block"}
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "slots": ("slot weights", "slot state"),
    "metadata": ("tags", "stamps", "counters", "bitmaps", "locations"),
    "weights": ("record weights",),
    "parameters": ("record parameters",),
    "state": ("record state",),
    "2nd level": ("second level", "second level map"),
    "staging": ("staging",),
}
_HEADS = (
    *("table", "rows", "home", "precision", "cache slots", "2nd level rows", "hit rate", "home reads a step"),
    *(*_COLUMNS, "total", "ms/step"),
)
_TOTALS = ("memory", "part", "predicted", "budget")
COMPARED = ("memory", "part", "predicted", "used", "used / predicted", "remark")
# Tables that together are less than this share of all bytes stand in one line.
_SMALL_SHARE = 0.01
# Columns of words; the others hold numbers.
_TEXT = frozenset(("table", "home", "precision", "memory", "part"))


def print_plan(content: Content, age_seconds: float) -> None:
    """Print a plan's tables and totals on standard output.

    Parameters
    ----------
    content : mapping
        What `Plan.to_dict` gives; ``predicted`` may have a ``forecast`` of the whole step, too.
    age_seconds : float
        Of the measurements behind the predicted times.
    """
    console = make_console()
    print_table(console, _HEADS, table_rows(content), text=_TEXT)
    print_table(console, _TOTALS, total_rows(content), text=_TEXT, keys=2)
    for label, value, note in _figures(content):
        console.print(f"{label:22} {value} {note}".rstrip())
    console.print(f"{'speeds measured':22} {_ago(age_seconds)}; --measure to do so again")
    for note in content["notes"]:
        console.print(f"note: {note}")


def print_comparison(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print predicted beside used bytes of each memory, and whether the difference is a defect of the plan."""
    print_table(make_console(), COMPARED, comparison_rows(rows), text=_TEXT, keys=2)


def comparison_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each entry of a result's ``memory``: what was planned and what was used."""
    return [
        (
            _NAMES.get(row["memory"], row["memory"]), row["part"], readable(row["predicted"]), readable(row["used"]),
            f"{row['used'] / row['predicted']:.3f}" if row["predicted"] else "-",
            "off by more than 5 %" if row["defect"] else "",
        )
        for row in rows
    ]  # fmt: skip


def write_plan_report(path: Path, name: str, content: Content) -> None:
    """Write the tables and a stacked bar for each memory as HTML."""
    write_html(
        path,
        "plan.html.jinja",
        title=f"{name}: where the tables live",
        lead=f"batches of {content['batch_size']:,}, rows of {content['lookahead']} fetched ahead, slots given up by "
        f"{content['policy']}",
        cards=[(f"{label} {note}".rstrip(), value) for label, value, note in _figures(content)],
        levels=levels(content, None, ()),
        notes=content["notes"],
        tables=ShownTable(heads=_HEADS, rows=table_rows(content)),
        memories=ShownTable(heads=_TOTALS, rows=total_rows(content)),
        text=_TEXT,
    )


def table_rows(content: Content) -> list[tuple[str, ...]]:
    """A line for each table, the largest first; the small ones share one."""
    tables = sorted(content["tables"], key=lambda table: -_total(table))
    everything = sum(map(_total, tables))
    large, rest = list(tables), 0
    while len(large) > 1 and rest + _total(large[-1]) < _SMALL_SHARE * everything:
        rest += _total(large.pop())
    small = tables[len(large) :]
    if len(small) == 1:
        large, small = tables, []
    return [_line(table) for table in large] + ([_fold(small)] if small else [])


def total_rows(content: Content) -> list[tuple[str, ...]]:
    """Return the bytes of each part of each memory in all processes, and their sum with the budget of the recipe."""
    lines: list[tuple[str, ...]] = []
    for memory, budget in content["budgets"].items():
        parts = content["predicted"]["parts"].get(memory, {})
        lines += [(_NAMES[memory], part, readable(size), "") for part, size in parts.items()]
        limit = "no limit" if budget is None else readable(budget // content["ranks"])
        limit += f" in each of {content['ranks']} processes" if budget is not None and content["ranks"] > 1 else ""
        lines.append((_NAMES[memory], "total", readable(sum(parts.values())), limit))
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
    whole = table["tier"] == "level0"
    return (
        table["table"], f"{table['rows']:,}", HOMES[table["tier"]], table["codec"]["kind"],
        "-" if whole else f"{table['cache_rows']:,} ({table['cache_rows'] / table['rows']:.2%})" + _hot(table),
        f"{table['level1_rows']:,}" if table["level1_rows"] else "-", *_rates([table]), *_sizes([table]),
    )  # fmt: skip


def _hot(table: Content) -> str:
    return f" + {table['hot_rows']:,} hot" if table["hot_rows"] else ""


def _fold(tables: Sequence[Content]) -> tuple[str, ...]:
    kinds = {HOMES[table["tier"]] for table in tables}
    precisions = {table["codec"]["kind"] for table in tables}
    return (
        f"{len(tables)} small tables", f"{sum(table['rows'] for table in tables):,}", "/".join(sorted(kinds)),
        "/".join(sorted(precisions)), "", "", *_rates(tables), *_sizes(tables),
    )  # fmt: skip


def _rates(tables: Sequence[Content]) -> tuple[str, str]:
    """Hit rate of level 0, and rows that a step reads from home."""
    distinct = sum(table["distinct"] for table in tables)
    hits = 1 - sum(table["misses"] for table in tables) / distinct if distinct else 1.0
    return f"{hits:.1%}", f"{sum(table['home_reads'] for table in tables):,.0f}"


def _sizes(tables: Sequence[Content]) -> tuple[str, ...]:
    parts: dict[str, int] = {}
    for memory in _NAMES:
        for part, size in _parts(tables, memory).items():
            parts[part] = parts.get(part, 0) + size
    sizes = [sum(parts.get(part, 0) for part in column) for column in _COLUMNS.values()]
    seconds = sum(sum(table["seconds"].values()) for table in tables)
    return (
        *(readable(size) if size else "-" for size in sizes),
        readable(sum(parts.values())),
        f"{seconds * 1e3:.2f}",
    )


def _figures(content: Content) -> list[tuple[str, str, str]]:
    """Return the main figures: a label, a value, and a remark."""
    ranks = content["ranks"]
    predicted = content["predicted"]
    dram, whole = max(predicted["bytes"]["dram"], 1), max(predicted["float32_bytes"], 1)
    ratio = f"({whole / dram:.2f}x less)" if dram <= whole else f"({dram / whole:.2f}x more)"
    step = predicted.get("forecast")
    speed = step["samples"] / step["step"] if step else 0
    note = f"({speed:,.0f} samples/s; network {milliseconds(step['network'])}, as timed now)" if step else ""
    return [
        *([("processes", f"{ranks}", "(bytes below are of all processes together)")] if ranks > 1 else []),
        ("all float32 in DRAM", readable(predicted["float32_bytes"]), ""),
        ("DRAM", readable(predicted["bytes"]["dram"]), ratio),
        ("vectors of a batch", readable(content["output_bytes"]), "(with their gradients; on top of the budget)"),
        ("predicted hit rate", f"{predicted['hit_rate']:.1%}", "(of the rows that batches ask of cached tables)"),
        ("embedding step", f"{predicted['step_seconds'] * 1e3:.2f} ms", "(predicted)"),
        *([("whole step", milliseconds(step["step"]), note)] if step else []),
    ]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


_STEP_HEADS = ("exchange", "wire", "towers", "ratio", "compute", "reduce", "inside", "between", "ms", "speed")


def print_steps(
    rows: Sequence[Mapping[str, Any]], best: Mapping[str, str], assumed: Sequence[str], verdict: str = ""
) -> None:  # fmt: skip
    """Print predicted steps in milliseconds, which is fastest, and what was assumed.

    Parameters
    ----------
    rows : sequence of mapping
        ``exchange``, ``wire``, ``towers``, ``ratio``, the seconds of the parts of a step, and their sum ``step``. The
        first is what the others are compared with.
    best : mapping of str to str
        Kind of change -> the fastest way.
    assumed : sequence of str
    verdict : str
        Whether towers would pay; empty where there can be none.
    """
    console = make_console()
    first = rows[0]["step"]
    cells = [
        (
            row["exchange"], row["wire"], f"{row['towers'] or '-'}", f"{row['ratio']:g}" if row["towers"] else "-",
            *(_ms(row[part]) for part in ("compute", "reduction", "inside", "between", "step")),
            f"{first / row['step']:.2f}x",
        )
        for row in rows
    ]  # fmt: skip
    print_table(console, _STEP_HEADS, cells, text=("exchange", "wire"), keys=4)
    for kind, name in best.items():
        console.print(f"fastest, {kind}: {name}")
    if verdict:
        console.print(verdict)
    for line in assumed:
        console.print(f"assumed: {line}")


def print_parts(steps: Sequence[Mapping[str, Any]], batch_size: int, lines: Sequence[str]) -> None:
    """Print the seconds of each part of some steps, in milliseconds, and lines below.

    Parameters
    ----------
    steps : sequence of mapping
        Where the network is and rows are, in words, then seconds; the last are the whole step's.
    """
    console = make_console()
    cells = [
        (*(each if isinstance(each, str) else _ms(each) for each in step.values()), f"{batch_size / step['step']:,.0f}")
        for step in steps
    ]
    heads = [*steps[0], "samples/s"]
    print_table(console, heads, cells, text=heads[:2], keys=2)
    for line in lines:
        console.print(line)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
