"""Metrics in words: what stands under what name, and where one is not defined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stratarec.io.names import visible
from stratarec.models.metrics import METRICS, Ranked, goodness

INTERVAL = "95 %"
"""Head of a column of `interval`."""

Figures = Mapping[str, Any]
# Characters of a value that a line repeats.
_WIDEST = 30


def show(value: float | None, digits: int) -> str:
    """A figure, or a dash where it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def shown(evaluations: Iterable[Figures]) -> tuple[str, ...]:
    """Which figures to show: all but those that need users, where no evaluation has them."""
    known = {name for figures in evaluations for name, value in figures.items() if value is not None}
    return tuple(name for name, metric in METRICS.items() if name in known or not metric.of_users)


def by_label(split: str, figures: Mapping[str, Any]) -> list[tuple[str, Figures]]:
    """The figures of a split under its name; of several labels, those of each under its name, too."""
    labels = figures.get("labels")
    if labels is None:
        return [(split, figures)]
    return [(f"{split}, {visible(name)[:_WIDEST]}", each) for name, each in labels.items()]


def lines(split: str, figures: Mapping[str, Any]) -> Sequence[str]:
    """The figures of a split for the terminal; a dash for what is not defined, and why."""
    return [line for name, each in by_label(split, figures) for line in _lines(name, each)]


def interval(each: Mapping[str, float]) -> str:
    """Where the rate of a bin lies."""
    return f"{each['low']:.4f}-{each['high']:.4f}"


def bins(split: str, figures: Mapping[str, Any]) -> Sequence[str]:
    """What is predicted beside what happens, a line a bin; nothing where there are no samples."""
    found = []
    for name, each in by_label(split, figures):
        rows = each["reliability"] or ()
        if rows:
            found.append(f"{name}: {len(rows)} bins of about as many samples each")
            found.append(f"  {'samples':>12} {'predicted':>10} {'observed':>10} {INTERVAL:>14}")
        found += [
            f"  {row['samples']:>12,} {row['predicted']:>10.5f} {row['observed']:>10.5f} {interval(row):>14}"
            for row in rows
        ]
    return found


def _lines(split: str, figures: Figures) -> Sequence[str]:
    found = [f"{split}: {figures['samples']:,} samples"]
    found += [f"  {METRICS[name].label:20} {show(figures.get(name), 6)}" for name in shown([figures])]
    if figures["auc"] is None:
        found.append(f"  ({figures['positives']:,} of them positive: what compares both classes is not defined)")
    return found


def ranks(split: str, column: str, found: Mapping[str, Ranked]) -> Sequence[str]:
    """How samples are ordered within the values of a column, with intervals; and what is left out."""
    said = []
    for label, each in found.items():
        head = split if len(found) == 1 else f"{split}, {visible(label)[:_WIDEST]}"
        said.append(f"{head} by {visible(column)[:_WIDEST]}: {each.groups:,} groups")
        said.append(f"  {'':20} {'mean':>8} {INTERVAL:>17} of groups")
        said += [
            f"  {name:20} {_number(one.value)} {_number(one.low)}-{_number(one.high)} of {one.groups:,}"
            for name, one in each.figures.items()
        ]
        without = max((one.left_out for one in each.figures.values()), default=0)
        if without:
            said.append("  (groups without a positive are left out; of the AUC those without a negative, too)")
        if each.ungrouped:
            said.append(f"  ({each.ungrouped:,} samples without a {visible(column)[:_WIDEST]} are in no group)")
    return said


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6f}"


def sliced(name: str, slices: Sequence[tuple[str, Figures]], most: int = 20) -> Sequence[str]:
    """A line for each of the first `most` slices of a column, and one for how many are left."""
    shown_slices = [(visible(value)[:_WIDEST], figures) for value, figures in slices[:most]]
    width = max(len(name), *(len(value) for value, _ in shown_slices))
    found = [f"{visible(name):{width}} {'samples':>12} {'AUC':>9} {'log loss':>9} {'calibration':>12}"]
    for value, figures in shown_slices:
        numbers = [show(figures[key], 4) for key in ("auc", "log_loss", "calibration")]
        found.append(f"{value:{width}} {figures['samples']:>12,} {numbers[0]:>9} {numbers[1]:>9} {numbers[2]:>12}")
    if len(slices) > most:
        found.append(f"and {len(slices) - most:,} more")
    return found


