"""Page of a study of `tune`: its trials, and the metric over the values of each field."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from stratarec.io.names import visible
from stratarec.models.metrics import METRICS, goodness
from stratarec.reporting.html import ACCENT, LINE, MUTED, Chart, ShownTable, new_axes, write_html

Trial = Mapping[str, Any]
"""Fields of `TrialRecord`, and ``run``, the name of its directory."""
_WIDEST = 120
# Most fields with a chart; all are in the table.
_FIELDS = 12


def write_study(path: Path, name: str, metric: str, space: Mapping[str, str], trials: Sequence[Trial]) -> None:
    """Write the page of finished trials; the first one has the recipe's values."""
    label = METRICS[metric].label
    complete = [(place, trial) for place, trial in enumerate(trials) if trial["value"] is not None]
    rows = [
        (
            trial["run"], trial["state"], _last_metric(trial), *(_value(trial["params"][field]) for field in space),
            textwrap.shorten(visible(trial["reason"]), _WIDEST, placeholder="...") or "-",
        )
        for trial in sorted(trials, key=lambda trial: _rank(metric, trial))
    ]  # fmt: skip
    write_html(
        path,
        "study.html.jinja",
        title=f"{name}: {len(trials):,} trials",
        lead=f"compared by validation {label}; the test split was not read",
        verdict=_verdict(metric, complete, len(trials)),
        charts=[_progress(metric, complete), *(_field(metric, field, complete) for field in list(space)[:_FIELDS])]
        if len(complete) > 1
        else [],
        trials=ShownTable(heads=("trial", "ended", label, *space, "why it failed"), rows=rows),
        space=ShownTable(heads=("field", "searched"), rows=list(space.items())),
    )


def _last_metric(trial: Trial) -> str:
    """Return the last validation metric; in parentheses for a trial that was stopped early."""
    if trial["value"] is not None:
        return f"{trial['value']:.5f}"
    return f"({trial['evaluations'][-1]:.5f})" if trial["evaluations"] else "-"


def _value(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rank(metric: str, trial: Trial) -> float:
    return float("inf") if trial["value"] is None else -goodness(metric, trial["value"])


def _verdict(metric: str, complete: Sequence[tuple[int, Trial]], trials: int) -> list[str]:
    if not complete:
        return ["no trial was trained completely"]
    best = min((trial for _, trial in complete), key=lambda trial: _rank(metric, trial))
    values = ", ".join(f"{field} {_value(value)}" for field, value in best["params"].items())
    lines = [f"best: {best['run']}, {METRICS[metric].label} {best['value']:.5f}, with {visible(values)}"]
    if complete[0][0] == 0:
        gain = goodness(metric, best["value"]) - goodness(metric, complete[0][1]["value"])
        lines.append(f"{gain:.5f} better than the recipe's own values" if gain else "no trial beat the recipe's values")
    return [*lines, f"{len(complete):,} of {trials:,} trials were trained completely"]


def _progress(metric: str, complete: Sequence[tuple[int, Trial]]) -> Chart:
    """Draw each trial, and the best so far."""
    places, values = np.array([(place, trial["value"]) for place, trial in complete], dtype=np.float64).T
    figure, axes = new_axes(3.6, 2.5)
    best = np.maximum.accumulate if METRICS[metric].better == "higher" else np.minimum.accumulate
    axes.plot(places, values, label="trial", color=MUTED, marker="o", markersize=3, linestyle="none")
    axes.plot(places, best(values), label="best so far", color=ACCENT, linewidth=1.5)
    axes.set_xlabel("trial")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(color=LINE)
    return Chart(title=f"Validation {METRICS[metric].label}", figure=figure)


def _field(metric: str, field: str, complete: Sequence[tuple[int, Trial]]) -> Chart:
    """Draw trials over the values of a field: numbers to scale, others in equal distances."""
    values = [trial["params"][field] for _, trial in complete]
    metrics = [trial["value"] for _, trial in complete]
    numbers = all(isinstance(value, int | float) for value in values)
    names = [] if numbers else sorted(set(map(str, values)))
    places = [float(value) if numbers else float(names.index(str(value))) for value in values]
    figure, axes = new_axes(3.6, 2.5)
    axes.plot(places, metrics, label=METRICS[metric].label, color=ACCENT, marker="o", markersize=4, linestyle="none")
    if numbers and min(places) > 0 and max(places) > 30 * min(places):
        axes.set_xscale("log")
    if names:
        axes.set_xticks(
            range(len(names)),
            [textwrap.shorten(visible(trial), 14, placeholder="...") for trial in names],
            parse_math=False,
        )
    axes.grid(color=LINE)
    return Chart(title=field, note=f"{METRICS[metric].label} over its values", figure=figure)
