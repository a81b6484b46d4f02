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
