"""Where rows live, drawn: the levels of memory from fast to slow with what fills them, and what goes between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratarec.config.units import readable
from stratarec.reporting.html import ShownTable

Content = Mapping[str, Any]
"""What `Plan.to_dict` gives."""

HOMES = {"level0": "level 0", "dram": "DRAM", "mapped": "mapped file", "log": "log on a block device"}
_SLOTS, _TAGS = ("slot weights", "slot state"), ("tags", "stamps", "counters")
_WORK = ("staging", "workspace")
_MEMORY = {"mapped": "mapped", "log": "block"}
_RECORDS = ("record weights", "record parameters", "record state")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level, or what goes to and fro above it."""

    name: str
    words: str
    planned: int | None
    """Bytes."""
    used: int | None
    """Bytes."""
    flow: str = ""
    """What goes between the level above and this one."""
    share: float = 0.0
    """Per cent of the largest level."""

    @property
    def figure(self) -> str:
        """Its bytes in words."""
        used, planned = (None if size is None else readable(size) for size in (self.used, self.planned))
        if used is None:
            return f"{planned} planned"
        return used if planned is None else f"{used}, {planned} planned"


def levels(plan: Content | None, parts: Mapping[str, int] | None, caches: Sequence[Content]) -> list[Level]:
    """The levels of a plan, of a run, or of both.

    Parameters
    ----------
    parts : mapping of str to int
        What a run used, as `LookupEngine.bytes_by_part` tells it.
    caches : sequence of mapping
        What batches asked of cached tables, as `CacheFigures`.
    """
    if plan is None:
        found = [
            _level(
                "Level 0, in DRAM", "all rows in float32, where training reads and changes them", None, parts, "level0"
            ),
            _work({}, parts),
        ]
    else:
        found = list(_planned(plan, parts, caches))
    most = max(max(each.used or 0, each.planned or 0) for each in found) or 1
    widths = [100 * (each.planned or 0 if each.used is None else each.used) / most for each in found]
    return [Level(**{**vars(each), "share": width}) for each, width in zip(found, widths, strict=True)]


def _planned(plan: Content, parts: Mapping[str, int] | None, caches: Sequence[Content]) -> Iterable[Level]:
    tables, memories = plan["tables"], plan["predicted"]["parts"]
    dram = memories.get("dram", {})
    cached = [table for table in tables if table["tier"] != "level0"]
    slots = sum(table["cache_rows"] + table["hot_rows"] for table in tables)
    rows = sum(table["rows"] for table in tables)
    words = (
        f"float32, where training reads and changes rows: room for {slots:,} of {rows:,} rows, "
        f"which would take {readable(plan['predicted']['float32_bytes'])} all together"
        if cached
        else (f"all {rows:,} rows in float32, where training reads and changes them")
    )
    yield _level("Level 0, in DRAM", words, _sum(dram, _SLOTS), parts, "level0")
    if cached:
        homes = {table["tier"] for table in cached}
        inside = _sum(dram, set(dram) - {*_SLOTS, *_TAGS, *_WORK})
        names = ["encoded rows at rest"] if "dram" in homes else []
        names += ["buffers of the log, and where each row of it lies"] if "log" in homes else []
        names += (
            ["encoded rows that left level 0 last (a second level)"] if any(t["level1_rows"] for t in cached) else []
        )
        name = "Home, in DRAM" if "dram" in homes else "Log buffers and index, in DRAM"
        flow = _flow(plan, caches)
        yield _level(name, "; ".join([*names, "which rows were written"]), inside, parts, "home_dram", flow)
        files = homes & {"mapped", "log"}
        for tier in sorted(files):
            kinds = "/".join(sorted({table["codec"]["kind"] for table in cached if table["tier"] == tier}))
            size = sum(memories.get(_MEMORY[tier], {}).values())
            # A run does not tell the bytes of two kinds of files apart.
            known = parts if len(files) == 1 else None
            yield _level(f"Home, in a {HOMES[tier]}", f"rows at rest as {kinds}", size, known, "home_block")
        yield _level(
            "Directory, in DRAM", "which row is in which slot of level 0", _sum(dram, _TAGS), parts, "metadata"
        )
    yield _work(dram, parts)


def _work(dram: Mapping[str, int], parts: Mapping[str, int] | None) -> Level:
    work = None if parts is None else {"work": sum(parts.get(name, 0) for name in _WORK)}
    words = "of the update, and of rows on their way" + ("; planned as an upper bound" if dram else "")
    return _level("Work space, in DRAM", words, _sum(dram, _WORK) if dram else None, work, "work")


def _level(
    name: str, words: str, planned: int | None, parts: Mapping[str, int] | None, part: str, flow: str = ""
) -> Level:
    used = None if parts is None else parts.get(part, 0)
    return Level(name=name, words=words, planned=planned, used=used, flow=flow)


def _sum(parts: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(parts.get(name, 0) for name in names)


def _flow(plan: Content, caches: Sequence[Content]) -> str:
    """Rows and bytes of a step between level 0 and homes."""
    cached = [table for table in plan["tables"] if table["tier"] != "level0"]
    record = {table["table"]: record_bytes(table) for table in cached}
    asked, came = (sum(table[name] for table in cached) for name in ("distinct", "misses"))
    if not caches:
        size = sum(table["misses"] * record[table["table"]] for table in cached)
        return (
            f"of the {asked:,.0f} rows of a batch {_hits(asked, came)} are in level 0 as planned; {came:,.0f} "
            f"({readable(round(size))}) come in a step, and victims go home"
        )
    distinct, missed = (sum(each[name] for each in caches) for name in ("distinct", "missed"))
    size = sum(each["missed"] * record.get(each["table"], 0) for each in caches)
    return (
        f"of the {distinct:,.0f} rows of a batch {_hits(distinct, missed)} were in level 0; {missed:,.0f} "
        f"({readable(round(size))}) came in a step, and victims went home (planned: {asked:,.0f} rows, "
        f"{_hits(asked, came)}, {came:,.0f} in)"
    )


def record_bytes(table: Content) -> float:
    """Bytes of a row at rest."""
    size: int = sum(parts.get(name, 0) for parts in table["bytes"].values() for name in _RECORDS)
    return size / int(table["rows"])


def _hits(distinct: float, missed: float) -> str:
    return f"{1 - missed / distinct:.1%}" if distinct else "-"


def cached_tables(plan: Content | None, caches: Sequence[Content]) -> ShownTable:
    """Predicted beside measured hit rates of each table under a cache, the busiest first."""
    known = {each["table"]: each for each in caches}
    tables = [] if plan is None else [table for table in plan["tables"] if table["table"] in known]
    tables.sort(key=lambda table: -known[table["table"]]["missed"])
    rows = [
        (
            table["table"], f"{table['rows']:,}", HOMES[table["tier"]], table["codec"]["kind"],
            f"{table['cache_rows'] / table['rows']:.1%}", _hits(table["distinct"], table["misses"]),
            _hits(known[table["table"]]["distinct"], known[table["table"]]["missed"]),
            f"{table['misses']:,.0f}", f"{known[table['table']]['missed']:,.0f}",
        )
        for table in tables
    ]  # fmt: skip
    heads = (
        "table", "rows", "home", "precision there", "slots, of its rows", "hit rate planned", "hit rate measured",
        "rows a step planned", "rows a step measured",
    )  # fmt: skip
    return ShownTable(heads=heads, rows=rows)
