"""Test the verdict on a run: its conclusions, and how many samples they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from stratarec.models.calibration import LogitMap
from stratarec.models.metrics import evaluate_logits
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.metric_texts import verdict

STEPS = 100


def figures(samples: int, slope: float, *, rate: float = 0.3, scale: float = 1.0) -> dict[str, Any]:
    """Return the metrics of scores with information `slope` whose logits are `scale` times too
    large.
    """
    draws = np.random.default_rng(0)
    logit = slope * draws.normal(size=samples) + np.log(rate / (1 - rate))
    label = (draws.random(samples) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    return evaluate_logits(label, logit * scale).to_dict()


def verdict_of(
    test: dict[str, Any], losses: Sequence[float] = (), *, train: TrainConfig | None = None, **result: Any
) -> str:
    """Return the verdict on a run with these test metrics and validation log losses."""
    evaluations = [
        {**test, "step": STEPS * place, "log_loss": loss} for place, loss in enumerate(losses, 1)
    ]
    chosen = STEPS * (int(np.argmin(losses)) + 1 if losses else 1)
    content = {"test": test, "checkpoint": f"step-{chosen:08d}", "steps": STEPS * len(losses), **result}
    section = asdict(train or TrainConfig())
    return "\n".join(verdict(evaluations, content, section))


def test_better_than_the_base_rate_requires_more_than_chance() -> None:
    assert "better than the base rate: " in verdict_of(figures(5_000, 1.0))
    assert "not better" in verdict_of(figures(5_000, 0.0))
    assert "not better" in verdict_of(figures(300, 0.05))
    worse = figures(5_000, 0.3, scale=6.0)
    assert "worse than the base rate" in verdict_of(worse)
    odd = verdict(
        [],
        {"test": worse, "checkpoint": "step-00000001", "steps": 1},
        asdict(TrainConfig()),
        odd_split=True,
    )
    assert "check schema.time and time_format" in odd[0]


def test_few_samples_of_a_class_give_no_verdict() -> None:
    few = figures(500, 1.0, rate=0.01)
    assert f"only {few['positives']} samples" in verdict_of(few)
    assert "too few to choose" in verdict_of(few, [0.5, 0.4])
    assert "too few" not in verdict_of(figures(5_000, 1.0), [0.5, 0.4])
    assert "validation samples cannot" in verdict_of(figures(300, 0.05), [0.7, 0.6])
    assert "validation samples cannot" not in verdict_of(figures(5_000, 1.0), [0.7, 0.6])


@pytest.mark.parametrize(
    ("losses", "improving"),
    [
        ([0.60, 0.55, 0.51, 0.48], True),
        ([0.60, 0.50], True),
        # Converged: gains shrink so fast that two more evaluations would add nothing.
        ([0.60, 0.50, 0.49, 0.4895], False),
        ([0.60, 0.50, 0.4999, 0.4998], False),
    ],
)
def test_a_converged_run_is_not_called_improving(losses: list[float], improving: bool) -> None:
    several = TrainConfig(epochs=5)
    assert ("still improving" in verdict_of(figures(5_000, 1.0), losses, train=several)) is improving
    assert "still improving" not in verdict_of(figures(5_000, 1.0), losses, train=TrainConfig(epochs=1))


def test_an_earlier_best_step_is_named() -> None:
    assert "best at step 200 of 300" in verdict_of(figures(5_000, 1.0), [0.6, 0.5, 0.55])


def test_calibration_is_reported_with_its_effect() -> None:
    before, after = figures(5_000, 1.0, scale=3.0), figures(5_000, 1.0)
    curve = LogitMap(knots=(0.0,), values=(0.0,), slopes=(0.33, 0.33)).to_dict()
    text = verdict_of(
        after, valid=after, uncalibrated={"valid": before, "test": before}, calibration=[curve]
    )
    assert f"validation {before['log_loss']:.4f} to {after['log_loss']:.4f}" in text
    assert "Platt scaling (slope 0.33)" in text
    assert "miscalibrated" not in text
    assert "miscalibrated" in verdict_of(before)
