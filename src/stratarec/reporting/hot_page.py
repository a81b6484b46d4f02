"""Hot rows for people: tables on the terminal, what a budget is worth, and what caches of each size would find."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from stratarec.config.units import readable
from stratarec.hot.calibrator import HotProfile, Point, without_skew
from stratarec.hot.reuse import POLICIES, TableReuse
from stratarec.reporting.html import ACCENT, LINE, MUTED, SECOND, Chart, ShownTable, new_axes
from stratarec.reporting.terminal_tables import make_console, print_table

_TABLE_HEADS = ("table", "rows", "hot", "hot bytes", "accesses")
_POINT_HEADS = ("budget", "bytes", "accesses", "inputs", "interval", "by count")
_INPUTS = "inputs that need no others"

_REUSE_HEADS = (
    "table", "rows", "used", "top 1 %", "top 10 %", "again", "between", "lru 1 %", "lru 10 %", "lfu 10 %", "rank 10 %",
)  # fmt: skip
REUSE_LEGEND = (
    "used: rows that an epoch looks up; top: share of lookups that go to the most frequent 1 % or 10 % of these; "
    "again: share of uses (different rows of each batch) that are not a row's first, the most that a cache can find; "
    "between: other rows used between two uses of a row, median; then what caches of 1 % or 10 % of the rows find, by "
    "policy"
)
# Pictures of the largest tables, and of none that any cache holds: the others are in the table.
_PICTURES, _LEAST_ROWS = 6, 64


def reuse_table(found: Sequence[TableReuse]) -> ShownTable:
    """How rows are used again, a table a line."""
    rows = [
        (
            each.table, f"{each.rows:,}", f"{'' if each.exact else '~'}{each.used:,.0f}",
            *(f"{share:.1%}" for share in each.top.values()), f"{each.again:.1%}",
            f"{each.distance:,.0f}" if each.again else "-", f"{each.rate('lru', 0.01):.1%}",
            *(f"{each.rate(policy, 0.1):.1%}" for policy in POLICIES),
        )
        for each in found
    ]  # fmt: skip
    return ShownTable(heads=_REUSE_HEADS, rows=rows)


def print_reuse(found: Sequence[TableReuse]) -> None:
    """Print how rows are used again, where there are any."""
    if not found:
        return
    console, table = make_console(), reuse_table(found)
    console.print()
    print_table(console, table.heads, table.rows, text=("table",))
    console.print(REUSE_LEGEND)


def reuse_charts(found: Sequence[TableReuse]) -> list[Chart]:
    """Hit rates of each policy over the size of a cache."""
    return [_reuse_chart(each) for each in found[:_PICTURES] if each.rows >= _LEAST_ROWS]


def _reuse_chart(found: TableReuse) -> Chart:
    figure, axes = new_axes(3.6, 2.3)
    for policy, color in zip(POLICIES, (ACCENT, SECOND, MUTED), strict=True):
        axes.plot(found.sizes, 100 * found.hits[policy], label=policy, color=color, linewidth=1.5)
    axes.set(xscale="log", xlabel="rows of the cache", ylabel="hits, %", ylim=(0, 100))
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color=LINE)
    return Chart(title=found.table, note=f"{found.rows:,} rows", figure=figure)


def print_hot(profile: HotProfile, counted: Sequence[str] = ()) -> None:
    """Print which rows are hot and what they are worth; `counted` are lines on inputs that were all looked at."""
    console = make_console()
    for table in hot_tables(profile):
        print_table(console, table.heads, table.rows, text=("table", "budget"))
    for line in (*about_hot(profile), *counted):
        console.print(line)


def about_hot(profile: HotProfile) -> list[str]:
    """What there is to say of a profile beside its tables."""
    point = profile.chosen
    how = (
        "to make most inputs hot"
        if profile.method == "inputs"
        else "by lookups per byte, which nothing was better than"
    )
    said = [
        f"hot rows of {readable(point.budget_bytes)} take {point.accesses:.1%} of the lookups; "
        f"{point.inputs.share:.2%} of the inputs need no others (99 % interval {_interval(point)})",
        f"chosen {how}; by count alone {point.counted.share:.2%} of the inputs; {profile.seconds:.1f} s",
    ]
    remark = without_skew(profile)
    return [*said, f"note: {remark}"] if remark else said


def hot_tables(profile: HotProfile) -> list[ShownTable]:
    """Hot rows of each table, and what other budgets are worth."""
    rows = [
        (
            table.name, f"{table.rows:,}", f"{table.hot:,}", readable(table.hot * table.row_bytes),
            f"{table.accesses:.1%}",
        )
        for table in profile.tables
    ]  # fmt: skip
    curve = [
        (
            readable(point.budget_bytes), f"{point.row_share:.1%}", f"{point.accesses:.1%}",
            f"{point.inputs.share:.2%}", _interval(point), f"{point.counted.share:.2%}",
        )
        for point in profile.points
    ]  # fmt: skip
    return [ShownTable(heads=_TABLE_HEADS, rows=rows), ShownTable(heads=_POINT_HEADS, rows=curve)]


def hot_curve(points: Sequence[Point]) -> Chart:
    """Shares of accesses and of inputs over the share of bytes."""
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
    return Chart(title="Hot rows", note="what a budget is worth", figure=figure, words=words, wide=True)


def _interval(point: Point) -> str:
    return f"{point.inputs.low:.2%} to {point.inputs.high:.2%}"
