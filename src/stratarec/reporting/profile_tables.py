"""Show the results of `profile` (duplication, hot rows) as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

from stratarec.data.duplication import Duplication, Profile
from stratarec.hot.calibrator import Point
from stratarec.reporting.terminal_tables import make_console, print_table

_HEADS = ("feature or group", "stored once", "ids per sample", "repeats per batch", "lookups saved")
_LEGEND = (
    ("stored once", "whether samples of a session share one copy"),
    ("ids per sample", "lookups of a sample"),
    ("repeats per batch", "samples for each distinct value of a batch, shuffled as in training"),
    ("lookups saved", "share of a batch's lookups that shared copies make unnecessary"),
)


def about(profile: Profile) -> str:
    """Return a one-line summary of a profile."""
    return (
        f"{profile.split}: {profile.lookups_saved:.0%} of the lookups of a batch of {profile.batch_size:,} "
        "are saved by shared copies"
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
    for term, words in _LEGEND:
        console.print(f"{term}: {words}")
    console.print(about(profile))


def _cells(row: Duplication) -> tuple[str, ...]:
    return (
        row.name,
        "yes" if row.grouped else "no",
        f"{row.ids:.1f}",
        f"{row.factor:.2f}" if row.factor < 100 else f"{row.factor:,.0f}",
        f"{row.saved:.0%}" if row.ids else "-",
    )


_POINT_HEADS = ("rows that are hot", "lookups", "inputs", "interval", "inputs by count")
_POINT_LEGEND = (
    "lookups: share that uses hot rows; inputs: share of samples that need only hot rows, with its 99 % "
    "interval; inputs by count: the same if the rows with the most lookups were hot"
)


def print_hot(points: Sequence[Point], remark: str) -> None:
    """Print the benefit of hot rows for each budget, and a remark, which may be empty."""
    if not points:
        return
    rows = [
        (
            f"{point.row_share:.1%}",
            f"{point.accesses:.1%}",
            f"{point.inputs.share:.2%}",
            f"{point.inputs.low:.2%} to {point.inputs.high:.2%}",
            f"{point.counted.share:.2%}",
        )
        for point in points
    ]
    console = make_console()
    console.print()
    print_table(console, _POINT_HEADS, rows)
    for line in (_POINT_LEGEND, *([f"note: {remark}"] if remark else [])):
        console.print(line)
