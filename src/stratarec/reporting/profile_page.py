"""Show the results of `profile` (duplication, hot rows) as terminal tables and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stratarec.data.duplication import Duplication, Profile
from stratarec.hot.calibrator import Point
from stratarec.reporting.html import ACCENT, LINE, MUTED, SECOND, Chart, ShownTable, new_axes, write_html
from stratarec.reporting.terminal_tables import make_console, print_table

_HEADS = ("feature or group", "stored once", "ids per sample", "repeats per batch", "lookups saved")
LEGEND = (
    ("stored once", "whether samples of a session share one copy"),
    ("ids per sample", "lookups of a sample"),
    ("repeats per batch", "samples for each distinct value of a batch, shuffled as in training"),
    ("lookups saved", "share of a batch's lookups that shared copies make unnecessary"),
)


def about(profile: Profile) -> str:
    """Return a one-line summary of a profile."""
    return (
        f"{profile.split}: {profile.lookups_saved:.0%} of the lookups of a batch of {profile.batch_size:,} are saved "
        "by shared copies"
    )


def print_profile(profile: Profile) -> None:
    """Print duplication on the terminal."""
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


def write_profile(path: Path, profile: Profile, points: Sequence[Point]) -> None:
    """Write the HTML report: duplication, and the benefit of hot rows by budget."""
    write_html(
        path,
        "profile.html.jinja",
        title=f"{profile.dataset}: duplication and hot rows",
        lead=about(profile),
        heads=_HEADS,
        legend=LEGEND,
        rows=[(row, _cells(row)) for row in profile.rows],
        charts=[hot_curve(points)] if points else [],
        hot=hot_table(points),
        hot_legend=POINT_LEGEND,
    )


def _cells(row: Duplication) -> tuple[str, ...]:
    return (
        row.name,
        "yes" if row.grouped else "no",
        f"{row.ids:.1f}",
        f"{row.factor:.2f}" if row.factor < 100 else f"{row.factor:,.0f}",
        f"{row.saved:.0%}" if row.ids else "-",
    )


_POINT_HEADS = ("rows that are hot", "lookups", "inputs", "interval", "inputs by count")
_INPUTS = "inputs that need only hot rows"
POINT_LEGEND = (
    f"lookups: share that uses hot rows; inputs: share of {_INPUTS}, with its 99 % interval; inputs by count: the same "
    "if the rows with the most lookups were hot"
)


def hot_table(points: Sequence[Point]) -> ShownTable:
    """Return a table with the benefit of hot rows for each budget."""
    rows = [
        (
            f"{point.row_share:.1%}", f"{point.accesses:.1%}", f"{point.inputs.share:.2%}",
            f"{point.inputs.low:.2%} to {point.inputs.high:.2%}", f"{point.counted.share:.2%}",
        )
        for point in points
    ]  # fmt: skip
    return ShownTable(heads=_POINT_HEADS, rows=rows)


def print_hot(points: Sequence[Point], remark: str) -> None:
    """Print the benefit of hot rows for each budget, and a remark, which may be empty."""
    if not points:
        return
    console, shown = make_console(), hot_table(points)
    console.print()
    print_table(console, shown.heads, shown.rows)
    for line in (POINT_LEGEND, *([f"note: {remark}"] if remark else [])):
        console.print(line)


def hot_curve(points: Sequence[Point]) -> Chart:
    """Draw the shares of hot lookups and hot inputs against the share of hot rows."""
    row_share = [100 * point.row_share for point in points]
    figure, axes = new_axes(5.5, 2.6)
    curves = (
        ("lookups of hot rows", MUTED, [point.accesses for point in points]),
        (_INPUTS, ACCENT, [point.inputs.share for point in points]),
        ("the same, rows chosen by count alone", SECOND, [point.counted.share for point in points]),
    )
    for name, color, shares in curves:
        values = [100 * share for share in shares]
        axes.plot(row_share, values, label=name, color=color, marker="o", markersize=3, linewidth=1.5)
    low, high = ([100 * getattr(point.inputs, end) for point in points] for end in ("low", "high"))
    axes.fill_between(row_share, low, high, color=ACCENT, alpha=0.2, linewidth=0)
    axes.set(xlabel="hot rows, % of all rows", ylabel="%", ylim=(0, 100))
    axes.grid(color=LINE)
    words = {_INPUTS: f"{_INPUTS}, with the 99 % interval"}
    return Chart(title="Hot rows", note="benefit of a budget", figure=figure, words=words, wide=True)
