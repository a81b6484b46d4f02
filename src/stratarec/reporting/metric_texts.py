"""Format metrics as text, and state the verdict on a run: whether it was still improving, and whether it is useful."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stratarec.io.names import step_of, visible
from stratarec.models.metrics import METRICS, Ranked, goodness

INTERVAL = "95 %"
"""Head of a column of `interval`."""

Figures = Mapping[str, Any]
# Maximum number of characters of a value that a line shows.
_WIDEST = 30


def show(value: float | None, digits: int) -> str:
    """Return a value as text with `digits` decimals, or a dash if it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def shown(evaluations: Iterable[Figures]) -> tuple[str, ...]:
    """Return the names of the metrics to show: all, except metrics of users if no evaluation has them."""
    defined = {name for figures in evaluations for name, value in figures.items() if value is not None}
    return tuple(name for name, metric in METRICS.items() if name in defined or not metric.of_users)


def by_label(split: str, figures: Mapping[str, Any]) -> list[tuple[str, Figures]]:
    """Return the name and metrics of a split; with several labels, an entry for each label."""
    labels = figures.get("labels")
    if labels is None:
        return [(split, figures)]
    return [(f"{split}, {visible(name)[:_WIDEST]}", part) for name, part in labels.items()]


def lines(split: str, figures: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics of a split as lines for the terminal; a dash marks undefined metrics."""
    return [line for name, part in by_label(split, figures) for line in _lines(name, part)]


def interval(row: Mapping[str, float]) -> str:
    """Return the confidence interval of a bin's rate of positives as text."""
    return f"{row['low']:.4f}-{row['high']:.4f}"


def bins(split: str, figures: Mapping[str, Any]) -> Sequence[str]:
    """Return a line with predicted and observed rates for each calibration bin; no lines if there are no samples."""
    output = []
    for name, part in by_label(split, figures):
        rows = part["reliability"] or ()
        if rows:
            output.append(f"{name}: {len(rows)} bins of about as many samples each")
            output.append(f"  {'samples':>12} {'predicted':>10} {'observed':>10} {INTERVAL:>14}")
        output += [
            f"  {row['samples']:>12,} {row['predicted']:>10.5f} {row['observed']:>10.5f} {interval(row):>14}"
            for row in rows
        ]
    return output


def _lines(split: str, figures: Figures) -> Sequence[str]:
    output = [f"{split}: {figures['samples']:,} samples"]
    output += [f"  {METRICS[name].label:20} {show(figures.get(name), 6)}" for name in shown([figures])]
    if figures["auc"] is None:
        output.append(f"  ({figures['positives']:,} of them positive: what compares both classes is not defined)")
    return output


def ranks(split: str, column: str, rankings: Mapping[str, Ranked]) -> Sequence[str]:
    """Return lines with ranking metrics within groups of equal `column`, with intervals, and the samples left out."""
    output_lines = []
    for label, ranked in rankings.items():
        head = split if len(rankings) == 1 else f"{split}, {visible(label)[:_WIDEST]}"
        output_lines.append(f"{head} by {visible(column)[:_WIDEST]}: {ranked.groups:,} groups")
        output_lines.append(f"  {'':20} {'mean':>8} {INTERVAL:>17} of groups")
        output_lines += [
            f"  {name:20} {_number(one.value)} {_number(one.low)}-{_number(one.high)} of {one.groups:,}"
            for name, one in ranked.figures.items()
        ]
        without = max((one.left_out for one in ranked.figures.values()), default=0)
        if without:
            output_lines.append("  (groups without a positive are left out; of the AUC those without a negative, too)")
        if ranked.ungrouped:
            output_lines.append(
                f"  ({ranked.ungrouped:,} samples without a {visible(column)[:_WIDEST]} are in no group)"
            )
    return output_lines


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6f}"


def sliced(name: str, slices: Sequence[tuple[str, Figures]], most: int = 20) -> Sequence[str]:
    """Return a line for each of the first `most` values of a column, and a line with the number of other values."""
    shown_slices = [(visible(value)[:_WIDEST], figures) for value, figures in slices[:most]]
    width = max(len(name), *(len(value) for value, _ in shown_slices))
    output = [f"{visible(name):{width}} {'samples':>12} {'AUC':>9} {'log loss':>9} {'calibration':>12}"]
    for value, figures in shown_slices:
        numbers = [show(figures[key], 4) for key in ("auc", "log_loss", "calibration")]
        output.append(f"{value:{width}} {figures['samples']:>12,} {numbers[0]:>9} {numbers[1]:>9} {numbers[2]:>12}")
    if len(slices) > most:
        output.append(f"and {len(slices) - most:,} more")
    return output


