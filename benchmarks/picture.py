"""Figures of the README and the documentation: ratios as bars, and curves, from the result
files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

_WIDE = 42


def write_picture(path: Path, ratios: Sequence[tuple[str, float]]) -> None:
    """Draw ratios as bars, the first at the top; 1 means as fast or as large as the baseline.

    Equal ratios give equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stratarec", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 0.55 * len(ratios) + 0.7), layout="constrained")
        axes = figure.add_subplot()
        names = [textwrap.fill(text, _WIDE) for text, _ in ratios]
        values = [value for _, value in ratios]
        positions = range(len(ratios))[::-1]
        colours = ["#2a7f62" if value >= 1 else "#b0763a" for value in values]
        axes.barh(positions, values, color=colours, height=0.6)
        for position, value in zip(positions, values, strict=True):
            axes.text(value + 0.04, position, f"{value:.2f}", va="center", fontsize=9)
        axes.set_yticks(positions, names, fontsize=9)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.set_xlim(0, max(values) * 1.1)
        axes.set_xlabel("relative to the compared library (1: equal)", fontsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        # Readers of dark pages see it, too.
        figure.patch.set_facecolor("white")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def write_curves(
    path: Path,
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[tuple[float, float, float]]]]]],
    across: str,
    up: str,
    level: float | None = None,
    *,
    up_by_log: bool = False,
) -> None:
    """Draw a panel for each title, with named curves of points (x, y, half the height of the error
    bar).

    The x axis is logarithmic, and also the y axis if `up_by_log`. Equal points give equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stratarec", "font.family": "sans-serif"}):
        figure = Figure(figsize=(max(3.1 * len(panels), 5), 2.9), layout="constrained")
        for axes, (title, curves) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            for name, points in curves:
                x, y, error = zip(*points, strict=True)
                axes.errorbar(
                    x,
                    y,
                    yerr=error if any(error) else None,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    label=name,
                )
            if level is not None:
                axes.axhline(level, color="#444444", linewidth=1)
            axes.set_xscale("log", base=2)
            if up_by_log:
                axes.set_yscale("log")
                low, high = axes.get_ylim()
                axes.set_ylim(min(low, 0.5), max(high, 2.0))  # a change of a few percent looks flat
            ticks = sorted({point[0] for point in curves[-1][1]})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(across, fontsize=9)
            axes.tick_params(labelsize=8)
            axes.legend(fontsize=7, frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
        figure.supylabel(up, fontsize=9)
        # Readers of dark pages see it, too.
        figure.patch.set_facecolor("white")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
