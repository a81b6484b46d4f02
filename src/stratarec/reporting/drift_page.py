"""How a run that goes on is doing, for people: what each period was like, what has moved, and what is alarming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.reporting.html import MUTED, SERIES, Chart, ShownTable, new_course, write_html
from stratarec.reporting.metric_texts import INTERVAL, interval, show

Content = Mapping[str, Any]
"""What `Period.to_dict` gives."""


def write_drift(path: Path, run: str, told: Sequence[Content], alarming: Sequence[str]) -> None:
    """Write a page of the periods of a run that were of logs; of the last one also what is `alarming`."""
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
        verdict=alarming or [f"period {last['number']:,}: nothing is alarming"],
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
    if len(told) < 2:
        return
    known = [period for period in told if period["auc"]["low"] is not None]
    if len(known) > 1:
        ends = {name: [each["auc"][name] for each in known] for name in ("low", "high")}
        lines = {"AUC": [each["scores"]["all"]["auc"] for each in known]}
        yield _course("AUC, and what chance gives", "", [each["number"] for each in known], lines, ends)
    numbers = [period["number"] for period in told]
    found = [period["scores"]["all"]["calibration"] for period in told]
    shown = {"predicted": [np.nan if each is None else each for each in found]}
    yield _course("Calibration", "predicted over observed clicks", numbers, shown)
    names = told[-1]["lookups"]
    shares = {name: [sum(_shares(period["lookups"][name])) for period in told] for name in names}
    if shares:
        yield _course("Lookups without a row", "rare and new values, of all", numbers, shares)


def _course(
    title: str, note: str, numbers: Sequence[int], lines: Mapping[str, Sequence[float]],
    band: Mapping[str, Sequence[float]] | None = None,
) -> Chart:  # fmt: skip
    figure, axes = new_course(3.6, 2.5)
    if band is not None:
        axes.fill_between(numbers, band["low"], band["high"], color=MUTED, alpha=0.25)
    for place, (name, values) in enumerate(lines.items()):
        axes.plot(numbers, values, label=name, color=SERIES[place % len(SERIES)], linewidth=1.5)
    axes.set_xlabel("period")
    text = ", ".join(f"{name} ends at {values[-1]:.4g}" for name, values in lines.items())
    return Chart(title=title, note=note, figure=figure, words={name: name for name in lines}, text=text)