# Shares of a metric by which the last evaluation must be better for a run to be called improving.
_LEAST_GAIN = 5e-4
# Log loss over that of the base rate beyond which hardly anything was learned.
_LEARNED = 0.995
# Tolerated distance of the calibration from 1: absolute, and in standard errors of the rate of positives.
_TOLERANCE, _SURPRISE = 0.05, 3.0
# Tolerated mean error of predictions: as a share of the rate of positives, and as a multiple of the error by chance.
_LOCAL_TOLERANCE, _TIMES_CHANCE = 0.1, 2.0


def verdict(evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any], metric: str) -> list[str]:
    """Return the main findings about a finished run, the most severe first. Each is a part of a sentence.

    Parameters
    ----------
    evaluations : sequence of mapping
        Evaluations of the validation split during training.
    result : mapping
        Content of ``result.json``.
    metric : str
        Metric that chose the tested checkpoint.
    """
    split, figures = tested(evaluations, result)
    split = "validation" if split == "valid" else split
    advice = "; train.calibration=platt corrects that" if evaluations and "uncalibrated" not in result else ""
    output = []
    for name, part in by_label(split, figures) if figures else ():
        head = "" if name == split else f"{name.removeprefix(split).lstrip(', ')}: "
        output += [f"{head}{line}" for line in _fitness(part, advice)]
    return [*output, *_progress(evaluations, step_of(result["checkpoint"]), result["steps"], metric)]


def tested(evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> tuple[str, Figures | None]:
    """Return the name and metrics of the test split, or of the validation split if there is no test split."""
    if result.get("test") is not None:
        return "test", result["test"]
    return "valid", next((part for part in evaluations if part["step"] == step_of(result["checkpoint"])), None)


def _progress(evaluations: Sequence[Mapping[str, Any]], chosen: int, steps: int, metric: str) -> Iterator[str]:
    points = [(entry["step"], entry[metric]) for entry in evaluations if entry[metric] is not None]
    if len(points) < 2:
        return
    label, (_, last), value = METRICS[metric].label, points[-1], dict(points)[chosen]
    if chosen < points[-1][0]:
        yield (
            f"validation was best at step {chosen:,} of {steps:,} ({label} {value:.4f}, {last:.4f} at the end); "
            f"the model from step {chosen:,} was tested and saved"
        )
        return
    before = max((part for _, part in points[:-1]), key=lambda part: goodness(metric, part))
    if goodness(metric, last) - goodness(metric, before) > _LEAST_GAIN * abs(before):
        yield f"still improving at the end, step {steps:,}: {label} {last:.4f} after {before:.4f}"
    else:
        yield f"no longer improving at the end, step {steps:,}: {label} {last:.4f} after {before:.4f}"


def _fitness(figures: Figures, advice: str) -> Iterator[str]:
    loss, entropy, ratio = (figures[name] for name in ("log_loss", "normalized_entropy", "calibration"))
    if entropy is None or ratio is None or not figures["positives"]:
        return
    rate = figures["positives"] / figures["samples"]
    error, noise = figures["calibration_error"], figures["calibration_noise"]
    if entropy >= 1:
        yield f"worse than the base rate: log loss {loss:.4f}; always predicting the base rate has {loss / entropy:.4f}"
    else:
        hardly = "" if entropy < _LEARNED else "hardly "
        yield f"{hardly}better than the base rate: its log loss is {1 - entropy:.1%} lower"
    if abs(ratio - 1) > max(_TOLERANCE, _SURPRISE * math.sqrt((1 - rate) / figures["positives"])):
        yield f"miscalibrated: scores predict {ratio:.2f} times as many positives as there are{advice}"
    elif error > max(_LOCAL_TOLERANCE * rate, _TIMES_CHANCE * noise):
        yield f"miscalibrated: scores are off by {error:.4f} on average, {noise:.4f} of it by chance{advice}"
