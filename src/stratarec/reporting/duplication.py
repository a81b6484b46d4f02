"""The duplication of a data set as a table on the terminal and as one HTML file."""

from __future__ import annotations

from pathlib import Path

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table

from stratarec.files import write_atomic
from stratarec.profiling.duplication import Duplication, Profile

_HEADS = (
    "group or feature", "stored once", "ids a sample", "stays in session", "factor in session", "factor in batch",
    "whole sessions", "formula", "single samples", "lookups saved",
)  # fmt: skip
_SHORT_HEADS = ("", "once", "ids", "stays", "session", "batch", "whole", "formula", "single", "saved")
_LEGEND = (
    "once: stored once; ids: looked up a sample; stays: share of neighbours in a session that agree. Then samples for "
    "each distinct value: in a session, in a batch as training shuffles it, in one of whole sessions, by formula for "
    "that, and in one of single samples; saved: share of lookups"
)
_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ profile.dataset }}: duplication</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #e3e8ed }
td:first-child, th:first-child { text-align: left } small { color: #5b6b7b }
.bar { display: inline-block; height: .6rem; background: #2a6fb0; border-radius: .2rem }
</style></head><body>
<h1>{{ profile.dataset }}: duplication</h1><p>{{ about }}</p>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}<th></th></tr>
{% for row, cells in rows %}<tr>{% for cell in cells %}<td>{{ cell }}
{% if loop.first and row.features != (row.name,) %}<br><small>{{ row.features|join(", ") }}</small>
{% endif %}</td>{% endfor %}
<td style="text-align:left"><span class="bar" style="width:{{ (8 * row.saved)|round(2) }}rem"></span></td></tr>
{% endfor %}</table>
<p>A factor is the number of samples for each distinct value. Batches are shuffled in runs, as training does by default;
beside it stand the factors of batches of <i>whole sessions</i> and of <i>single samples</i>. <i>Formula</i> is what
1 / (1/S + (1 - 1/S)(1 - d)) gives for whole sessions, where d is the share of neighbours within a session that agree,
and S the samples of a user in a batch.</p>
</body></html>
"""


def about(profile: Profile) -> str:
    """One line under the title."""
    return (
        f"{profile.split}: {profile.samples_per_session:.1f} samples a session; in batches of {profile.batch_size:,}, "
        f"{profile.batch_samples_per_session:.1f} samples of a user where sessions are whole; "
        f"{profile.lookups_saved:.0%} of the lookups of a batch are saved by what is stored once"
    )


def print_profile(profile: Profile) -> None:
    """Show the table on the terminal."""
    table = Table(title=f"{profile.dataset}: duplication", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, head in enumerate(_SHORT_HEADS):
        table.add_column(head, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in profile.rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    for row in profile.rows:
        if row.features != (row.name,):
            console.print(f"{row.name}: {', '.join(row.features)}", highlight=False)
    console.print(f"{_LEGEND}\n{about(profile)}", highlight=False)


def write_profile(path: Path, profile: Profile) -> None:
    """Write the HTML report."""
    text = jinja2.Environment(autoescape=True).from_string(_TEMPLATE).render(
        profile=profile, about=about(profile), heads=_HEADS, rows=[(row, _cells(row)) for row in profile.rows]
    )  # fmt: skip
    write_atomic(path, lambda temporary: _write(temporary, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _cells(row: Duplication) -> tuple[str, ...]:
    factors = (row.session_factor, row.batch_factor, row.whole_factor, row.predicted, row.shuffled_factor)
    return (
        row.name,
        "yes" if row.grouped else "no",
        f"{row.ids:.1f}",
        f"{row.stays:.1%}",
        *(f"{factor:.2f}" if factor < 100 else f"{factor:.0f}" for factor in factors),
        f"{row.saved:.0%}",
    )
