"""Tables on a terminal of any width: columns that do not fit are printed in several tables."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table

from stratarec.io.names import visible

_GAP = 2
# Wider than any table: in a file or a pipe each row is one line.
_UNLIMITED = 10_000

Rows = Sequence[Sequence[str]]


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print text as one line: control characters are shown, not executed."""
        super().print(
            *(visible(value) if isinstance(value, str) else value for value in objects), **options
        )

    def on_broken_pipe(self) -> None:
        """Raise the error for the command line to handle; rich would exit with code 1."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return standard output, as wide as its terminal or COLUMNS; without limit for a file or a
    pipe.

    Nothing in a name is interpreted as markup, or reaches the terminal as a control character.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal or os.environ.get("COLUMNS") else _UNLIMITED
    return _Console(width=width, highlight=False, markup=False, emoji=False)


def print_table(
    console: Console, heads: Sequence[str], rows: Rows, *, text: Collection[str] = (), keys: int = 1
) -> None:
    """Print `rows` under `heads`; control characters in them are escaped.

    Parameters
    ----------
    text : collection of str
        Heads of text columns, which are aligned left; the others are numbers.
    keys : int
        Number of leading columns that identify a row. They are repeated if the table is printed in
        parts.
    """
    heads, *rows = ([visible(cell) for cell in row] for row in (heads, *rows))
    wide = [max(map(cell_len, (head, *(row[i] for row in rows)))) for i, head in enumerate(heads)]
    if sum(wide) + _GAP * len(wide) > console.width:
        wide = [
            min(_broken(head, [row[i] for row in rows]), console.width // 2) for i, head in enumerate(heads)
        ]
    for places in _parts(wide, keys, console.width):
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for place in places:
            side: JustifyMethod = "left" if heads[place] in text else "right"
            table.add_column(
                heads[place], justify=side, width=wide[place], overflow="fold", vertical="bottom"
            )
        for row in rows:
            table.add_row(*(row[place] for place in places))
        console.print(table)
        console.print()


def _broken(head: str, cells: Sequence[str]) -> int:
    """Return the width of a column whose head is wrapped at its blanks."""
    return max(map(cell_len, (*head.split(), *cells)), default=0)


def _parts(widths: Sequence[int], keys: int, limit: int) -> list[list[int]]:
    """Return the columns of each table: the keys, and as many others as fit, at least one."""
    shared = list(range(keys))
    start = sum(widths[place] + _GAP for place in shared)
    parts, used = [list(shared)], start
    for place in range(keys, len(widths)):
        if used + widths[place] > limit and len(parts[-1]) > keys:
            parts.append(list(shared))
            used = start
        parts[-1].append(place)
        used += widths[place] + _GAP
    return parts
