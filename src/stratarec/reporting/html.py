"""HTML files that load nothing from elsewhere: templates and their look from ``pages/``, figures inline."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from stratarec.io.atomic import write_text

# Colours that stand for those of the page, which differ from light to dark: matplotlib takes no CSS variable.
TEXT, MUTED, LINE, ACCENT, SECOND = "#010101", "#020202", "#030303", "#040404", "#050505"
_CSS = {TEXT: "--text", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", SECOND: "--second"}
_CSS |= {f"#0{number}0a0a": f"--c{number}" for number in range(3, 8)}
SERIES = (ACCENT, SECOND, *(color for color in _CSS if color.endswith("0a0a")))
"""Colours of things that stand beside each other."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stratarec",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": LINE,
    "axes.facecolor": "none",
}
# What matplotlib writes around a drawing: its size is the page's matter, and the rest is of no use there.
_AROUND = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)


def css(color: str) -> str:
    """What a legend calls a colour."""
    return f"var({_CSS[color]})" if color in _CSS else color


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, with what stands above it."""

    title: str
    note: str = ""
    figure: Figure
    legend: Sequence[tuple[str, str]] = ()
    """Colours and what they are of."""
    wide: bool = False
    text: str = ""
    """What it shows, for who cannot see it."""


@dataclass(frozen=True, kw_only=True)
class ShownTable:
    """What a table shows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_html(path: Path, template: str, **content: Any) -> None:
    """Render ``pages/<template>``, which extends ``page.html.jinja``, to `path`; all content is escaped."""
    write_text(path, _environment().get_template(template).render(**content))


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty drawing of so many inches in the page's colours; CSS gives it its size."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def new_course(width: float, height: float) -> tuple[Figure, Axes]:
    """As `new_axes`, for what changes over the steps of a run."""
    figure, axes = new_axes(width, height)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color=LINE)
    return figure, axes


@cache
def _environment() -> jinja2.Environment:
    pages = Path(__file__).with_name("pages")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pages),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["style"] = Markup((pages / "style.css").read_text(encoding="utf-8"))
    environment.filters["svg"] = _svg
    return environment


def _svg(chart: Chart, number: int) -> Markup:
    """The drawing as inline SVG; `number` keeps its ids apart from those of other drawings of the page."""
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        chart.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = _AROUND.sub("", buffer.getvalue())
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{number}-", text[text.index("<svg") :])
    for color, variable in _CSS.items():
        text = text.replace(color, f"var({variable})")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes a viewBox"
    told = Markup.escape(f"{chart.title}: {chart.text or chart.note}".rstrip(": "))
    head = f'<svg {box[0]} role="img" aria-label="{told}">'
    return Markup(head + text[text.index(">") + 1 :])
