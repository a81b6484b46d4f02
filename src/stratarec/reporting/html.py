"""Self-contained HTML files: templates and style from ``pages/``, charts inline."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

# Placeholders for the colours of the page, which differ in light and dark mode: matplotlib accepts
# no CSS variables.
TEXT = "#010101"
MUTED = "#020202"
LINE = "#030303"
ACCENT = "#040404"
SECOND = "#050505"
_CSS = {TEXT: "--text", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", SECOND: "--second"}
_CSS |= {f"#0{number}0a0a": f"--c{number}" for number in range(3, 8)}
SERIES = (ACCENT, SECOND, *(color for color in _CSS if color.endswith("0a0a")))
"""Colours of several lines of one chart."""
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
_CODE = re.compile(r"`([^`]+)`")
# Parts that matplotlib writes around a drawing and that are removed: the page sets the size and
# needs no header.
_AROUND = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)


def css(color: str) -> str:
    """Return a colour as CSS."""
    return f"var({_CSS[color]})" if color in _CSS else color


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A matplotlib figure with a title and a note. The legend lists the lines that have a label."""

    title: str
    note: str = ""
    figure: Figure
    words: Mapping[str, str] = field(default_factory=dict)
    """Label of a line -> text in the legend."""
    wide: bool = False
    text: str = ""
    """Description of the chart for screen readers."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Return the colours and texts of the legend; empty for a single line without a text."""
        lines = [
            line
            for line in self.figure.axes[0].get_lines()
            if not str(line.get_label()).startswith("_child")
        ]
        named = [(css(str(line.get_color())), str(line.get_label())) for line in lines]
        return [
            (color, self.words.get(name, name)) for color, name in named if self.words or len(named) > 1
        ]


@dataclass(frozen=True, kw_only=True)
class ShownTable:
    """Column heads and rows of a table."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


# Maximum number of rows of a table on a page, which keeps the page small.
_MOST_ROWS = 400


def write_html(path: Path, template: str, **content: Any) -> None:
    """Render ``pages/<template>``, which extends ``page.html.jinja``, to `path`; all content is
    escaped.
    """
    write_text(path, _environment().get_template(template).render(**content))


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty chart of `width` by `height` inches in the page's colours; CSS scales it."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def new_curve_axes() -> tuple[Figure, Axes]:
    """Return an empty chart over the steps of a run."""
    figure, axes = new_axes(3.6, 2.5)
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
    environment.globals["most_rows"] = _MOST_ROWS
    environment.filters |= {"svg": _svg, "marked": _marked}
    return environment


def _marked(line: str) -> Markup:
    """Mark up text between backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(Markup.escape(line))))


def _svg(chart: Chart, number: int) -> Markup:
    """Return the chart as inline SVG; `number` makes its ids unique on the page."""
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        chart.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = _AROUND.sub("", buffer.getvalue())
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{number}-", text[text.index("<svg") :])
    for color, variable in _CSS.items():
        text = text.replace(color, f"var({variable})")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes a viewBox"
    description = Markup.escape(f"{chart.title}: {chart.text or chart.note}".rstrip(": "))
    head = f'<svg {box[0]} role="img" aria-label="{description}">'
    return Markup(head + text[text.index(">") + 1 :])
