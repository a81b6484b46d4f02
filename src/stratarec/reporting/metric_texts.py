"""Format metrics as text, and state the verdict on a run: whether it was still improving, and
whether it is useful.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stratarec.io.names import step_of, visible
from stratarec.models.metrics import METRICS, Z95, Ranked, goodness

INTERVAL = "95 %"
"""Head of a column of `interval`."""

Figures = Mapping[str, Any]
# Maximum number of characters of a value that a line shows.
_WIDEST = 30


def show(value: float | None, digits: int) -> str:
    """Return a value as text with `digits` decimals, or a dash if it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def show_with_interval(figures: Figures, name: str, digits: int) -> str:
    """Return a metric as text, with half the width of its 95 % interval if that is known."""
    error = figures.get(METRICS[name].error)
    return f"{show(figures.get(name), digits)}{'' if error is None else f' +- {Z95 * error:.{digits}f}'}"


def speed_text(samples_per_second: float) -> str:
    """Return the speed of a run as text. The first steps of a run, which compile kernels, are not
    timed.
    """
    return f"{samples_per_second:,.0f} samples/s" if samples_per_second else "not measured: too few steps"


def shown(evaluations: Iterable[Figures]) -> tuple[str, ...]:
    """Return the names of all metrics that have a display name, except user metrics that no
    evaluation contains.
    """
    defined = {name for figures in evaluations for name, value in figures.items() if value is not None}
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.label and (name in defined or not metric.of_users)
    )


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
    """Return a line with predicted and observed rates for each calibration bin; no lines if there
    are no samples.
    """
    output = []
    for name, part in by_label(split, figures):
        rows = part["reliability"] or ()
        if rows:
            output.append(f"{name}: {len(rows)} bins with about the same number of samples")
            output.append(f"  {'samples':>12} {'predicted':>10} {'observed':>10} {INTERVAL:>14}")
        output += [
            f"  {row['samples']:>12,} {row['predicted']:>10.5f} "
            f"{row['observed']:>10.5f} {interval(row):>14}"
            for row in rows
        ]
    return output


def _lines(split: str, figures: Figures) -> Sequence[str]:
    output = [
        f"{split}: {figures['samples']:,} samples, {figures['positives']:,} positive; +- is {INTERVAL}"
    ]
    output += [
        f"  {METRICS[name].label:20} {show_with_interval(figures, name, 6)}" for name in shown([figures])
    ]
    if figures["auc"] is None:
        is_single = figures["positives"] in (0, figures["samples"])
        reason = "a single class" if is_single else "all weights are 0 in one class or both"
        output.append(f"  ({reason}: metrics that compare both classes are not defined)")
    return output


def ranks(split: str, column: str, rankings: Mapping[str, Ranked]) -> Sequence[str]:
    """Return lines with ranking metrics of groups, which are samples with equal `column`.

    Each metric has a line with its mean, its interval and its number of groups.
    """
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
            output_lines.append(
                "  (groups without a positive are left out; for the AUC also those without a negative)"
            )
        if ranked.ungrouped:
            output_lines.append(
                f"  ({ranked.ungrouped:,} samples without a {visible(column)[:_WIDEST]} are in no group)"
            )
    return output_lines


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6f}"


def sliced(name: str, slices: Sequence[tuple[str, Figures]], most: int = 20) -> Sequence[str]:
    """Return a line for each of the first `most` values of a column, and a line with the number of
    other values.
    """
    shown_slices = [(visible(value)[:_WIDEST], figures) for value, figures in slices[:most]]
    width = max(len(name), *(len(value) for value, _ in shown_slices))
    output = [f"{visible(name):{width}} {'samples':>12} {'AUC':>9} {'log loss':>9} {'calibration':>12}"]
    for value, figures in shown_slices:
        numbers = [show(figures[key], 4) for key in ("auc", "log_loss", "calibration")]
        output.append(
            f"{value:{width}} {figures['samples']:>12,} {numbers[0]:>9} {numbers[1]:>9} {numbers[2]:>12}"
        )
    if len(slices) > most:
        output.append(f"and {len(slices) - most:,} more")
    return output


