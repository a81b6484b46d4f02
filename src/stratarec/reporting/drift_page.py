"""Page of a continued run: metrics of each period, drift of its data, and alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.reporting.html import MUTED, SERIES, Chart, ShownTable, new_curve_axes, write_html
from stratarec.reporting.metric_texts import INTERVAL, interval, show

Content = Mapping[str, Any]
"""Output of `Period.to_dict`."""


def write_drift(path: Path, run: str, periods: Sequence[Content], alarming: Sequence[str]) -> None:
    """Write the page of all periods of a continued run, with the alarms of the last period."""
    last = periods[-1]
    rows = [
        (
            f"{period['number']:,}",
            period["file"],
            f"{scores['samples']:,}",
            show(scores["auc"], 5),
            "-" if period["auc"]["low"] is None else interval(period["auc"]),
            show(period["auc"]["before"], 5),
            show(scores["log_loss"], 5),
            show(scores["normalized_entropy"], 5),
            show(scores["calibration"], 3),
        )
        for period in periods
        for scores in (period["scores"]["all"],)
    ]
    heads = (
        "period",
        "log",
        "samples",
        "AUC",
        INTERVAL,
        "seven before",
        "log loss",
        "normalized entropy",
        "calibration",
    )
    write_html(
        path,
        "drift.html.jinja",
        title="Continued run",
        lead=run,
        verdict=alarming or [f"period {last['number']:,}: no alarms"],
        charts=list(_charts(periods)),
        periods=ShownTable(heads=heads, rows=rows),
        kinds=ShownTable(
            heads=("samples of", "share", "AUC", "log loss", "calibration"), rows=list(_kinds(last))
        ),
        lookups=ShownTable(
            heads=("vocabulary", "lookups", "rare", "new", "admitted", "evicted", "rows"),
            rows=list(_lookups(last)),
        ),
        dense=ShownTable(
            heads=("feature", "mean moved by", "deviation", "known"),
            rows=[
                (name, f"{drift['shift']:+.3f}", f"{drift['spread']:.3f}", f"{drift['known']:.1%}")
                for name, drift in last["dense"].items()
            ],
        ),
        number=f"{last['number']:,}",
    )


def _kinds(period: Content) -> Iterator[tuple[str, ...]]:
    samples = period["scores"]["all"]["samples"]
    for name, scores in period["scores"].items():
        if name != "all":
            share = f"{scores['samples'] / max(samples, 1):.1%}"
            figures = (show(scores["auc"], 5), show(scores["log_loss"], 5), show(scores["calibration"], 3))
            yield (f"{name} values", share, *figures)


def _shares(lookups: Content) -> tuple[float, float]:
    """Return the share of lookups of rare values, and the share of lookups of new values."""
    total = max(lookups["known"] + lookups["tail"] + lookups["new"], 1)
    return lookups["tail"] / total, lookups["new"] / total


def _lookups(period: Content) -> Iterator[tuple[str, ...]]:
    for name, figures in period["lookups"].items():
        rare, new = _shares(figures)
        lookups = figures["known"] + figures["tail"] + figures["new"]
        counts = (f"{figures[key]:,}" for key in ("admitted", "evicted", "rows"))
        yield (name, f"{lookups:,}", f"{rare:.1%}", f"{new:.1%}", *counts)


def _charts(periods: Sequence[Content]) -> Iterator[Chart]:
    """Draw curves over the periods; none if there is only one period."""
    if len(periods) < 2:
        return
    scored = [period for period in periods if period["auc"]["low"] is not None]
    if len(scored) > 1:
        ends = {name: [period["auc"][name] for period in scored] for name in ("low", "high")}
        lines = {"AUC": [period["scores"]["all"]["auc"] for period in scored]}
        yield _chart("AUC, with its interval", "", [period["number"] for period in scored], lines, ends)
    numbers = [period["number"] for period in periods]
    ratios = [period["scores"]["all"]["calibration"] for period in periods]
    shown = {"predicted": [np.nan if ratio is None else ratio for ratio in ratios]}
    yield _chart("Calibration", "predicted over observed clicks", numbers, shown)
    names = periods[-1]["lookups"]
    shares = {name: [sum(_shares(period["lookups"][name])) for period in periods] for name in names}
    if shares:
        yield _chart("Lookups without a row", "rare and new values, of all", numbers, shares)


def _chart(
    title: str,
    note: str,
    numbers: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    band: Mapping[str, Sequence[float]] | None = None,
) -> Chart:
    figure, axes = new_curve_axes()
    if band is not None:
        axes.fill_between(numbers, band["low"], band["high"], color=MUTED, alpha=0.25)
    for place, (name, values) in enumerate(lines.items()):
        axes.plot(numbers, values, label=name, color=SERIES[place % len(SERIES)], linewidth=1.5)
    axes.set_xlabel("period")
    text = ", ".join(f"{name} ends at {values[-1]:.4g}" for name, values in lines.items())
    return Chart(title=title, note=note, figure=figure, words={name: name for name in lines}, text=text)
