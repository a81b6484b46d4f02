"""Progress in lines: an estimate that a slow start does not spoil, and a reader who leaves."""

from __future__ import annotations

import json
import time

import pytest

from stratarec.reporting.progress import JsonProgress, TaskSpeed


def test_the_time_left_follows_from_what_is_done_once_it_runs() -> None:
    pace = TaskSpeed()
    # Nothing before the first unit counts: the clock of a pace starts there.
    pace.add(20.0, 1)
    assert pace.left(100) is None
    for step in range(1, 11):
        pace.add(20.0 + 0.1 * step, 1 + step)
    assert pace.left(100) == pytest.approx(10.0)


def test_lines_of_json_say_what_is_done_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = JsonProgress()
    progress.start("train", 100, "steps", done=10)
    for _ in range(30):
        clock[0] += 0.2
        progress.advance(1, "loss 0.5")
    progress.figures(40, {"train/loss": float("nan")})
    progress.say("a\x1b[31mline\nof two")
    progress.finish()
    progress.finish()
    text = capsys.readouterr().err
    assert text.isascii()
    events = [json.loads(line) for line in text.splitlines()]
    told = [each["event"] for each in events]
    assert told == ["start", *["progress"] * 6, "figures", "message", "end"]
    assert events[0]["done"] == 10
    assert events[7]["values"] == {"train/loss": None}
    # Fewer than one a second; the first already knows the pace.
    assert events[1]["eta_seconds"] == pytest.approx(0.2 * (100 - events[1]["done"]))
    assert (events[-1]["done"], events[-1]["total"], events[-1]["seconds"]) == (40, 100, 6.0)
