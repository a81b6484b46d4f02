"""Predicted steps on a cluster, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratarec.reporting.terminal_tables import make_console, print_table

_HEADS = ("exchange", "wire", "towers", "ratio", "compute", "reduce", "inside", "between", "ms", "speed")


def print_steps(rows: Sequence[Mapping[str, Any]], best: Mapping[str, str], assumed: Sequence[str]) -> None:
    """Print predicted steps in milliseconds, which is fastest, and what was assumed.

    Parameters
    ----------
    rows : sequence of mapping
        ``exchange``, ``wire``, ``towers``, ``ratio``, the seconds of the parts of a step, and their sum ``step``. The
        first is what the others are compared with.
    best : mapping of str to str
        Kind of change -> the fastest way.
    assumed : sequence of str
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
    print_table(console, _HEADS, cells, text=("exchange", "wire"), keys=4)
    for kind, name in best.items():
        console.print(f"fastest, {kind}: {name}")
    for line in assumed:
        console.print(f"assumed: {line}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
