"""Metrics in words: what they are called, and what stands where one is not defined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

LABELS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "grouped_auc": "grouped AUC",
}
"""Names of the figures of `Metrics.to_dict`, in the order in which they are shown."""

Figures = Mapping[str, float | None]


def show(value: float | None, digits: int) -> str:
    """A figure, or a dash where it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def shown(evaluations: Iterable[Figures]) -> tuple[str, ...]:
    """Which figures to show: all but the grouped AUC, which needs users, where no evaluation has it."""
    known = any(figures.get("grouped_auc") is not None for figures in evaluations)
    return tuple(name for name in LABELS if name != "grouped_auc" or known)


def lines(split: str, figures: Figures) -> Sequence[str]:
    """The figures of a split for the terminal; a dash for what is not defined, and why."""
    found = [f"{split}: {figures['samples']:,} samples"]
    found += [f"  {LABELS[name]:20} {show(figures[name], 6)}" for name in shown([figures])]
    if figures["auc"] is None:
        found.append(f"  ({figures['positives']:,} of them positive: what compares both classes is not defined)")
    return found
