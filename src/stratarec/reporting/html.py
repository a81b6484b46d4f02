"""HTML files that load nothing from elsewhere: their look, figures inline, written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from stratarec.files import write_atomic

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0 }
.card { background: #f3f6f9; border-radius: .5rem; padding: .7rem 1.1rem; min-width: 8rem }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums } .card span { color: #5b6b7b }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #e3e8ed }
td:first-child, th:first-child { text-align: left }
.figures { display: flex; flex-wrap: wrap; gap: 1rem } .figures svg { width: 31rem; height: auto; max-width: 100% }
pre { background: #f3f6f9; padding: 1rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem }
"""


def write_html(path: Path, template: str, **content: Any) -> None:
    """Render a Jinja `template`, which finds `STYLE` as ``style``, to `path`."""
    text = jinja2.Environment(autoescape=True).from_string(template).render(style=_markup(STYLE), **content)

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def inline_svg(figure: Figure) -> Any:
    """The figure as inline SVG, marked as HTML of our own making."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stratarec"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return _markup(text[text.index("<svg") :])


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)
