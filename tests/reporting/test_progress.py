"""Test progress on terminals, in notebooks and as JSON."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from errors import missing
from stratarec.progress import SilentProgress
from stratarec.reporting import progress
from stratarec.reporting.progress import JsonProgress, NotebookProgress, TaskSpeed, progress_of_notebook
from stratarec.reporting.step_time import MeasuredStep


def test_the_remaining_time_follows_from_completed_units() -> None:
    pace = TaskSpeed()
    # The clock starts with the first unit, so earlier time does not count.
    pace.add(20.0, 1)
    assert pace.remaining(100) is None
    for step in range(1, 11):
        pace.add(20.0 + 0.1 * step, 1 + step)
    assert pace.remaining(100) == pytest.approx(10.0)


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_shows_all_numbers_in_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = progress.TerminalProgress()
    shown.start("train", 20_000, "steps", at_most=True)
    shown.advance(12_345, "loss 0.5715  7,995 samples/s")
    assert shown._bar is not None
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown._bar.get_renderable())
    shown.finish()
    (line,) = console.export_text().splitlines()
    for part in ("train", "12345/20000 steps", "loss 0.5715  7,995 samples/s", "0:00:00 ETA at most"):
        assert part in line
    assert "…" not in line


def test_the_time_of_a_run_that_may_stop_early_is_an_upper_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    for at_most in (False, True):
        lines = progress.LineProgress()
        lines.start("train", 100, "steps", at_most=at_most)
        lines.advance(1)
        time.sleep(0.01)
        lines.advance(1)
        text = capsys.readouterr().err
        assert ("steps at most" in text) == at_most
        assert ("ETA at most" in text) == at_most
        assert "ETA" in text


def test_json_lines_report_completed_and_remaining_work(
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
    kinds = [each["event"] for each in events]
    assert kinds == ["start", *["progress"] * 6, "figures", "message", "end"]
    assert events[0]["done"] == 10
    assert events[7]["values"] == {"train/loss": None}
    # Less than one line per second; the first already has a rate.
    assert events[1]["eta_seconds"] == pytest.approx(0.2 * (100 - events[1]["done"]))
    assert (events[-1]["done"], events[-1]["total"], events[-1]["seconds"]) == (40, 100, 6.0)


def test_without_a_notebook_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert isinstance(progress_of_notebook(), SilentProgress)

    class Terminal:
        """IPython in a terminal, which has no kernel."""

        @staticmethod
        def get_ipython() -> object:
            return object()

    monkeypatch.setitem(sys.modules, "IPython", Terminal)
    assert isinstance(progress_of_notebook(), SilentProgress)


def test_a_notebook_shows_the_task_messages_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotebookProgress, "_draw", lambda self, now=False: None)
    progress = NotebookProgress()
    progress.start("train <b>", 10, "steps")
    progress.say("a & b")
    assert "<svg" not in progress.html
    assert not missing("train &lt;b&gt; a &amp; b 0 of 10 steps", progress.html)
    progress.figures(4, {"train/loss": 0.5, "valid/auc": float("nan"), "other": 1.0})
    assert progress.html.count("<svg") == 1


def position(**parts: float) -> dict[str, Any]:
    """Return the state after 11 steps of 100 samples and one second each. The first step was not
    timed.
    """
    return {
        "step": 11,
        "trained_samples": 1100,
        "untimed_samples": 100,
        "train_seconds": 10.0,
        "stage_seconds": {name.replace("_", " "): 10 * share for name, share in parts.items()},
    }


USUAL = {
    "wait": 0.1, "look_up": 0.05, "forward": 0.25, "backward": 0.5, "update_rows": 0.1, "update_network": 0.1,
    "read": 0.2, "bring_in": 0.3,
}  # fmt: skip


def test_a_step_is_the_sum_of_its_parts() -> None:
    result = MeasuredStep.of(position(**USUAL))
    assert result is not None
    assert result.seconds == pytest.approx(1.0)
    assert [part.share for part in result.parts] == pytest.approx([0.1, 0.05, 0.2, 0.4, 0.1, 0.1, 0.05])
    assert result.hidden == pytest.approx(0.8)
    slowest, memory = result.verdict(cached=True)
    assert (
        slowest
        == "slowest part of a step: network, backward (400 ms, 40% of 1,000 ms); all steps took 10 s"
    )
    assert "at most 30% of a step" in memory
    assert "more memory saves no time" in list(result.verdict(cached=False))[1]
    assert MeasuredStep.of(position()) is None