REFITTED = (
    "the model that is used was trained on validation and test samples, too, after the test (train.refit); "
    "all metrics are of the model before"
)
# Minimum predicted gain, as a share of the metric, for which a run is called still improving, and
# the number of further evaluations for which the gain is predicted.
_LEAST_GAIN, _FURTHER = 2e-3, 2
# Minimum number of samples of the rarer class for reliable metrics, and for a choice between
# checkpoints.
_FEW, _TOO_FEW = 100, 20
# Tolerated distance of the calibration from 1: absolute, and in standard errors of the rate of
# positives.
_TOLERANCE, _SURPRISE = 0.05, 3.0
# Tolerated mean error of predictions: as a share of the rate of positives, and as a multiple of the
# error by chance.
_LOCAL_TOLERANCE, _TIMES_CHANCE = 0.1, 2.0


def verdict(
    evaluations: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    train: Mapping[str, Any],
    *,
    odd_split: bool = False,
) -> list[str]:
    """Return the main findings about a finished run, the most severe first. Each is a part of a
    sentence.

    Parameters
    ----------
    evaluations : sequence of mapping
        Evaluations of the validation split during training.
    result : mapping
        Content of ``result.json``.
    train : mapping
        The ``train`` section of the recipe.
    odd_split : bool
        Whether times that were read wrongly could explain the split (`Dataset.odd_split`).
    """
    split, figures = _tested(evaluations, result)
    # The advice is only for runs without calibration: a map fitted on validation may be wrong on
    # later days.
    advice = (
        "; train.calibration=auto may correct that"
        if evaluations and train["calibration"] == "none"
        else ""
    )
    output = []
    for name, part in by_label(split, figures) if figures else ():
        head = "" if name == split else f"{name.removeprefix(split).lstrip(', ')}: "
        output += [f"{head}{line}" for line in _fitness(part, split, advice, odd_split=odd_split)]
    return [
        *output,
        *_calibrated(result),
        *_choice(evaluations, result),
        *_progress(evaluations, step_of(result["checkpoint"]), result["steps"], train),
        *([REFITTED] if train.get("refit") else []),
    ]


