"""Progress for machines: a line of JSON on standard error for each thing that is told.

Every line has ``event`` and ``time``, seconds since 1970. ``start``, ``progress`` and ``end`` are of a task, and have
its name as ``task``, ``unit``, ``done`` and ``total`` in that unit, and ``seconds`` since it began; ``eta_seconds`` is
null while nothing can be said. ``figures`` are points of curves at a ``step``. ``message`` has a ``text``, such as
people read, and so have ``warning`` and ``error``, the last line of a command that failed, which has its ``exit_code``
too. What is no number, as a loss that left, is null.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from math import isfinite

from stratarec.reporting.live.progress_bar import TaskSpeed

_LINE_SECONDS = 1.0


def json_line(event: str, **content: object) -> str:
    """In ASCII, so that no value acts on a terminal."""
    return json.dumps({"event": event, "time": round(time.time(), 3), **content}, allow_nan=False)


class JsonProgress:
    """At most a line of progress a second, and all else at once."""

    def __init__(self) -> None:
        self._heard = True
        self._task: dict[str, object] = {}

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        self.finish()
        self._task = {"task": task, "unit": unit, "total": total}
        self._done, self._total, self._speed = done, total, TaskSpeed()
        self._began = self._shown = time.monotonic()
        self._tell("start", **self._task, done=done)

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        self._speed.add(now, self._done)
        if now - self._shown >= _LINE_SECONDS:
            self._shown, left = now, self._speed.left(self._total - self._done)
            eta = None if left is None else round(left, 1)
            self._tell("progress", **self._task, done=self._done, seconds=self._seconds, eta_seconds=eta, note=note)

    def finish(self) -> None:
        if self._task:
            self._tell("end", **self._task, done=self._done, seconds=self._seconds)
            self._task = {}

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(
            "figures", step=step, values={name: value if isfinite(value) else None for name, value in values.items()}
        )

    def say(self, message: str) -> None:
        self._tell("message", text=message)

    def fail(self, message: str, exit_code: int) -> None:
        """What ended a command, and how."""
        self._tell("error", text=message, exit_code=exit_code)

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _tell(self, event: str, **content: object) -> None:
        if not self._heard:
            return
        try:
            print(json_line(event, **content), file=sys.stderr, flush=True)
        except OSError:
            self._heard = False  # whoever read this has gone; the work goes on
