"""What changes from day to day, for people: tables, and curves of the tables that change most."""

from __future__ import annotations

from datetime import date, timedelta

import numpy as np
from matplotlib.ticker import MaxNLocator

from stratarec.hot.day_drift import DayDrift, Floats
from stratarec.reporting.html import LINE, SERIES, Chart, ShownTable, new_axes
from stratarec.reporting.terminal_tables import make_console, print_table

# Curves that can be told apart.
_CURVES = len(SERIES)
# Numbers that are named on the terminal and on a page.
_NUMBERS = 20


def drift_tables(drift: DayDrift | None) -> list[tuple[ShownTable, str]]:
    """Of vocabularies and of numbers a table with what it says in words, what changes most first; none without days."""
    if drift is None:
        return []
    period = "day" if drift.days == 1 else f"{drift.days} days"
    unseen = sorted(drift.unseen.items(), key=lambda each: -_median(each[1]))
    shift = sorted(drift.shift.items(), key=lambda each: -_most(each[1])[0])
    rows = [(name, f"{_median(each):.1%}", f"{_most(each)[0]:.1%}", _day(drift, each)) for name, each in unseen]
    moved = [(name, f"{_most(each)[0]:.3g}", _day(drift, each)) for name, each in shift[:_NUMBERS]]
    return [
        (
            ShownTable(heads=("vocabulary", "unseen, median", "most", "when"), rows=rows),
            f"unseen: share of a period's lookups ({period}; {len(drift.starts)} of them) whose row the period before "
            "did not use; values that share a row count as one, and a period that is cut short shows less than it had",
        ),
        (
            ShownTable(heads=("number", "largest shift", "when"), rows=moved),
            f"shift: how far the mean moved from one period ({period}) to the next, in deviations of all samples",
        ),
    ]


def print_drift(drift: DayDrift | None) -> None:
    """Print the tables, where there are days."""
    console = make_console()
    for table, words in drift_tables(drift):
        if table.rows:
            console.print()
            print_table(console, table.heads, table.rows, text=table.heads[:1])
            console.print(words)


def drift_charts(drift: DayDrift | None) -> list[Chart]:
    """The vocabularies with most unseen rows, day by day."""
    if drift is None:
        return []
    most = sorted(drift.unseen.items(), key=lambda each: -_median(each[1]))[:_CURVES]
    figure, axes = new_axes(5.5, 2.6)
    places = (drift.starts - drift.starts[0]).astype(np.float64)
    for (name, each), color in zip(most, SERIES, strict=False):
        axes.plot(places, 100 * each, label=name, color=color, marker="o", markersize=3, linewidth=1.5)
    axes.set(xlabel="day of the log", ylabel="lookups of unseen rows, %", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(color=LINE)
    note = f"from {_date(int(drift.starts[0]))} on"
    return [Chart(title="Rows that the period before did not use", note=note, figure=figure, wide=True)]


def _median(each: Floats) -> float:
    return float(np.nanmedian(each)) if np.isfinite(each).any() else 0.0


def _most(each: Floats) -> tuple[float, int]:
    """The largest, whatever its sign, and its place."""
    sizes = np.nan_to_num(np.abs(each))
    place = int(np.argmax(sizes))
    return float(sizes[place]), place


def _day(drift: DayDrift, each: Floats) -> str:
    return _date(int(drift.starts[_most(each)[1]])) if _most(each)[0] else "-"


def _date(day: int) -> str:
    """A day since 1970; one that no calendar has, as of a log whose times count from somewhere else, as a number."""
    try:
        return str(date(1970, 1, 1) + timedelta(days=day))
    except OverflowError:
        return f"day {day:,}"
