"""Show the results of `profile` (duplication, hot rows) as terminal tables and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stratarec.config.units import format_bytes
from stratarec.data.duplication import Duplication, Profile
from stratarec.hot.calibrator import HotProfile, Point, warn_little_skew
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


def write_profile(path: Path, profile: Profile, points: Sequence[Point], hot: HotProfile | None = None) -> None:
    """Write the HTML report: duplication, benefit of hot rows by budget, and the chosen hot rows."""
    write_html(
        path,
        "profile.html.jinja",
        title=f"{profile.dataset}: duplication and hot rows",
        lead=about(profile),
        heads=_HEADS,
        legend=LEGEND,
        rows=[(row, _cells(row)) for row in profile.rows],
        charts=[hot_curve(points)] if points else [],
        hot=hot and about_hot(hot),
        tables=[] if hot is None else hot_tables(hot),
    )


def _cells(row: Duplication) -> tuple[str, ...]:
    return (
        row.name,
        "yes" if row.grouped else "no",
        f"{row.ids:.1f}",
        f"{row.factor:.2f}" if row.factor < 100 else f"{row.factor:,.0f}",
        f"{row.saved:.0%}" if row.ids else "-",
    )


_TABLE_HEADS = ("table", "rows", "hot", "hot bytes", "accesses")
_POINT_HEADS = ("budget", "bytes", "accesses", "inputs", "interval", "by count")
_INPUTS = "inputs that need only hot rows"


def print_hot(profile: HotProfile, counted: Sequence[str] = ()) -> None:
    """Print the hot rows and their benefit, then the lines `counted`, which are about a count of all inputs."""
    console = make_console()
    for table in hot_tables(profile):
        print_table(console, table.heads, table.rows, text=("table", "budget"))
    for line in (*about_hot(profile), *counted):
        console.print(line)


def about_hot(profile: HotProfile) -> list[str]:
    """Return remarks on a profile of hot rows."""
    point = profile.chosen
    by_count = "by lookups per byte; the other method, which tries to make most inputs hot, was no better"
    how = "to make most inputs hot" if profile.method == "inputs" else by_count
    remarks = [
        f"hot rows of {format_bytes(point.budget_bytes)} take {point.accesses:.1%} of the lookups; "
        f"{point.inputs.share:.2%} of the inputs need only hot rows (99 % interval {_interval(point)})",
        f"chosen {how}; by count alone {point.counted.share:.2%} of the inputs; {profile.seconds:.1f} s",
    ]
    remark = warn_little_skew(profile)
    return [*remarks, f"note: {remark}"] if remark else remarks


def hot_tables(profile: HotProfile) -> list[ShownTable]:
    """Return a table of the hot rows of each embedding table, and a table of the benefit of other budgets."""
    rows = [
        (
            table.name, f"{table.rows:,}", f"{table.hot:,}", format_bytes(table.hot * table.row_bytes),
            f"{table.accesses:.1%}",
        )
        for table in profile.tables
    ]  # fmt: skip
    curve = [
        (
            format_bytes(point.budget_bytes), f"{point.row_share:.1%}", f"{point.accesses:.1%}",
            f"{point.inputs.share:.2%}", _interval(point), f"{point.counted.share:.2%}",
        )
        for point in profile.points
    ]  # fmt: skip
    return [ShownTable(heads=_TABLE_HEADS, rows=rows), ShownTable(heads=_POINT_HEADS, rows=curve)]


def hot_curve(points: Sequence[Point]) -> Chart:
    """Draw the shares of hot lookups and hot inputs against the share of the tables' bytes."""
    bytes_share = [100 * point.row_share for point in points]
    figure, axes = new_axes(5.5, 2.6)
    curves = (
        ("lookups of hot rows", MUTED, [point.accesses for point in points]),
        (_INPUTS, ACCENT, [point.inputs.share for point in points]),
        ("the same, rows chosen by count alone", SECOND, [point.counted.share for point in points]),
    )
    for name, color, shares in curves:
        values = [100 * share for share in shares]
        axes.plot(bytes_share, values, label=name, color=color, marker="o", markersize=3, linewidth=1.5)
    low, high = ([100 * getattr(point.inputs, end) for point in points] for end in ("low", "high"))
    axes.fill_between(bytes_share, low, high, color=ACCENT, alpha=0.2, linewidth=0)
    axes.set(xlabel="hot bytes, % of all rows'", ylabel="%", ylim=(0, 100))
    axes.grid(color=LINE)
    words = {_INPUTS: f"{_INPUTS}, with the 99 % interval"}
    return Chart(title="Hot rows", note="benefit of a budget", figure=figure, words=words, wide=True)


def _interval(point: Point) -> str:
    return f"{point.inputs.low:.2%} to {point.inputs.high:.2%}"
