"""Tables on a terminal of any width: where the columns do not fit side by side, they stand in several tables."""

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
# Wider than any table: a file or a pipe gets one line a row.
_UNLIMITED = 10_000

Rows = Sequence[Sequence[str]]


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Text is a line: what would act on a terminal, or begin another line, is shown as it is written."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which rich would end with exit code 1."""
        raise BrokenPipeError


def make_console() -> Console:
    """Standard output as wide as its terminal, or as COLUMNS says; without limit where it goes to a file or a pipe.

    Nothing in a name is taken for markup or reaches the terminal as a control character.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal or os.environ.get("COLUMNS") else _UNLIMITED
    return _Console(width=width, highlight=False, markup=False, emoji=False)


def print_table(
    console: Console, heads: Sequence[str], rows: Rows, *, text: Collection[str] = (), keys: int = 1
) -> None:
    """Print `rows` under `heads`, whatever characters there are in them.

    Parameters
    ----------
    text : collection of str
        Heads of columns of words, which start at the left; the others are numbers.
    keys : int
        The first so many columns name a row. They are repeated where the table is printed in parts.
    """
    heads, *rows = ([visible(cell) for cell in row] for row in (heads, *rows))
    wide = [max(map(cell_len, (head, *(row[i] for row in rows)))) for i, head in enumerate(heads)]
    if sum(wide) + _GAP * len(wide) > console.width:
        wide = [min(_broken(head, [row[i] for row in rows]), console.width // 2) for i, head in enumerate(heads)]
    for places in _parts(wide, keys, console.width):
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for place in places:
            side: JustifyMethod = "left" if heads[place] in text else "right"
            table.add_column(heads[place], justify=side, width=wide[place], overflow="fold", vertical="bottom")
        for row in rows:
            table.add_row(*(row[place] for place in places))
        console.print(table)
        console.print()


def _broken(head: str, cells: Sequence[str]) -> int:
    """Width of a column whose head is broken at its blanks."""
    return max(map(cell_len, (*head.split(), *cells)), default=0)


def _parts(widths: Sequence[int], keys: int, limit: int) -> list[list[int]]:
    """The columns of each table: the keys, and as many of the others as fit beside them, but one at least."""
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
