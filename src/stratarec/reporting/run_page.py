"""Write the report of a run as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.io.names import step_of
from stratarec.models.metrics import METRICS, headlines
from stratarec.reporting.explain_page import importance_sections
from stratarec.reporting.html import (
    ACCENT,
    LINE,
    MUTED,
    SECOND,
    Chart,
    ShownTable,
    new_axes,
    new_curve_axes,
    write_html,
)
from stratarec.reporting.metric_texts import (
    INTERVAL,
    by_label,
    interval,
    show,
    show_with_interval,
    shown,
    verdict,
)
from stratarec.reporting.plan_page import COMPARED, cached_tables, comparison_rows, level0_of, levels
from stratarec.reporting.step_time import MeasuredStep, predicted_times

# Curves with fewer points have marks at the points, so that a line between two points is not
# mistaken for data.
_MARKED = 30


def write_report(
    path: Path,
    recipes: tuple[Mapping[str, Any], Mapping[str, Any]],
    dataset: Dataset,
    position: Mapping[str, Any],
    result: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
    importance: Mapping[str, Any] | str = "",
) -> None:
    """Write the report of a finished run.

    Parameters
    ----------
    recipes : tuple of mapping
        All fields of the recipe, and path -> value of the fields that differ from their defaults.
    position : mapping
        Losses, evaluations and times of the run.
    result : mapping
        Content of ``result.json``.
    plan : mapping or None
        Plan of the tables, from `Plan.to_dict`.
    importance : mapping or str
        Importance of features, from `stratarec explain --json`, or the reason why there is none.
    """
    recipe, chosen = recipes
    splits, metric = _splits(position, result), recipe["train"]["early_stopping"]["metric"]
    shown_metrics = dict.fromkeys((metric, "log_loss", "auc"))
    drawings = (
        _loss(position),
        *(_validation(position, name, step_of(result["checkpoint"])) for name in shown_metrics),
        *reliability_charts(splits),
        _throughput(position),
    )
    charts = [chart for chart in drawings if chart is not None]
    time, cached = MeasuredStep.of(position), bool(result["caches"])
    level0 = "dram" if plan is None else level0_of(plan)
    write_html(
        path,
        "run.html.jinja",
        title=recipe["name"],
        lead=f"{recipe['model']['kind']}, {result['steps']:,} steps on {dataset.name}",
        verdict=[
            *dataset.suspicions,
            *verdict(position["evaluations"], result, recipe["train"], odd_split=bool(dataset.odd_split)),
            *(f"baselines: {sentence}" for sentence in result["baselines"]),
            *([] if time is None else time.verdict(cached, result.get("sharing", ""), level0)),
        ],
        cards=_cards(result.get("test"), result),
        charts=charts,
        notes=[*_notes(recipe, position, result), *_without(importance)],
        levels=levels(plan, result["parts"], result["caches"]),
        planned=[] if plan is None else plan["notes"],
        caches=cached_tables(plan, result["caches"]),
        time=time,
        times=predicted_times(plan, time),
        ranks=_ranks(result),
        chosen=ShownTable(
            heads=("field", "value"), rows=[(name, _value(value)) for name, value in chosen.items()]
        ),
        evaluations=_tested(position, result),
        earlier=_others(position, result),
        members=_members(recipe["model"], position, result),
        reliability=reliability_table(splits),
        importance=[] if isinstance(importance, str) else importance_sections(importance),
        splits=ShownTable(
            heads=("split", "samples", " and ".join(_rates(dataset)), "shards"),
            rows=[_split(dataset, n) for n in dataset.splits],
        ),
        vocabularies=f"{len(dataset.vocabularies)} tables, {sum(dataset.table_rows().values()):,} rows",
        memory=ShownTable(heads=COMPARED, rows=comparison_rows(result["memory"])),
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True),
    )


def _cards(test: Mapping[str, Any] | None, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards = []
    for name, figures in by_label("test", test) if test else []:
        cards += [(f"{name} {METRICS[key].label}", show(figures[key], 5)) for key in headlines()]
    return [
        *cards,
        ("samples/s", f"{result['samples_per_second']:,.0f}" if result["samples_per_second"] else "-"),
        (f"{_memories(result)} for tables and optimizer state", format_bytes(result["table_bytes"])),
        ("activations of the embedding layer", format_bytes(result["output_bytes"])),
        ("network", format_bytes(result["network_bytes"])),
        ("peak memory of the process", format_bytes(result["peak_rss_bytes"])),
    ]


def _memories(result: Mapping[str, Any]) -> str:
    return "GPU memory and DRAM" if any(row["memory"] == "hbm" for row in result["memory"]) else "DRAM"


def _notes(
    recipe: Mapping[str, Any], position: Mapping[str, Any], result: Mapping[str, Any]
) -> Iterator[str]:
    """Yield notes: what the page lacks and why, and whether the run can be reproduced to the
    bit.
    """
    if len(position["losses"]) < 2:
        yield (
            "No curve of the training loss: there is a point every train.log_every = "
            f"{recipe['train']['log_every']} steps, and this run had {result['steps']:,}."
        )
    if not position["evaluations"]:
        yield "The model was not validated while it trained."
    if "exchange" in result:
        yield f"{result['exchange'].capitalize()}."
    for step, reason in position.get("may_differ", ()):
        yield f"Another run of this recipe may differ in its last bits from step {step:,} on: {reason}."
    if "test" not in result:
        yield "The data set has no test split."
    if "valid" in result:
        yield (
            f"Probabilities are corrected ({_correction(recipe['train'])}), as fitted on the validation "
            "split. Corrected metrics of that split are computed on the samples of the fit."
        )


def _without(importance: Mapping[str, Any] | str) -> list[str]:
    if not isinstance(importance, str) or not importance:
        return []
    return [f"Feature importance was not measured, because {importance}: run `stratarec explain`."]


def _correction(train: Mapping[str, Any]) -> str:
    """Return a text about the recipe field that makes the run correct its logits."""
    if train["calibration"] != "none":
        return f"train.calibration = {train['calibration']}"
    return "one shift of all logits, as train.class_weight requires"


def _tested(position: Mapping[str, Any], result: Mapping[str, Any]) -> ShownTable:
    """Return a table of the evaluations of the tested checkpoint: a row for each metric, which fits
    every window.
    """
    tested = step_of(result["checkpoint"])
    evaluations = [("validation", entry) for entry in position["evaluations"] if entry["step"] == tested]
    columns = [
        part
        for split, entry in [*evaluations, *_outcome(result).items()]
        for part in by_label(split, entry)
    ]
    return ShownTable(
        heads=("metric", *(split for split, _ in columns)),
        rows=[
            (METRICS[name].label, *(show_with_interval(figures, name, 5) for _, figures in columns))
            for name in shown(figures for _, figures in columns)
            if columns
        ],
    )


def _others(position: Mapping[str, Any], result: Mapping[str, Any]) -> ShownTable:
    """Return a table of the validation evaluations of all other checkpoints."""
    tested = step_of(result["checkpoint"])
    rows = [
        (name, entry["step"], figures)
        for entry in position["evaluations"]
        if entry["step"] != tested
        for name, figures in by_label("validation", entry)
    ]
    names = shown(figures for _, _, figures in rows)
    return ShownTable(
        heads=("split", "step", *(METRICS[name].label for name in names)),
        rows=[
            (split, f"{step:,}", *(show(figures.get(name), 5) for name in names))
            for split, step, figures in rows
        ],
    )


def _members(
    model: Mapping[str, Any], position: Mapping[str, Any], result: Mapping[str, Any]
) -> ShownTable:
    """Return the members of the tested ensemble; no rows for other models."""
    entry: dict[str, Any] = next(
        (one for one in position["evaluations"] if one["step"] == step_of(result["checkpoint"])), {}
    )
    networks = [kind for kind in model.get("member_kinds", ()) for _ in range(2)]
    members = entry.get("members", ())
    kinds = [networks[member % len(networks)] for member in range(model.get("members", 0))] + [
        "trees"
    ] * len(members)
    return ShownTable(
        heads=("member", "kind", "step", METRICS["log_loss"].label, "weight"),
        rows=[
            (f"{member + 1}", kind, f"{one['step']:,}", f"{one['log_loss']:.5f}", f"{one['weight']:.3f}")
            for member, (kind, one) in enumerate(zip(kinds, members, strict=False))
        ],
    )


def _outcome(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the evaluations at the end of the run."""
    evaluations = {
        "validation, corrected": result.get("valid"),
        "test, uncorrected": result.get("uncalibrated", {}).get("test"),
        "test": result.get("test"),
    }
    return {split: figures for split, figures in evaluations.items() if figures is not None}


