"""A plan for people: tables on the terminal, and a picture of what fills each memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from stratarec.reporting.html import inline_svg, write_html
from stratarec.sizes import readable

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
    *("table", "rows", "home", "precision", "cache", "2nd level rows", "hit rate", "home reads"),
    *(*_COLUMNS, "total", "ms/step"),
)
# Tables that together are less than this share of all bytes stand in one line.
_SMALL_SHARE = 0.01
_LEAST_WIDTH = 210
_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ name }}: placement</title><style>{{ style }}
body { max-width: 80rem }</style></head><body>
<h1>{{ name }}: where the tables live</h1><p>{{ about }}</p>
<div class="cards">{% for label, value in cards %}<div class="card"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}</div>
<div class="figures">{% for figure in figures %}{{ figure }}{% endfor %}</div>
{% for title, heads, rows in tables %}<h2>{{ title }}</h2>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% endfor %}{% for note in notes %}<p>{{ note }}</p>{% endfor %}
</body></html>
"""


def print_plan(content: Content, age_seconds: float) -> None:
    """Print a plan's tables and totals on standard output.

    Parameters
    ----------
    content : mapping
        What `Plan.to_dict` gives.
    age_seconds : float
        Of the measurements behind the predicted times.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    console = Console(width=max(width, _LEAST_WIDTH), highlight=False, markup=False)
    _print(console, _HEADS, table_rows(content))
    _print(console, ("memory", "part", "predicted", "budget"), total_rows(content))
    for label, value in _cards(content):
        console.print(f"{label:22} {value}")
    console.print(f"{'speeds measured':22} {_ago(age_seconds)}; --measure to do so again")
    for note in content["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def print_comparison(rows: Iterable[tuple[str, str, int, int, bool]]) -> None:
    """Print predicted beside used bytes: memory, part, predicted, used, and whether that is a defect of the plan."""
    console = Console(width=_LEAST_WIDTH, highlight=False, markup=False)
    _print(
        console,
        ("memory", "part", "predicted", "used", "used / predicted", ""),
        [
            (
                _NAMES.get(memory, memory), part, readable(predicted), readable(used),
                f"{used / predicted:.3f}" if predicted else "-", "off by more than 5 %" if defect else "",
            )
            for memory, part, predicted, used, defect in rows
        ],
    )  # fmt: skip


def write_plan_report(path: Path, name: str, content: Content) -> None:
    """Write the tables and a stacked bar for each memory as HTML."""
    write_html(
        path,
        _TEMPLATE,
        name=name,
        about=f"batches of {content['batch_size']:,}, {content['lookahead']} staged ahead, policy {content['policy']}",
        cards=_cards(content),
        figures=[inline_svg(_bars(content))],
        tables=[
            ("Tables", _HEADS, table_rows(content)),
            ("Memories", ("memory", "part", "predicted", "budget"), total_rows(content)),
        ],
        notes=content["notes"],
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
    """A line for each part of each memory, and its sum beside its budget."""
    lines: list[tuple[str, ...]] = []
    for memory, budget in content["budgets"].items():
        parts = content["predicted"]["parts"].get(memory, {})
        lines += [(_NAMES[memory], part, readable(size), "") for part, size in parts.items()]
        limit = "no limit" if budget is None else readable(budget)
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
        table["table"], f"{table['rows']:,}", "level 0" if whole else table["tier"], table["codec"]["kind"],
        "-" if whole else f"{table['cache_rows']:,} ({table['cache_rows'] / table['rows']:.2%})",
        f"{table['level1_rows']:,}" if table["level1_rows"] else "-", *_rates([table]), *_sizes([table]),
    )  # fmt: skip


def _fold(tables: Sequence[Content]) -> tuple[str, ...]:
    kinds = {("level 0" if table["tier"] == "level0" else table["tier"]) for table in tables}
    precisions = {table["codec"]["kind"] for table in tables}
    return (
        f"{len(tables)} small tables", f"{sum(table['rows'] for table in tables):,}", "/".join(sorted(kinds)),
        "/".join(sorted(precisions)), "", "", *_rates(tables), *_sizes(tables),
    )  # fmt: skip


def _rates(tables: Sequence[Content]) -> tuple[str, str]:
    """Hit rate of level 0, and rows that a step reads from home."""
    distinct = sum(table["distinct"] for table in tables)
    hits = 1 - sum(table["misses"] for table in tables) / distinct if distinct else 1.0
    return f"{hits:.3f}", f"{sum(table['home_reads'] for table in tables):,.0f}"


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


def _cards(content: Content) -> list[tuple[str, str]]:
    predicted = content["predicted"]
    dram = predicted["bytes"]["dram"]
    return [
        ("all float32 in DRAM", readable(predicted["float32_bytes"])),
        ("DRAM", f"{readable(dram)} ({predicted['float32_bytes'] / max(dram, 1):.2f}x less)"),
        ("predicted hit rate", f"{predicted['hit_rate']:.3f}"),
        ("embedding step", f"{predicted['step_seconds'] * 1e3:.2f} ms predicted"),
    ]


def _bars(content: Content) -> Figure:
    """A stacked bar for each memory, with its budget as a line."""
    memories = list(content["budgets"])
    stacks = {memory: content["predicted"]["parts"].get(memory, {}) for memory in memories}
    names = list(dict.fromkeys(part for parts in stacks.values() for part in parts))
    figure = Figure(figsize=(8, 1.6 + 0.6 * len(memories)), layout="constrained")
    axes = figure.add_subplot()
    colors = mpl.colormaps["tab20"]
    left = np.zeros(len(memories))
    for place, part in enumerate(names):
        sizes = np.array([stacks[memory].get(part, 0) for memory in memories]) / 2**20
        axes.barh([_NAMES[memory] for memory in memories], sizes, left=left, label=part, color=colors(place % 20))
        left += sizes
    for place, budget in enumerate(content["budgets"].values()):
        if budget is not None and budget / 2**20 < 4 * left.max():
            axes.plot([budget / 2**20] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5)
    axes.invert_yaxis()
    axes.set(xlabel="MiB; the line is the budget")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _print(console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in ("table", "home", "memory", "part") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
