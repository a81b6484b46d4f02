"""How a run that goes on is doing, for people: what each period was like, what has moved, and what is alarming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.reporting.html import ACCENT, MUTED, SERIES, Chart, ShownTable, css, new_course, write_html
from stratarec.reporting.metric_names import INTERVAL, interval, show

Content = Mapping[str, Any]
"""What `Period.to_dict` gives."""

# Deviations by which the mean of a feature has moved that are worth a line.
_MOVED = 0.5


def alarms(period: Content) -> list[str]:
    """What is not as it was: an AUC below that of the periods before by more than chance gives, means that moved."""
    auc, found = period["auc"], []
    if auc["before"] is not None and auc["high"] is not None and auc["high"] < auc["before"]:
        area = show(period["scores"]["all"]["auc"], 5)
        found.append(
            f"AUC is {area} and was {auc['before']:.5f} in the periods before; by chance it is {auc['low']:.5f} to "
            f"{auc['high']:.5f} here"
        )
    for name, drift in period["dense"].items():
        if abs(drift["shift"]) > _MOVED:
            found.append(f"{name}: its mean has moved by {drift['shift']:+.1f} deviations since the run's first log")
    return found


def write_drift(path: Path, run: str, told: Sequence[Content]) -> None:
    """Write a page of the periods of a run that were of logs."""
    last = told[-1]
    rows = [
        (
            f"{period['number']:,}", period["file"], f"{whole['samples']:,}", show(whole["auc"], 5),
            "-" if period["auc"]["low"] is None else interval(period["auc"]), show(period["auc"]["before"], 5),
            show(whole["log_loss"], 5), show(whole["normalized_entropy"], 5), show(whole["calibration"], 3),
        )
        for period in told
        for whole in (period["scores"]["all"],)
    ]  # fmt: skip
    heads = (
        "period", "log", "samples", "AUC", INTERVAL, "seven before", "log loss", "normalized entropy", "calibration",
    )  # fmt: skip
    write_html(
        path,
        "drift.html.jinja",
        title="A run that goes on",
        lead=run,
        verdict=alarms(last) or [f"period {last['number']:,}: nothing is alarming"],
        charts=list(_charts(told)),
        periods=ShownTable(heads=heads, rows=rows),
        kinds=ShownTable(heads=("samples of", "share", "AUC", "log loss", "calibration"), rows=list(_kinds(last))),
        lookups=ShownTable(
            heads=("vocabulary", "lookups", "rare", "new", "admitted", "evicted", "rows"), rows=list(_lookups(last))
        ),
        dense=ShownTable(
            heads=("feature", "mean moved by", "deviation", "known"),
            rows=[
                (name, f"{each['shift']:+.3f}", f"{each['spread']:.3f}", f"{each['known']:.1%}")
                for name, each in last["dense"].items()
            ],
        ),
        number=f"{last['number']:,}",
    )


def _kinds(period: Content) -> Iterator[tuple[str, ...]]:
    whole = period["scores"]["all"]["samples"]
    for name, found in period["scores"].items():
        if name != "all":
            share = f"{found['samples'] / max(whole, 1):.1%}"
            figures = (show(found["auc"], 5), show(found["log_loss"], 5), show(found["calibration"], 3))
            yield (f"{name} values", share, *figures)


def _shares(found: Content) -> tuple[float, float]:
    """Lookups of rare values, and of new ones, of all."""
    total = max(found["known"] + found["tail"] + found["new"], 1)
    return found["tail"] / total, found["new"] / total


def _lookups(period: Content) -> Iterator[tuple[str, ...]]:
    for name, found in period["lookups"].items():
        rare, new = _shares(found)
        lookups = found["known"] + found["tail"] + found["new"]
        counts = (f"{found[key]:,}" for key in ("admitted", "evicted", "rows"))
        yield (name, f"{lookups:,}", f"{rare:.1%}", f"{new:.1%}", *counts)


def _charts(told: Sequence[Content]) -> Iterator[Chart]:
    """Courses over the periods, of which there are two at least."""
    numbers = [period["number"] for period in told]
    if len(told) < 2:
        return
    known = [period for period in told if period["auc"]["low"] is not None]
    if len(known) > 1:
        x = [period["number"] for period in known]
        area = [period["scores"]["all"]["auc"] for period in known]
        figure, axes = new_course(3.6, 2.5)
        low, high = ([each["auc"][end] for each in known] for end in ("low", "high"))
        axes.fill_between(x, low, high, color=MUTED, alpha=0.25)
        axes.plot(x, area, color=ACCENT, linewidth=1.5)
        axes.set_xlabel("period")
        text = f"AUC ends at {area[-1]:.4f}"
        yield Chart(title="AUC, and what chance gives", figure=figure, legend=[(css(ACCENT), "AUC")], text=text)
    figure, axes = new_course(3.6, 2.5)
    found = [period["scores"]["all"]["calibration"] for period in told]
    axes.plot(numbers, [np.nan if each is None else each for each in found], color=ACCENT, linewidth=1.5)
    axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1)
    axes.set_xlabel("period")
    yield Chart(title="Calibration", note="predicted over observed clicks", figure=figure, text=show(found[-1], 3))
    figure, axes = new_course(3.6, 2.5)
    legend = []
    for place, name in enumerate(told[-1]["lookups"]):
        shares = [sum(_shares(period["lookups"][name])) for period in told]
        color = SERIES[place % len(SERIES)]
        axes.plot(numbers, shares, color=color, linewidth=1.5)
        legend.append((css(color), name))
    axes.set_xlabel("period")
    if legend:
        yield Chart(title="Lookups without a row", note="rare and new values, of all", figure=figure, legend=legend)
