"""Runs side by side, for people: a column each, on the terminal and as a page with their curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex

from stratarec.config.units import readable
from stratarec.io.names import visible
from stratarec.models.metrics import METRICS
from stratarec.reporting.html import Chart, ShownTable, new_course, write_html
from stratarec.reporting.metric_names import by_label, show
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""What `Contest.to_dict` gives."""
Courses = Mapping[str, Sequence[tuple[float, float]]]
"""Run -> (step, value)."""

# Characters of a recipe's value, which may be a list of a hundred features.
_WIDEST = 24
_MARK = "*"


def print_contest(content: Content) -> None:
    """Print a table of figures, one of the recipe's fields that differ, and what the marks mean."""
    console = make_console()
    heads = ("", *_heads(content))
    print_table(console, heads, figures(content), text=("",))
    if content["differences"]:
        print_table(console, ("recipe", *heads[1:]), fields(content), text=("recipe",))
    for line in remarks(content):
        console.print(line)


def write_contest(path: Path, content: Content, losses: Courses, validations: Courses) -> None:
    """Write the tables and the courses of training loss and validation AUC as HTML."""
    heads = _heads(content)
    charts = [
        _courses("Training loss", "smoothed", losses),
        _courses("Validation AUC", "", validations),
    ]
    write_html(
        path,
        "contest.html.jinja",
        title="Runs side by side",
        lead=", ".join(run["run"] for run in content["runs"]),
        charts=[chart for chart in charts if chart is not None],
        figures=ShownTable(heads=("", *heads), rows=figures(content)),
        fields=ShownTable(heads=("recipe", *heads), rows=fields(content)),
        notes=remarks(content),
    )


def _heads(content: Content) -> list[str]:
    """Names of the runs, marked where their data are others."""
    return [f"{run['run']}{_MARK if run['other_data'] else ''}" for run in content["runs"]]


def figures(content: Content) -> list[tuple[str, ...]]:
    """A row for each figure, a column for each run."""
    runs = content["runs"]
    rows = []
    for split, found in (("test", [_test(run) for run in runs]), ("validation", [run["validation"] for run in runs])):
        each = [{} if one is None else dict(by_label(split, one)) for one in found]
        for name in dict.fromkeys(name for one in each for name in one):
            rows += [
                (f"{name}: {metric.label}", *(show(one.get(name, {}).get(key), 5) for one in each))
                for key, metric in METRICS.items()
                if metric.compared and any(one.get(name, {}).get(key) is not None for one in each)
            ]
    return [*rows, *(tuple(row) for row in _costs(runs))]


def _test(run: Content) -> Mapping[str, Any] | None:
    return None if run["result"] is None else run["result"].get("test")


def _costs(runs: Sequence[Content]) -> Iterator[list[str]]:
    yield ["steps", *(f"{run['steps']:,}" for run in runs)]
    yield ["checkpoint", *(f"{run['checkpoint']:,}" for run in runs)]
    yield ["seconds in steps", *(f"{run['seconds']:,.1f}" for run in runs)]
    yield ["samples/s", *(f"{run['samples_per_second']:,.0f}" for run in runs)]
    for name, key in (
        ("tables with state", "table_bytes"),
        ("network", "network_bytes"),
        ("peak memory", "peak_rss_bytes"),
    ):
        yield [name, *("-" if run["result"] is None else readable(run["result"][key]) for run in runs)]


def fields(content: Content) -> list[tuple[str, ...]]:
    """A row for each field of the recipe that differs."""
    return [(name, *map(_short, values)) for name, values in content["differences"].items()]


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def remarks(content: Content) -> list[str]:
    """What must be known before the figures are compared."""
    first, *others = content["runs"]
    found = []
    if any(run["other_data"] for run in others):
        found.append(
            f"{_MARK} trained and tested on other data than {visible(first['run'])}: compare its metrics with care"
        )
    going_on = [visible(run["run"]) for run in content["runs"] if run["result"] is None]
    if going_on:
        found.append(f"not ended, so without a test: {', '.join(going_on)}")
    if not content["differences"]:
        found.append("the recipes are the same")
    return found


def _courses(title: str, note: str, courses: Courses) -> Chart | None:
    """A line for each run that has two points."""
    drawn = {name: np.array(points).T for name, points in courses.items() if len(points) > 1}
    if not drawn:
        return None
    figure, axes = new_course(5.5, 3.2)
    colors = {name: to_hex(mpl.colormaps["tab10"](place % 10)) for place, name in enumerate(courses)}
    for name, (steps, values) in drawn.items():
        axes.plot(steps, values, color=colors[name], linewidth=1.5)
    legend = [(colors[name], name) for name in drawn]
    return Chart(title=title, note=note, figure=figure, legend=legend)
