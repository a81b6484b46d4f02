"""What a run's figures say in words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from stratarec.models.metrics import evaluate_logits, figures
from stratarec.reporting.verdict import verdict

LOGITS = np.random.default_rng(1).normal(-1.5, 1.0, 4000)
LABELS = (np.random.default_rng(2).random(4000) < 1 / (1 + np.exp(-LOGITS))).astype(np.float64)


def course(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * place, "log_loss": loss} for place, loss in enumerate(losses, 1)]


def scored(logits: np.ndarray[Any, Any], samples: int = 4000) -> dict[str, Any]:
    return figures({"label": evaluate_logits(LABELS[:samples], logits[:samples])})


GOOD = scored(LOGITS)
CASES: dict[str, tuple[list[dict[str, Any]], int, dict[str, Any], list[str]]] = {
    "improving": (course(0.7, 0.6, 0.5), 30, GOOD, ["still improving when it ended, at step 30: log loss 0.5000"]),
    "level": (course(0.7, 0.5001, 0.5), 30, GOOD, ["level when it ended, at step 30"]),
    "past": (course(0.7, 0.5, 0.6), 20, GOOD, ["past its best since step 20 of 30: log loss 0.5000 there, 0.6000"]),
    "not known at first": (course(None, 0.5, 0.4), 30, GOOD, ["still improving"]),
    "one evaluation": (course(0.5), 10, GOOD, []),
    "no evaluation": ([], 30, GOOD, []),
    "too high": ([], 30, scored(LOGITS + 0.5), [r"miscalibrated: scores promise 1\.\d\d times as many positives"]),
    "too sure": ([], 30, scored((LOGITS + 1.5) * 1.8 - 1.9), ["miscalibrated: scores are off by"]),
    "too few to tell": ([], 30, scored(LOGITS + 0.15, 100), []),
    "constant": ([], 30, scored(np.full(4000, 3.0)), ["worse than the base rate: log loss", "miscalibrated"]),
    "next to nothing": ([], 30, {**GOOD, "normalized_entropy": 0.999}, ["hardly better than the base rate"]),
    "one class": ([], 30, {**GOOD, "normalized_entropy": None}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict(name: str) -> None:
    evaluations, tested, test, expected = CASES[name]
    result = {"checkpoint": f"step-{tested:08d}", "steps": 30, "test": test}
    found = [line for line in verdict(evaluations, result, "log_loss") if not line.startswith("better than the base")]
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert re.match(start, line), line


def test_each_label_has_a_verdict_and_a_correction_is_advised_where_it_can_be_made() -> None:
    bad = scored(np.full(4000, 3.0))
    result = {"checkpoint": "step-00000030", "steps": 30, "test": {**GOOD, "labels": {"click": GOOD, "like": bad}}}
    found = verdict([], result, "log_loss")
    assert [" ".join(line.split()[:2]) for line in found] == ["click: better", "like: worse", "like: miscalibrated:"]
    # A correction is fitted where there is validation, once.
    course = [{"step": 30, **GOOD}]
    assert "calibration=platt" in verdict(course, result, "log_loss")[-1]
    assert "calibration=platt" not in found[-1]
    assert "calibration=platt" not in verdict(course, {**result, "uncalibrated": {}}, "log_loss")[-1]


def test_without_a_test_split_it_is_of_the_validation_of_what_was_kept() -> None:
    evaluations = [{"step": 10, **GOOD}, {"step": 20, **scored(np.full(4000, 3.0))}]
    found = verdict(evaluations, {"checkpoint": "step-00000010", "steps": 20}, "log_loss")
    assert [line.split()[0] for line in found] == ["better", "past"]
