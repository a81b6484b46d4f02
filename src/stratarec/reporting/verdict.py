"""What a run's figures say of it, in words: whether it was still getting better, and whether its scores can be used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stratarec.models.metrics import METRICS, goodness
from stratarec.reporting.metric_names import Figures, by_label

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
