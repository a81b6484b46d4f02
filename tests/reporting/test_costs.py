"""Where rows live and where a step's time goes, as reports say it."""

from __future__ import annotations

from typing import Any

import pytest

from stratarec.reporting.step_time import StepTime


def position(**stages: float) -> dict[str, Any]:
    """Of 11 steps of 100 samples, the first of which was not timed; a step takes a second."""
    return {
        "step": 11, "trained_samples": 1100, "untimed_samples": 100, "train_seconds": 10.0,
        "stage_seconds": {name.replace("_", " "): 10 * share for name, share in stages.items()},
    }  # fmt: skip


USUAL = {
    "wait": 0.1, "look_up": 0.05, "forward": 0.25, "backward": 0.5, "update_rows": 0.1, "update_network": 0.1,
    "read": 0.2, "bring_in": 0.3,
}  # fmt: skip


def test_a_step_is_the_sum_of_its_stages() -> None:
    found = StepTime.of(position(**USUAL))
    assert found is not None
    assert found.seconds == pytest.approx(1.0)
    assert [stage.share for stage in found.stages] == pytest.approx([0.1, 0.05, 0.2, 0.4, 0.1, 0.1, 0.05])
    assert found.hidden == pytest.approx(0.8)
    slowest, memory = found.verdict(cached=True)
    assert slowest == "slowest part of a step: network, backward (400 ms, 40% of 1,000 ms); all steps took 10 s"
    assert "at most 30% of a step" in memory
    assert "more memory buys no speed" in list(found.verdict(cached=False))[1]
    assert StepTime.of(position()) is None