def _splits(position: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the evaluations of the tested checkpoint."""
    tested = [entry for entry in position["evaluations"] if entry["step"] == step_of(result["checkpoint"])]
    evaluations = _outcome(result)
    return evaluations if "valid" in result or not tested else {"validation": tested[-1], **evaluations}


def _rates(dataset: Dataset) -> list[str]:
    """Return the column heads for the shares of positive samples."""
    labels = dataset.schema.labels and dataset.schema.label_columns
    return [f"rate of {name}" for name in labels] or ["click rate"]


def _split(dataset: Dataset, name: str) -> tuple[str, ...]:
    samples = dataset.samples(name)
    counts = dataset.label_counts(name).values()
    rate = ", ".join(f"{count.positives / count.known:.2%}" if count.known else "-" for count in counts)
    return (name, f"{samples:,}", rate, str(len(dataset.shards(name))))


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ranks(result: Mapping[str, Any]) -> ShownTable:
    """Return a table with a row for each rank."""
    rows = []
    for rank, counts in enumerate(result.get("ranks", ())):
        exposed, hidden = counts["exposed_seconds"], counts["hidden_seconds"]
        rows.append(
            (
                f"{rank}",
                *(format_bytes(counts[name]) for name in ("table_bytes", "peak_rss_bytes", "sent_bytes")),
                f"{exposed / max(counts['step_seconds'], 1e-9):.0%}",
                f"{hidden / max(exposed + hidden, 1e-9):.0%}",
            )
        )
    return ShownTable(
        heads=("rank", "tables", "peak memory", "sent", "of its time waiting", "hidden"), rows=rows
    )


def _throughput(position: Mapping[str, Any]) -> Chart | None:
    """Draw the samples per second between points of the loss curve."""
    steps, seconds, samples = np.array([(0, 0.0, 0), *position["paces"]], dtype=np.float64).T
    # The first step of a process is not timed.
    timed = np.diff(seconds) > 0
    if timed.sum() < 2:
        return None
    rates = np.diff(samples)[timed] / np.diff(seconds)[timed]
    chart = _curve("Throughput", "samples/s", steps[1:][timed], rates, ACCENT)
    axes = chart.figure.axes[0]
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return chart


def _loss(position: Mapping[str, Any]) -> Chart | None:
    if len(position["losses"]) < 2:
        return None
    steps, losses = np.array(position["losses"], dtype=np.float64).T
    return _curve("Training loss", "smoothed", steps, losses, ACCENT)


def _validation(position: Mapping[str, Any], metric: str, tested: int) -> Chart | None:
    """Draw a validation metric over the steps, with a mark at the tested checkpoint."""
    points = [
        (entry["step"], entry[metric]) for entry in position["evaluations"] if entry[metric] is not None
    ]
    if len(points) < 2:
        return None
    steps, values = np.array(points, dtype=np.float64).T
    chart = _curve(
        f"Validation {METRICS[metric].label}", f"tested at step {tested:,}", steps, values, SECOND
    )
    chart.figure.axes[0].axvline(tested, color=MUTED, linestyle="--", linewidth=1)
    return chart


def _curve(
    title: str, note: str, steps: NDArray[np.float64], values: NDArray[np.float64], color: str
) -> Chart:
    figure, axes = new_curve_axes()
    _draw(axes, title, steps, values, color)
    text = (
        f"{note}; from {values[0]:.4g} at step {steps[0]:,.0f} to {values[-1]:.4g} at step {steps[-1]:,.0f}"
    )
    return Chart(title=title, note=note, figure=figure, text=text)


def _draw(
    axes: Axes, name: str, steps: NDArray[np.float64], values: NDArray[np.float64], color: str
) -> None:
    marker = "o" if len(steps) < _MARKED else None
    axes.plot(steps, values, label=name, color=color, marker=marker, markersize=3, linewidth=1.5)


SplitFigures = Mapping[str, Mapping[str, Any]]
"""Split -> its metrics, with or without calibration bins."""
_SPLIT_COLORS = {
    "validation": SECOND,
    "validation, corrected": SECOND,
    "test": ACCENT,
    "test, uncorrected": MUTED,
}
_RELIABILITY_HEADS = ("split", "bin", "samples", "predicted", "observed", INTERVAL)


def reliability_charts(splits: SplitFigures) -> Iterator[Chart]:
    """Draw a chart for each label, with a line for each split that has at least two bins."""
    by_name: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for split, evaluation in splits.items():
        for label, figures in evaluation.get("labels", {"": evaluation}).items():
            if len(figures.get("reliability") or ()) > 1:
                by_name.setdefault(label, []).append((split, figures))
    for label, lines in by_name.items():
        yield _reliability_chart(label, lines)


def _reliability_chart(label: str, lines: list[tuple[str, Mapping[str, Any]]]) -> Chart:
    figure, axes = new_axes(3.6, 2.5)
    top, words = 1e-3, {}
    for split, figures in lines:
        bins = figures["reliability"]
        x, y, low, high = (
            np.array([row[name] for row in bins]) for name in ("predicted", "observed", "low", "high")
        )
        axes.plot(x, y, label=split, color=_SPLIT_COLORS[split], marker="o", markersize=2.5, linewidth=1.2)
        axes.vlines(x, low, high, color=_SPLIT_COLORS[split], linewidth=0.8)
        top = max(top, *x, *high)
        samples = sum(row["samples"] for row in bins) / len(bins)
        error, noise = (show(figures[name], 4) for name in ("calibration_error", "calibration_noise"))
        words[split] = (
            f"{split}: error {error} ({noise} by chance), {len(bins)} bins of about {samples:,.0f} samples"
        )
    top = min(top * 1.05, 1.0)
    axes.plot([0, top], [0, top], color=MUTED, linestyle="--", linewidth=1)
    axes.set(xlabel="predicted click rate", ylabel="observed click rate", xlim=(0, top), ylim=(0, top))
    axes.grid(color=LINE)
    title = f"Calibration, {label}" if label else "Calibration"
    return Chart(title=title, note="intervals of 95 %", figure=figure, words=words)


def reliability_table(splits: SplitFigures) -> ShownTable:
    """Return a table with the numbers of all calibration bins."""
    rows = [
        (
            name, f"{number}", f"{row['samples']:,}", f"{row['predicted']:.5f}", f"{row['observed']:.5f}",
            interval(row),
        )
        for split, evaluation in splits.items()
        for name, figures in by_label(split, evaluation)
        for number, row in enumerate(figures.get("reliability") or (), 1)
    ]  # fmt: skip
    return ShownTable(heads=_RELIABILITY_HEADS, rows=rows)
