"""Which hot rows every one of several processes has a copy of: where that makes steps shorter, and as a budget allows.

A row is worth a copy by the bytes that no longer travel (`distributed.hot_traffic`), whatever else an input needs, so
rows of all tables are ranked by lookups per byte, and of a table's first rows as many are taken as pay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratarec.distributed.hot_traffic import Floats, Flows, Rates, RowWires, copy_flows, flat_flows, more_collectives
from stratarec.hot.by_count import hottest_rows
from stratarec.hot.parts import Counts, Part, share_of_accesses
from stratarec.planning.bytes import Parts, add_parts
from stratarec.planning.plan import Plan, TablePlacement
from stratarec.sizes import readable


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Processes that share tables, and what they look up."""

    hosts: int
    """T."""
    local: int
    """L, ranks of each."""
    batch: int
    """Samples of a rank."""
    samples: int
    """Of the training split, whose lookups were counted."""
    wires: RowWires

    def lookups(self, part: Part) -> Floats:
        """``[rows]`` of each row in the batch of a rank; of tail buckets the mean."""
        counts = part.counts.astype(np.float64)
        return (counts * 0 + counts.mean() if part.whole else counts) * (self.batch / self.samples)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows to copy."""

    rows: Counts
    """``[parts]`` first rows of each part."""
    flat: Flows
    """What a step moves without copies."""
    copied: Flows
    """With them."""
    saved_seconds: float
    """Of a step; infinite where rates are not known."""


def choose_copies(
    parts: Sequence[Part], widths: Sequence[int], budget: int | None, ranks: Ranks, rates: Rates | None, latency: float
) -> Copies:  # fmt: skip
    """The rows whose copies save most of a step.

    Parameters
    ----------
    widths : sequence of int
        D of each part.
    budget : int or None
        Bytes of all copies of a rank.
    rates : Rates or None
        None takes all rows that the budget holds.
    latency : float
        Seconds of a collective of all ranks.
    """
    most = np.array([part.rows for part in parts])
    if budget is not None and budget < sum(part.nbytes for part in parts):
        most = hottest_rows(parts, budget)
    rows, flat, copied = np.zeros_like(most), [], []
    for place, (part, width) in enumerate(zip(parts, widths, strict=True)):
        lookups = ranks.lookups(part)
        here, there = (
            flows(lookups, width, ranks.hosts, ranks.local, ranks.wires) for flows in (flat_flows, copy_flows)
        )
        rows[place] = most[place] if rates is None else _paying(part, most[place], here, there, rates)
        flat.append(here.sum())
        copied += [_of(there, slice(rows[place])), _of(here, slice(rows[place], None))]
    before, after = (Flows(*np.sum(many, axis=0)) for many in (flat, copied))
    saved = np.inf
    if rates is not None:
        collectives = latency * more_collectives(ranks.hosts, ranks.local)
        saved = float(before.seconds(rates) - after.seconds(rates)) - collectives
    return Copies(rows=rows, flat=before, copied=after, saved_seconds=saved)


def _paying(part: Part, most: int, flat: Flows, copied: Flows, rates: Rates) -> int:
    """How many first rows save most together."""
    saved = np.cumsum((flat.seconds(rates) - copied.seconds(rates))[:most])
    if not len(saved) or saved.max() <= 0:
        return 0
    return most if part.whole else int(saved.argmax()) + 1


def _of(flows: Flows, rows: slice) -> Flows:
    return Flows(*(part[rows] for part in flows)).sum()


def with_copies(plan: Plan, parts: Sequence[Part], rows: Counts) -> Plan:
    """The plan with copies of the first `rows` of each part."""
    by_table: dict[str, dict[str, int]] = {}
    for part, many in zip(parts, rows.tolist(), strict=True):
        by_table.setdefault(part.table, {})["copied_tail" if part.whole else "copied_head"] = many
    row_bytes = {part.table: part.row_bytes for part in parts}

    def placed(table: TablePlacement) -> TablePlacement:
        found = by_table[table.table]
        # The owner of a row under a cache has a slot for it, too.
        holders = plan.ranks + (table.tier != "level0")
        more: Parts = {"dram": {"copies": holders * sum(found.values()) * row_bytes[table.table]}}
        return replace(table, **found, bytes=add_parts([table.bytes, more]))  # type: ignore[arg-type]

    total = sum(many * part.row_bytes for part, many in zip(parts, rows.tolist(), strict=True))
    note = (
        f"every process has copies of {int(rows.sum()):,} hot rows, {readable(total)}, which take "
        f"{share_of_accesses(parts, rows):.1%} of the lookups"
    )
    return replace(plan, tables=tuple(map(placed, plan.tables)), notes=(*plan.notes, note))
