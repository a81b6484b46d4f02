"""Progress for people: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from stratarec.config.units import readable_seconds
from stratarec.io.names import visible

_LINE_SECONDS = 10.0
_PACE_SECONDS, _MARK_SECONDS = 60.0, 1.0


class TerminalProgress:
    """A bar with amount, notes, elapsed and remaining time."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self.finish()
        self._bar = Bar(
            TextColumn("{task.description:14}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task(visible(task), total=total, completed=done, note="", eta="")
        self._done, self._total, self._speed = done, total, TaskSpeed()

    def advance(self, amount: int, note: str = "") -> None:
        if self._bar is not None:
            self._done += amount
            self._speed.add(time.monotonic(), self._done)
            eta = eta_text(self._speed.left(self._total - self._done))
            self._bar.update(self._task, advance=amount, note=visible(note), eta=eta)

    def figures(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        self._console.print(visible(message))


class TaskSpeed:
    """How fast a task goes: over its last minute, and not counting what came before its first unit was done."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, seconds: float, done: int) -> None:
        """`done` units are finished at the time `seconds`."""
        if len(self._marks) > 1 and seconds - self._marks[-2][0] < _MARK_SECONDS:
            self._marks.pop()
        self._marks.append((seconds, done))
        while seconds - self._marks[0][0] > _PACE_SECONDS and len(self._marks) > 2:
            self._marks.popleft()

    def left(self, units: int) -> float | None:
        """Seconds that `units` more take; None while nothing can be said."""
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return units * (now - began) / (last - first) if last > first else None


class LineProgress:
    """A line every ten seconds, for logs."""

    def __init__(self) -> None:
        self._heard = True

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self._name, self._total, self._done = task, total, done
        self._pace, self._shown = TaskSpeed(), time.monotonic()
        self.say(f"{task}: {total:,} {unit}")

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        self._pace.add(now, self._done)
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            parts = (note, eta_text(self._pace.left(self._total - self._done)))
            share = 100 * self._done / max(self._total, 1)
            self.say("  ".join([f"{self._name}: {share:.0f} %", *filter(None, parts)]))

    def finish(self) -> None: ...

    def figures(self, step: int, values: Mapping[str, float]) -> None: ...

    def say(self, message: str) -> None:
        if not self._heard:
            return
        try:
            print(visible(message), file=sys.stderr, flush=True)
        except OSError:
            # Whoever read this has gone, as `head` does; the work goes on.
            self._heard = False


def eta_text(left: float | None) -> str:
    """The seconds that are left, for people; empty while nothing can be said."""
    return "" if left is None else f"ETA {readable_seconds(left)}"
