"""Progress of long work: a bar on a terminal, lines in a log file, JSON for programs, and curves in
a notebook.

`JsonProgress` writes a line of JSON to standard error for each event. Every line has ``event`` and
``time``, in seconds since 1970. The events ``start``, ``progress`` and ``end`` have the name of
their ``task``, its ``unit``, ``done`` and ``total`` in that unit, and ``seconds`` since its start;
``eta_seconds`` is null while it is unknown. The event ``figures`` has points of curves at a
``step``. The events ``message``, ``warning`` and ``error`` have a ``text``; ``error`` is the last
line of a command that failed, and has its ``exit_code``. A number that is not finite, such as the
loss of a run that diverged, is null.

`NotebookProgress` needs only the IPython that runs the notebook. Its last output is saved with the
notebook.
"""

from __future__ import annotations

import html
import io
import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from stratarec.config.units import format_seconds
from stratarec.io.names import visible
from stratarec.progress import Progress, SilentProgress

_LINE_SECONDS = 10.0
_PACE_SECONDS, _MARK_SECONDS = 60.0, 1.0
# Minimum number of columns of a terminal for a bar.
_WIDE = 100


class TerminalProgress:
    """Show a bar with amount, notes, elapsed and remaining time."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self.finish()
        # In a narrow terminal, a bar would leave no room for numbers.
        is_wide = self._console.width >= _WIDE
        self._bar = Bar(
            TextColumn("{task.description:14}" if is_wide else "{task.description}", markup=False),
            *([BarColumn()] if is_wide else []),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn(_eta_head(at_most)),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=_PACE_SECONDS,
        )
        self._bar.start()
        self._task = self._bar.add_task(visible(task), total=total, completed=done, note="")

    def advance(self, amount: int, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, note=visible(note))

    def figures(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        self._console.print(visible(message))


class TaskSpeed:
    """Speed of a task over its last minute, without the time before its first unit."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, seconds: float, done: int) -> None:
        """Record that `done` units are finished at the time `seconds`."""
        if len(self._marks) > 1 and seconds - self._marks[-2][0] < _MARK_SECONDS:
            self._marks.pop()
        self._marks.append((seconds, done))
        while seconds - self._marks[0][0] > _PACE_SECONDS and len(self._marks) > 2:
            self._marks.popleft()

    def remaining(self, units: int) -> float | None:
        """Return the seconds that `units` more units will take; None while the speed is unknown."""
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return units * (now - began) / (last - first) if last > first else None


class _StderrProgress:
    """Common part of progress that writes lines about a task to standard error."""

    def __init__(self) -> None:
        self._has_reader = True

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self._total = total
        self._done = done
        self._speed = TaskSpeed()
        self._at_most = at_most
        self._began = self._shown = time.monotonic()

    def _is_due(self, amount: int, seconds: float) -> bool:
        """Count finished units, and return whether the last line is at least `seconds` seconds
        old.
        """
        self._done += amount
        now = time.monotonic()
        self._speed.add(now, self._done)
        is_due = now - self._shown >= seconds
        self._shown = now if is_due else self._shown
        return is_due

    @property
    def _remaining(self) -> float | None:
        return self._speed.remaining(self._total - self._done)

    def _print(self, line: str) -> None:
        if not self._has_reader:
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:
            # The reader of standard error has closed the pipe, as `head` does; the work continues.
            self._has_reader = False


class LineProgress(_StderrProgress):
    """Print a line of progress every ten seconds, for log files."""

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        super().start(task, total, unit, done, at_most=at_most)
        self._name = task
        self.say(f"{task}: {total:,} {unit}{' at most' * at_most}")

    def advance(self, amount: int, note: str = "") -> None:
        if self._is_due(amount, _LINE_SECONDS):
            share = 100 * self._done / max(self._total, 1)
            parts = filter(None, (note, eta_text(self._remaining, at_most=self._at_most)))
            self.say("  ".join([f"{self._name}: {share:.0f} %", *parts]))

    def finish(self) -> None: ...

    def figures(self, step: int, values: Mapping[str, float]) -> None: ...

    def say(self, message: str) -> None:
        self._print(visible(message))


def eta_text(seconds: float | None, *, at_most: bool = False) -> str:
    """Return the remaining seconds as text, as an upper limit if `at_most`; empty while they are
    unknown.
    """
    return "" if seconds is None else f"{_eta_head(at_most)} {format_seconds(seconds)}"


