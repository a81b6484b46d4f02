"""Comparison of runs, with a column for each run: on the terminal, and as an HTML page with curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.config.units import format_bytes
from stratarec.io.names import visible
from stratarec.models.metrics import HEADLINES, METRICS, goodness
from stratarec.reporting.html import SERIES, Chart, ShownTable, new_curve_axes, write_html
from stratarec.reporting.metric_texts import by_label, show
from stratarec.reporting.terminal_tables import make_console, print_table

Content = Mapping[str, Any]
"""Output of `RunComparison.to_dict`."""
Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Run -> (step, value)."""

# Maximum number of characters that are shown of a recipe's value, which may be a list of a hundred features.
_WIDEST = 24
_MARK = "*"


def print_contest(content: Content) -> None:
    """Print a table of metrics, a table of the recipe fields that differ, and the meaning of the marks."""
    console = make_console()
    heads = ("", *_heads(content))
    print_table(console, heads, figures(content), text=("",))
    if content["differences"]:
        print_table(console, ("recipe", *heads[1:]), fields(content), text=("recipe",))
    for line in remarks(content):
        console.print(line)


def write_contest(path: Path, content: Content, curves: Mapping[str, Curves]) -> None:
    """Write an HTML page with the tables and a chart for each entry of `curves`, whose keys are the titles."""
    heads = _heads(content)
    charts = [_chart(title, lines) for title, lines in curves.items()]
    write_html(
        path,
        "contest.html.jinja",
        title="Runs side by side",
        lead=", ".join(run["run"] for run in content["runs"]),
        charts=[chart for chart in charts if chart is not None],
        verdict=_verdict(content),
        figures=ShownTable(heads=("figure", *heads), rows=figures(content)),
        fields=ShownTable(heads=("recipe", *heads), rows=fields(content)),
        notes=remarks(content),
    )


def _heads(content: Content) -> list[str]:
    """Return the names of the runs, marked where their data differ."""
    return [f"{run['run']}{_MARK if run['other_data'] else ''}" for run in content["runs"]]


def figures(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each metric or other result, with a column for each run."""
    runs = content["runs"]
    rows = []
    for split, results in (("test", [_test(run) for run in runs]), ("validation", [run["validation"] for run in runs])):
        labels = [{} if one is None else dict(by_label(split, one)) for one in results]
        for name in dict.fromkeys(name for one in labels for name in one):
            rows += [
                (f"{name}: {metric.label}", *(show(one.get(name, {}).get(key), 5) for one in labels))
                for key, metric in METRICS.items()
                if metric.compared and any(one.get(name, {}).get(key) is not None for one in labels)
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
        yield [name, *("-" if run["result"] is None else format_bytes(run["result"][key]) for run in runs)]


def fields(content: Content) -> list[tuple[str, ...]]:
    """Return a row for each field of the recipes that differs between runs."""
    return [(name, *map(_short, values)) for name, values in content["differences"].items()]


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _verdict(content: Content) -> list[str]:
    """Name the best run by each headline metric of the test split, and the fastest run."""
    runs = [run for run in content["runs"] if run["result"] is not None]
    if len(runs) < 2:
        return []
    lines = []
    for name in HEADLINES:
        values = [(value, run["run"]) for run in runs if (value := (_test(run) or {}).get(name)) is not None]
        if len(values) > 1 and name != "calibration":
            values.sort(key=lambda pair: -goodness(name, pair[0]))
            (best, first), (next_best, second) = values[:2]
            label = f"{METRICS[name].label} on the test split"
            gap = abs(best - next_best)
            lines.append(
                f"best {label}: {visible(first)} ({best:.5f}, {gap:.5f} before {visible(second)})"
                if gap >= 5e-6
                else f"the same {label}: {visible(first)} and {visible(second)} ({best:.5f})"
            )
    quick = sorted(runs, key=lambda run: -run["samples_per_second"])
    times = quick[0]["samples_per_second"] / max(quick[1]["samples_per_second"], 1e-9)
    return [
        *lines,
        f"fastest: {visible(quick[0]['run'])}, {times:.2f} times the samples per second of {visible(quick[1]['run'])}",
    ]


def remarks(content: Content) -> list[str]:
    """Return remarks on the comparison, such as runs on different data."""
    first, *others = content["runs"]
    lines = []
    if any(run["other_data"] for run in others):
        lines.append(
            f"{_MARK} trained and tested on different data than {visible(first['run'])}: compare its metrics with care"
        )
    unfinished = [visible(run["run"]) for run in content["runs"] if run["result"] is None]
    if unfinished:
        lines.append(f"not finished, so without a test: {', '.join(unfinished)}")
    if not content["differences"]:
        lines.append("the recipes are the same")
    return lines


def _chart(title: str, curves: Curves) -> Chart | None:
    """Draw a line for each run with at least two points; None if there is no such run."""
    drawn = {name: np.array(points).T for name, points in curves.items() if len(points) > 1}
    if not drawn:
        return None
    figure, axes = new_curve_axes(3.6, 2.5)
    colors = {name: SERIES[place % len(SERIES)] for place, name in enumerate(curves)}
    for name, (steps, values) in drawn.items():
        axes.plot(steps, values, label=name, color=colors[name], linewidth=1.5)
    text = ", ".join(f"{name} ends at {values[-1]:.4g}" for name, (_, values) in drawn.items())
    return Chart(title=title, figure=figure, words={name: name for name in drawn}, text=text)