# Shares of a metric by which the last evaluation must be better for a run to be called improving.
_LEAST_GAIN = 5e-4
# Log loss over that of the base rate beyond which hardly anything was learned.
_LEARNED = 0.995
# How far from 1 the calibration may be, in itself and in standard errors of the rate of positives.
_TOLERANCE, _SURPRISE = 0.05, 3.0
# As much of the rate of positives, and so many times what is there by chance, may predictions be off on average.
_LOCAL_TOLERANCE, _TIMES_CHANCE = 0.1, 2.0


def verdict(evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any], metric: str) -> list[str]:
    """What to know of a finished run, the worst first; a sentence each.

    Parameters
    ----------
    evaluations : sequence of mapping
        Of the validation split while it trained.
    result : mapping
        What ``result.json`` holds.
    metric : str
        By which validation chose what was tested.
    """
    split, figures = tested(evaluations, result)
    split = "validation" if split == "valid" else split
    advice = "; train.calibration=platt corrects that" if evaluations and "uncalibrated" not in result else ""
    found = []
    for name, each in by_label(split, figures) if figures else ():
        head = "" if name == split else f"{name.removeprefix(split).lstrip(', ')}: "
        found += [f"{head}{said}" for said in _fitness(each, advice)]
    return [*found, *_course(evaluations, _step(result), result["steps"], metric)]


def tested(evaluations: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> tuple[str, Figures | None]:
    """The split that tells how good a run is, and its figures there: of validation where there is no test."""
    if result.get("test") is not None:
        return "test", result["test"]
    return "valid", next((each for each in evaluations if each["step"] == _step(result)), None)


def _step(result: Mapping[str, Any]) -> int:
    """Of the checkpoint that was tested."""
    return int(result["checkpoint"].removeprefix("step-"))


def _course(evaluations: Sequence[Mapping[str, Any]], chosen: int, steps: int, metric: str) -> Iterator[str]:
    known = [(entry["step"], entry[metric]) for entry in evaluations if entry[metric] is not None]
    if len(known) < 2:
        return
    label, (_, last), value = METRICS[metric].label, known[-1], dict(known)[chosen]
    if chosen < known[-1][0]:
        yield f"past its best since step {chosen:,} of {steps:,}: {label} {value:.4f} there, {last:.4f} at the end"
        return
    before = max((each for _, each in known[:-1]), key=lambda each: goodness(metric, each))
    if goodness(metric, last) - goodness(metric, before) > _LEAST_GAIN * abs(before):
        yield f"still improving when it ended, at step {steps:,}: {label} {last:.4f} after {before:.4f}"
    else:
        yield f"level when it ended, at step {steps:,}: {label} {last:.4f} after {before:.4f}"


def _fitness(figures: Figures, advice: str) -> Iterator[str]:
    loss, entropy, ratio = (figures[name] for name in ("log_loss", "normalized_entropy", "calibration"))
    if entropy is None or ratio is None or not figures["positives"]:
        return
    rate = figures["positives"] / figures["samples"]
    error, noise = figures["calibration_error"], figures["calibration_noise"]
    if entropy >= 1:
        yield f"worse than the base rate: log loss {loss:.4f}, always saying the rate has {loss / entropy:.4f}"
    else:
        hardly = "" if entropy < _LEARNED else "hardly "
        yield f"{hardly}better than the base rate: its log loss is {1 - entropy:.1%} lower"
    if abs(ratio - 1) > max(_TOLERANCE, _SURPRISE * math.sqrt((1 - rate) / figures["positives"])):
        yield f"miscalibrated: scores promise {ratio:.2f} times as many positives as there are{advice}"
    elif error > max(_LOCAL_TOLERANCE * rate, _TIMES_CHANCE * noise):
        yield f"miscalibrated: scores are off by {error:.4f} on average, {noise:.4f} of it by chance{advice}"
