"""Progress for people: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from stratarec.progress import Progress, SilentProgress

_LINE_SECONDS = 10.0


class TerminalProgress:
    """A bar with amount, notes, elapsed and remaining time."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self.finish()
        self._bar = Bar(
            TextColumn("{task.description:14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task(task, total=total, completed=done, note="")

    def advance(self, amount: int, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, note=note)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False)


class LineProgress:
    """A line every ten seconds, for logs."""

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self._name, self._total, self._done = task, total, done
        self._first, self._began, self._shown = done, time.monotonic(), time.monotonic()
        self.say(f"{task}: {total:,} {unit}")

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            rate = (self._done - self._first) / (now - self._began)
            left = (self._total - self._done) / rate if rate > 0 else float("inf")
            share = 100 * self._done / max(self._total, 1)
            self.say(f"{self._name}: {share:.0f} %  {note}  ETA {left:.0f} s")

    def finish(self) -> None: ...

    def say(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)


def make_progress(*, quiet: bool) -> Progress:
    """The progress that fits where standard error goes."""
    if quiet:
        return SilentProgress()
    return TerminalProgress() if sys.stderr.isatty() else LineProgress()