def _eta_head(at_most: bool) -> str:
    return "ETA at most" if at_most else "ETA"


_JSON_SECONDS = 1.0


def json_line(event: str, **content: object) -> str:
    """Return an event as one line of JSON in ASCII, so that no value can control a terminal."""
    return json.dumps({"event": event, "time": round(time.time(), 3), **content}, allow_nan=False)


class JsonProgress(_StderrProgress):
    """Write at most one line of progress per second, and all other events at once."""

    def __init__(self) -> None:
        super().__init__()
        self._task: dict[str, object] = {}

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self.finish()
        self._task = {"task": task, "unit": unit, "total": total}
        super().start(task, total, unit, done, at_most=at_most)
        self._write("start", **self._task, done=done)

    def advance(self, amount: int, note: str = "") -> None:
        if self._is_due(amount, _JSON_SECONDS):
            eta = None if self._remaining is None else round(self._remaining, 1)
            self._write(
                "progress", **self._task, done=self._done, seconds=self._seconds, eta_seconds=eta, note=note
            )

    def finish(self) -> None:
        if self._task:
            self._write("end", **self._task, done=self._done, seconds=self._seconds)
            self._task = {}

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._write(
            "figures",
            step=step,
            values={name: value if isfinite(value) else None for name, value in values.items()},
        )

    def say(self, message: str) -> None:
        self._write("message", text=message)

    def fail(self, message: str, exit_code: int) -> None:
        """Report the error that ended a command."""
        self._write("error", text=message, exit_code=exit_code)

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self, event: str, **content: object) -> None:
        self._print(json_line(event, **content))


_DRAW_SECONDS = 2.0
_MOST_LINES = 4
# Curve -> its name, and the number of its chart.
_CURVES = {
    "train/loss": ("training loss", 0),
    "valid/log_loss": ("validation log loss", 0),
    "valid/auc": ("validation AUC", 1),
}


def progress_of_notebook() -> Progress:
    """Return a progress with curves if a notebook runs this process, else a silent one."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return NotebookProgress() if shell is not None and hasattr(shell, "kernel") else SilentProgress()


class NotebookProgress:
    """Show the task, messages and curves in a notebook, at most every two seconds. Curves remain
    when the run ends.
    """

    def __init__(self) -> None:
        self._output: Any = None
        self._task = ""
        self._unit = ""
        self._total = 0
        self._done = 0
        self._note = ""
        self._eta = ""
        self._lines: list[str] = []
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._drawn = 0.0

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self._task = task
        self._unit = unit
        self._total = total
        self._done = done
        self._speed = TaskSpeed()
        self._note = ""
        self._eta = ""
        self._at_most = at_most
        self._draw(now=True)

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        self._speed.add(time.monotonic(), self._done)
        self._note = note
        self._eta = eta_text(self._speed.remaining(self._total - self._done), at_most=self._at_most)
        self._draw()

    def finish(self) -> None:
        self._eta = ""
        self._draw(now=True)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in _CURVES and value == value:
                self._points.setdefault(name, []).append((step, value))
        self._draw()

    def say(self, message: str) -> None:
        self._lines = [*self._lines, message][-_MOST_LINES:]
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._drawn < _DRAW_SECONDS:
            return
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        shown = HTML(self.html)
        if self._output is None:
            self._output = display(shown, display_id=True)
        else:
            self._output.update(shown)

    @property
    def html(self) -> str:
        """HTML of the current output."""
        parts = (
            (f"{self._done:,} of {self._total:,} {self._unit}", self._note, self._eta) if self._task else ()
        )
        text = [f"{self._task}: {'  '.join(filter(None, parts))}", *self._lines]
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in text if line.strip(": "))
        return f'<div style="font: 13px sans-serif">{lines}{_draw_curves(self._points) if self._points else ""}</div>'


def _draw_curves(points: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw the curves over steps as SVG, one chart of losses and one of AUC."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2), layout="constrained")
    charts = figure.subplots(1, 2)
    for name, values in points.items():
        label, place = _CURVES[name]
        charts[place].plot(*zip(*values, strict=True), label=f"{label} {values[-1][1]:.5f}", marker=".")
        charts[place].legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()
