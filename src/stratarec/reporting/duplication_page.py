"""What `profile` found as one HTML file, and the duplication of a data set as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stratarec.data.duplication import Duplication, Profile
from stratarec.hot.day_drift import DayDrift
from stratarec.hot.profile import HotProfile, Point
from stratarec.hot.reuse import TableReuse
from stratarec.reporting.drift_tables import drift_charts, drift_tables
from stratarec.reporting.hot_page import REUSE_LEGEND, about_hot, hot_curve, hot_tables, reuse_charts, reuse_table
from stratarec.reporting.html import write_html
from stratarec.reporting.terminal_tables import make_console, print_table

_HEADS = (
    "feature or group", "stored once", "ids per sample", "same as before", "repeats per session", "per batch",
    "per batch, sessions whole", "estimate of that", "per batch, samples mixed", "lookups saved",
)  # fmt: skip
LEGEND = (
    ("stored once", "whether samples of a session share one copy of it"),
    ("ids per sample", "how many a sample looks up"),
    ("same as before", "how often a sample of a session has the value of the sample before it"),
    ("repeats", "samples for each distinct value: within a session; within a batch as training shuffles it; within one "
     "of whole sessions, measured and estimated; and within one whose samples are shuffled one by one"),
    ("lookups saved", "share of a batch's lookups that what is stored once makes unnecessary"),
)  # fmt: skip


def about(profile: Profile) -> str:
    """One line under the title."""
    return (
        f"{profile.split}: {profile.samples_per_session:.1f} samples a session; in batches of {profile.batch_size:,}, "
        f"{profile.batch_samples_per_session:.1f} samples of a user where sessions are whole; "
        f"{profile.lookups_saved:.0%} of the lookups of a batch are saved by what is stored once"
    )


def print_profile(profile: Profile) -> None:
    """Show the table on the terminal."""
    console = make_console()
    console.print(f"{profile.dataset}: duplication")
    console.print()
    print_table(console, _HEADS, [_cells(row) for row in profile.rows], text=_HEADS[:1])
    for row in profile.rows:
        if row.features != (row.name,):
            console.print(f"{row.name}: {', '.join(row.features)}")
    for term, words in LEGEND:
        console.print(f"{term}: {words}")
    console.print(about(profile))


def write_profile(
    path: Path,
    profile: Profile,
    reuse: Sequence[TableReuse],
    points: Sequence[Point],
    hot: HotProfile | None = None,
    drift: DayDrift | None = None,
) -> None:
    """Write the HTML report: duplication, how rows are used again, what budgets of hot rows are worth, the hot rows of
    one, where there is a profile of them, and what changes from day to day, where there are days."""
    write_html(
        path,
        "profile.html.jinja",
        title=f"{profile.dataset}: duplication and reuse",
        lead=about(profile),
        heads=_HEADS,
        legend=LEGEND,
        rows=[(row, _cells(row)) for row in profile.rows],
        reuse=reuse_table(reuse),
        reuse_legend=REUSE_LEGEND,
        charts=[*reuse_charts(reuse), *([hot_curve(points)] if points else [])],
        hot=hot and about_hot(hot),
        drift=drift_tables(drift),
        drift_charts=drift_charts(drift),
        tables=[] if hot is None else hot_tables(hot),
    )


def _cells(row: Duplication) -> tuple[str, ...]:
    factors = (row.session_factor, row.batch_factor, row.whole_factor, row.predicted, row.shuffled_factor)
    return (
        row.name,
        "yes" if row.grouped else "no",
        f"{row.ids:.1f}",
        f"{row.stays:.1%}",
        *(f"{factor:.2f}" if factor < 100 else f"{factor:,.0f}" for factor in factors),
        f"{row.saved:.0%}" if row.ids else "-",
    )
