"""Towers with their features and interactions, on the terminal and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.patches import Rectangle

from stratarec.config.units import format_bytes
from stratarec.io.names import visible
from stratarec.reporting.html import TEXT, Chart, ShownTable, new_axes, write_html
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""Output of `TowerPlan.to_dict`."""

_HEADS = ("tower", "features", "bytes", "lookups a batch", "interaction inside", "with others")
# Names of more features are too small to read along the matrix.
_MOST_NAMED = 80
# On no log with fewer training samples did towers keep the AUC of both models (`tower_quality`,
# five seeds, one pass).
_FEW_SAMPLES = 1_000_000


def print_towers(content: Content, training_samples: int) -> None:
    """Print towers on standard output, with a warning if the log has few `training_samples`."""
    console = make_console()
    print_table(console, _HEADS, _rows(content))
    width = min(console.width, 100)
    for number, tower in enumerate(content["towers"]):
        named = visible(", ".join(tower["features"]))
        head = f"tower {number}: "
        for line in textwrap.wrap(named, width, initial_indent=head, subsequent_indent=" " * len(head)):
            console.print(line)
    inside, between = _number(content["inside"]), _number(content["between"])
    console.print()
    console.print(f"interaction of two features: {inside} inside a tower, {between} between towers (mean)")
    console.print(_verdict(content))
    console.print(
        f"interaction: root mean square of a pair's effect on the logit, over {content['samples']:,} "
        f"samples; rank correlation of two halves of the samples: {content['agreement']:.2f}"
    )
    if training_samples < _FEW_SAMPLES:
        console.print(
            f"only {training_samples:,} training samples: below {_FEW_SAMPLES:,}, towers with compression "
            "lost up to 0.006 AUC; use them only if a run without towers is not better"
        )


def write_towers_report(path: Path, name: str, content: Content) -> None:
    """Write the towers, and the matrix of interactions in their order, as HTML."""
    cards = [
        ("towers", f"{len(content['towers'])}"),
        ("interaction inside a tower", _number(content["inside"])),
        ("interaction between towers", _number(content["between"])),
    ]
    named = [(f"{number}", ", ".join(tower["features"])) for number, tower in enumerate(content["towers"])]
    write_html(
        path,
        "towers.html.jinja",
        title=f"{name}: towers of features",
        lead=_verdict(content),
        cards=cards,
        charts=[_matrix(content)],
        towers=ShownTable(heads=_HEADS, rows=_rows(content)),
        members=ShownTable(heads=("tower", "its features"), rows=named),
        text=("its features",),
    )


def _verdict(content: Content) -> str:
    """Say whether the towers follow interactions, and how sure this is."""
    share = (
        f"{content['chance']:.2%} of random towers interact as strongly, "
        "on samples that the towers were not made from"
    )
    if content["structure"]:
        return f"structure found: {share}"
    return f"no structure found, so the towers only balance lookups and bytes: {share}"


def _rows(content: Content) -> list[tuple[str, ...]]:
    between = _between(content)
    return [
        (
            f"{number}",
            f"{len(tower['features'])}",
            format_bytes(tower["bytes"]),
            f"{tower['lookups']:,.0f}",
            _number(between[number, 0]),
            _number(between[number, 1]),
        )
        for number, tower in enumerate(content["towers"])
    ]


def _between(content: Content) -> Any:
    """Return ``[T, 2]``: for each tower the mean interaction among its features, and with other
    features.
    """
    places = {name: place for place, name in enumerate(content["features"])}
    matrix = np.array(content["interaction"])
    means = np.full((len(content["towers"]), 2), np.nan)
    for number, tower in enumerate(content["towers"]):
        mine = np.isin(np.arange(len(matrix)), [places[name] for name in tower["features"]])
        for column, others in enumerate((mine, ~mine)):
            pairs = mine[:, None] & others[None] & ~np.eye(len(matrix), dtype=bool)
            if pairs.any():
                means[number, column] = matrix[pairs].mean()
    return means


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _matrix(content: Content) -> Chart:
    """Draw the interactions of all features, with a frame around each tower."""
    names = [name for tower in content["towers"] for name in tower["features"]]
    places = [content["features"].index(name) for name in names]
    values = np.array(content["interaction"])[np.ix_(places, places)]
    np.fill_diagonal(values, np.nan)  # left out
    figure, axes = new_axes(7.2, 6.2)
    # Otherwise a few outliers would give all other cells the same colour.
    low, high = np.nanquantile(values, (0.02, 0.98)) if len(names) > 1 else (0.0, 1.0)
    image = axes.imshow(
        values, cmap=mpl.colormaps["viridis"], vmin=low, vmax=max(high, low + 1e-9), aspect="equal"
    )
    first = 0
    for tower in content["towers"]:
        size = len(tower["features"])
        frame = Rectangle(
            (first - 0.5, first - 0.5), size, size, fill=False, edgecolor="#d7301f", linewidth=1.5
        )
        axes.add_patch(frame)
        first += size
    _name(axes, names)
    bar = figure.colorbar(image, ax=axes, shrink=0.7)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=TEXT)
    return Chart(
        title="How features interact",
        note="tower after tower; a frame is a tower",
        figure=figure,
        wide=True,
    )


def _name(axes: Any, names: Sequence[str]) -> None:
    """Label both axes with the features, if these are readable."""
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if len(names) > _MOST_NAMED:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    short = [textwrap.shorten(visible(name), 24, placeholder="...") or visible(name)[:24] for name in names]
    size = min(8.0, 260 / max(len(names), 1))
    axes.set_xticks(range(len(names)), short, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(names)), short, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
