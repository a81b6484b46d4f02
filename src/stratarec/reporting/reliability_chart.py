"""Reliability of predictions, drawn: what is predicted beside what happens, by bins with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stratarec.reporting.html import ACCENT, LINE, MUTED, SECOND, Chart, ShownTable, new_axes
from stratarec.reporting.metric_names import INTERVAL, by_label, interval, show

Splits = Mapping[str, Mapping[str, Any]]
"""Split -> the figures of its evaluation, which may lack bins."""
_COLORS = {
    "validation": SECOND,
    "validation, corrected": SECOND,
    "test": ACCENT,
    "test, uncorrected": MUTED,
}
HEADS = ("split", "bin", "samples", "predicted", "observed", INTERVAL)


def charts(splits: Splits) -> Iterator[Chart]:
    """A drawing for each label, with a line for each split that has two bins at least."""
    by_name: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for split, found in splits.items():
        for label, figures in found.get("labels", {"": found}).items():
            if len(figures.get("reliability") or ()) > 1:
                by_name.setdefault(label, []).append((split, figures))
    for label, lines in by_name.items():
        yield _chart(label, lines)


def _chart(label: str, lines: list[tuple[str, Mapping[str, Any]]]) -> Chart:
    figure, axes = new_axes(3.6, 2.5)
    top, said = 1e-3, {}
    for split, figures in lines:
        bins = figures["reliability"]
        x, y, low, high = (np.array([each[name] for each in bins]) for name in ("predicted", "observed", "low", "high"))
        axes.plot(x, y, label=split, color=_COLORS[split], marker="o", markersize=2.5, linewidth=1.2)
        axes.vlines(x, low, high, color=_COLORS[split], linewidth=0.8)
        top = max(top, *x, *high)
        samples = sum(each["samples"] for each in bins) / len(bins)
        error, noise = (show(figures[name], 4) for name in ("calibration_error", "calibration_noise"))
        said[split] = f"{split}: error {error} ({noise} by chance), {len(bins)} bins of some {samples:,.0f} samples"
    top = min(top * 1.05, 1.0)
    axes.plot([0, top], [0, top], color=MUTED, linestyle="--", linewidth=1)
    axes.set(xlabel="predicted click rate", ylabel="observed click rate", xlim=(0, top), ylim=(0, top))
    axes.grid(color=LINE)
    title = f"Calibration, {label}" if label else "Calibration"
    return Chart(title=title, note="intervals of 95 %", figure=figure, words=said)


def table(splits: Splits) -> ShownTable:
    """All bins in numbers."""
    rows = [
        (
            name, f"{number}", f"{each['samples']:,}", f"{each['predicted']:.5f}", f"{each['observed']:.5f}",
            interval(each),
        )
        for split, found in splits.items()
        for name, figures in by_label(split, found)
        for number, each in enumerate(figures.get("reliability") or (), 1)
    ]  # fmt: skip
    return ShownTable(heads=HEADS, rows=rows)