def _tested(
    evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> tuple[str, Figures | None]:
    """Return the name and metrics of the test split, or of the validation split if there is no test
    split.
    """
    if result.get("test") is not None:
        return "test", result["test"]
    validation = next((part for part in evaluations if part["step"] == step_of(result["checkpoint"])), None)
    return "validation", result.get("valid", validation)


def _calibrated(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the effect of the calibration of each label."""
    pairs = [
        (by_label("validation" if split == "valid" else split, before), by_label(split, result[split]))
        for split, before in sorted(result.get("uncalibrated", {}).items(), reverse=True)
    ]
    for place, curve in enumerate(result.get("calibration", ())):
        slope = curve["slopes"][0]
        kind = "a shift" if slope == 1 else f"Platt scaling (slope {slope:.2f})"
        kind = kind if len(curve["knots"]) == 1 else "isotonic regression"
        changes = " and ".join(
            f"{before[place][0]} {before[place][1]['log_loss']:.4f} to {after[place][1]['log_loss']:.4f}"
            for before, after in pairs
        )
        yield f"scores are calibrated by {kind}, fitted on validation; log loss: {changes}"


def _choice(evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if the validation split cannot choose between checkpoints."""
    entry = next((part for part in evaluations if part["step"] == step_of(result["checkpoint"])), None)
    if entry is None:
        return
    rarer = _rarer(entry)
    entropy = entry.get("normalized_entropy")
    half = Z95 * (entry.get("entropy_error") or 0.0)
    if rarer >= _TOO_FEW and entropy is not None and entropy <= 1 <= entropy + half:
        yield f"the {entry['samples']:,} validation samples cannot tell the tested step from the base rate"
    if rarer < _TOO_FEW:
        yield (
            f"validation has {entry['samples']:,} samples, {rarer:,} of the rarer class: too few to choose "
            "the step to test; enlarge data.split.valid"
        )


def _rarer(figures: Figures) -> int:
    return int(min(figures["positives"], figures["samples"] - figures["positives"]))


def _progress(
    evaluations: Sequence[Mapping[str, Any]], chosen: int, steps: int, train: Mapping[str, Any]
) -> Iterator[str]:
    metric = train["early_stopping"]["metric"]
    points = [(entry["step"], entry[metric]) for entry in evaluations if entry[metric] is not None]
    if len(points) < 2:
        return
    label, (_, last), value = METRICS[metric].label, points[-1], dict(points)[chosen]
    if chosen < points[-1][0]:
        yield (
            f"validation was best at step {chosen:,} of {steps:,} ({label} {value:.4f}, {last:.4f} at the "
            f"end); the model from step {chosen:,} was tested"
        )
        return
    values = [goodness(metric, part) for _, part in points]
    end = f"at the end, step {steps:,}: {label} {last:.4f} after {points[-2][1]:.4f}"
    falling = any(
        train[part]["schedule"]["kind"] != "constant" and not train[part]["schedule"]["final_factor"]
        for part in ("dense", "embedding")
    )
    if _promise(values) > _LEAST_GAIN * abs(last) and not falling and train["epochs"] > 1:
        yield f"still improving {end}"
    elif falling:
        yield f"best {end}; the learning rate fell to 0, so only a run with more epochs shows whether they help"
    elif train["epochs"] == 1:
        yield f"best {end}; samples were seen once, and only a run with more epochs shows whether they help"
    else:
        yield f"no longer improving {end}"


def _promise(values: Sequence[float]) -> float:
    """Return the gain of further evaluations, if each gain shrinks by the ratio of the last two
    gains.
    """
    gains = [max(after - before, 0.0) for before, after in pairwise(values[-3:])]
    ratio = min(gains[-1] / gains[-2], 1.0) if len(gains) > 1 and gains[-2] else float(len(gains) == 1)
    return gains[-1] * sum(ratio**step for step in range(1, _FURTHER + 1))


def _fitness(figures: Figures, split: str, advice: str, *, odd_split: bool) -> Iterator[str]:
    loss, entropy, ratio = (figures[name] for name in ("log_loss", "normalized_entropy", "calibration"))
    rarer = _rarer(figures)
    if rarer < _FEW:
        yield f"{split} has only {rarer:,} samples of the rarer class: all its figures are uncertain"
    if entropy is None or ratio is None or not figures["positives"]:
        return
    rate = figures["positives"] / figures["samples"]
    constant = f"log loss {loss:.4f}, {loss / entropy:.4f} by always predicting the base rate"
    half = Z95 * (figures.get("entropy_error") or 0.0)
    bounds = f"(95 %: {1 - entropy - half:.1%} to {1 - entropy + half:.1%})"
    if entropy - half > 1:
        check = (
            "first check schema.time and time_format, as above"
            if odd_split
            else "look at features and splits"
        )
        yield f"worse than the base rate: {constant}; predict {rate:.4g} instead, and {check}"
    elif entropy + half >= 1:
        yield f"not better than the base rate by more than chance: {constant}; predicting {rate:.4g} is as good"
    else:
        yield f"better than the base rate: its log loss is {1 - entropy:.1%} lower {bounds}"
    error, noise = figures["calibration_error"], figures["calibration_noise"]
    if abs(ratio - 1) > max(_TOLERANCE, _SURPRISE * math.sqrt((1 - rate) / figures["positives"])):
        yield f"miscalibrated: scores predict {ratio:.2f} times as many positives as there are{advice}"
    elif error > max(_LOCAL_TOLERANCE * rate, _TIMES_CHANCE * noise):
        yield f"miscalibrated: scores are off by {error:.4f} on average, {noise:.4f} of it by chance{advice}"
