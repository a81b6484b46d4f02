"""Progress in a notebook: one output that is drawn anew while work lasts, with the curves of a run.

It needs nothing but the IPython that runs the notebook, and keeps what it showed last when the notebook is saved.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stratarec.progress import Progress, SilentProgress
from stratarec.reporting.live.progress_bar import TaskSpeed, eta_text

_DRAW_SECONDS = 1.0
_KEPT_LINES = 4
# Points of a line that are drawn, and the size of a chart, in pixels.
_MOST_POINTS, _WIDTH, _HEIGHT = 200, 360, 130
# What a curve is called, the chart that it is in, and its colour, which is seen on black and on white.
_CURVES = {
    "train/loss": ("training loss", 0, "#3b82c4"),
    "valid/log_loss": ("validation log loss", 0, "#d9730d"),
    "valid/auc": ("validation AUC", 1, "#3b9b5c"),
}

Points = list[tuple[int, float]]


def progress_of_notebook() -> Progress:
    """Curves where a notebook runs this process, else silence."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return NotebookProgress() if shell is not None and hasattr(shell, "kernel") else SilentProgress()


class NotebookProgress:
    """Drawn at most once a second; the curves of a run, where it has some, stay when it has ended."""

    def __init__(self) -> None:
        self._output: Any = None
        self._task, self._unit, self._total, self._done, self._note, self._eta = "", "", 0, 0, "", ""
        self._lines: list[str] = []
        self._points: dict[str, Points] = {}
        self._drawn = 0.0

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self._task, self._unit, self._total, self._done = task, unit, total, done
        self._speed, self._note, self._eta = TaskSpeed(), "", ""
        self._draw(now=True)

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        self._speed.add(time.monotonic(), self._done)
        self._note, self._eta = note, eta_text(self._speed.left(self._total - self._done))
        self._draw()

    def finish(self) -> None:
        self._eta = ""
        self._draw(now=True)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in _CURVES and value == value:
                self._points.setdefault(name, []).append((step, value))
        self._draw()

    def say(self, message: str) -> None:
        self._lines = [*self._lines, message][-_KEPT_LINES:]
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._drawn < _DRAW_SECONDS:
            return
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        shown = HTML(self.html)
        if self._output is None:
            self._output = display(shown, display_id=True)
        else:
            self._output.update(shown)

    @property
    def html(self) -> str:
        """What is shown now."""
        parts = (f"{self._done:,} of {self._total:,} {self._unit}", self._note, self._eta) if self._task else ()
        text = [f"{self._task}: {'  '.join(filter(None, parts))}", *self._lines]
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in text if line.strip(": "))
        charts = [
            _chart([(*_CURVES[name], points) for name, points in self._points.items() if _CURVES[name][1] == number])
            for number in sorted({_CURVES[name][1] for name in self._points})
        ]
        return f'<div style="font: 13px sans-serif">{lines}{"".join(charts)}</div>'


def _chart(curves: Sequence[tuple[str, int, str, Points]]) -> str:
    """Lines over steps, as SVG, with the least and the greatest value beside them."""
    every = [point for *_, points in curves for point in points]
    (first, last), (low, high) = ((min(each), max(each)) for each in zip(*every, strict=True))
    drawn = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{_path(points, first, last, low, high)}"/>'
        for _, _, color, points in curves
    )
    names = "  ".join(f"{name} {points[-1][1]:.5f}" for name, _, _, points in curves)
    legend = "&ensp;".join(
        f'<span style="color: {color}">{html.escape(name)} {points[-1][1]:.5f}</span>'
        for name, _, color, points in curves
    )
    axis = (
        f'<text x="4" y="12">{high:.4g}</text><text x="4" y="{_HEIGHT - 6}">{low:.4g}</text>'
        f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 6}" text-anchor="end">step {last:,}</text>'
    )
    return (
        f'<div style="display: inline-block; max-width: 100%">{legend}<br><svg width="{_WIDTH}" height="{_HEIGHT}" '
        f'style="max-width: 100%" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(names)}">'
        f'<g fill="currentColor" font-size="11" opacity="0.7">{axis}</g>{drawn}</svg></div>'
    )


def _path(points: Points, first: int, last: int, low: float, high: float) -> str:
    """A line within the margins of a chart; of one point a short stroke, which can be seen."""
    step = -(-len(points) // _MOST_POINTS)
    kept = points[::-step][::-1]  # the last one is always there
    across, up = (_WIDTH - 60) / max(last - first, 1), (_HEIGHT - 36) / ((high - low) or 1.0)
    places = [(50 + (x - first) * across, _HEIGHT - 22 - (y - low) * up) for x, y in kept]
    if len(places) == 1:
        places.append((places[0][0] + 4, places[0][1]))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
