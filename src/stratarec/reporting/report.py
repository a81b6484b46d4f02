"""One HTML file a run: figures inline, nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stratarec.data.dataset import Dataset
from stratarec.reporting.html import inline_svg, write_html

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{{ name }}</title><style>{{ style }}</style></head><body>
<h1>{{ name }}</h1><p>{{ about }}</p>
<div class="cards">{% for label, value in cards %}<div class="card"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}</div>
<div class="figures">{% for figure in figures %}{{ figure }}{% endfor %}</div>
<h2>Evaluations</h2><table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr class="{{ row[0] }}">
{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<h2>Data</h2><table><tr><th>split</th><th>samples</th><th>click rate</th><th>shards</th></tr>
{% for row in splits %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p>{{ vocabularies }}</p>
<h2>Recipe</h2><pre>{{ recipe }}</pre>
</body></html>
"""
_BLUE, _ORANGE = "#2a6fb0", "#d9772b"
_METRICS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "grouped_auc": "grouped AUC",
}
# Fewer points than this are marked, so that a line between two is not taken for a course.
_MARKED = 30


def write_report(
    path: Path,
    recipe: Mapping[str, Any],
    dataset: Dataset,
    position: Mapping[str, Any],
    result: Mapping[str, Any],
    curve: tuple[NDArray[Any], NDArray[Any]] | None,
) -> None:
    """Write the report of a finished run.

    Parameters
    ----------
    position : mapping
        Losses and evaluations of the run.
    result : mapping
        What ``result.json`` holds.
    curve : tuple of ndarray or None
        Labels and probabilities of the test split.
    """
    test = result.get("test", {})
    rows = [("validation", *_row(entry)) for entry in position["evaluations"]]
    rows += [("test", *_row({"step": result["steps"], **test}))] if test else []
    write_html(
        path,
        _TEMPLATE,
        name=recipe["name"],
        about=f"{recipe['model']['kind']}, {result['steps']:,} steps on {dataset.name}",
        cards=_cards(test, result),
        figures=[inline_svg(figure) for figure in _figures(position, curve)],
        heads=("split", "step", *_METRICS.values()),
        rows=rows,
        splits=[_split(dataset, name) for name in dataset.splits],
        vocabularies=f"{len(dataset.vocabularies)} tables, {sum(dataset.table_rows().values()):,} rows",
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False),
    )


def _row(entry: Mapping[str, float]) -> tuple[str, ...]:
    return (f"{entry['step']:,}", *(f"{entry[name]:.5f}" for name in _METRICS))


def _split(dataset: Dataset, name: str) -> tuple[str, ...]:
    samples = dataset.samples(name)
    rate = f"{dataset.positives[name] / samples:.2%}" if samples else "-"
    return (name, f"{samples:,}", rate, str(len(dataset.shards(name))))


def _cards(test: Mapping[str, float], result: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards = [("test AUC", f"{test['auc']:.5f}"), ("test log loss", f"{test['log_loss']:.5f}")] if test else []
    return [
        *cards,
        ("samples/s", f"{result['samples_per_second']:,.0f}"),
        ("tables with state", f"{result['table_bytes'] / 2**20:,.1f} MiB"),
        ("peak memory", f"{result['peak_rss_bytes'] / 2**20:,.0f} MiB"),
    ]


def _figures(position: Mapping[str, Any], curve: tuple[NDArray[Any], NDArray[Any]] | None) -> list[Figure]:
    figures = []
    if position["losses"]:
        points = np.array(position["losses"])
        figures.append(_line("Training loss (smoothed)", "step", points[:, 0], points[:, 1], _BLUE))
    if len(position["evaluations"]) > 1:
        steps = [entry["step"] for entry in position["evaluations"]]
        figures.append(_line("Validation AUC", "step", steps, [e["auc"] for e in position["evaluations"]], _ORANGE))
    if curve is not None:
        figures.append(_calibration(*curve))
    return figures


def _line(title: str, label: str, x: Any, y: Any, color: str) -> Figure:
    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(x, y, color=color, marker="o" if len(x) < _MARKED else None, markersize=3.5)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _calibration(label: NDArray[Any], probability: NDArray[Any], bins: int = 20) -> Figure:
    """Click rate against prediction, in bins of equally many samples."""
    parts = np.array_split(np.argsort(probability, kind="stable"), bins)
    parts = [part for part in parts if len(part)]
    predicted = [float(probability[part].mean()) for part in parts]
    observed = [float(label[part].mean()) for part in parts]
    figure = _line("Calibration on the test split", "prediction", predicted, observed, _BLUE)
    axes = figure.axes[0]
    top = max(*predicted, *observed, 1e-3) * 1.05
    axes.plot([0, top], [0, top], color="#9aa7b4", linestyle="--", linewidth=1)
    axes.set(ylabel="click rate")
    return figure
