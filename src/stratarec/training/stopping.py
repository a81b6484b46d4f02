"""Ctrl-C and SIGTERM as a request that is met at the next good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stratarec.errors import Interrupted


class Stopped(Exception):
    """Raised where work that keeps nothing, such as an evaluation, is to be left."""


class StopRequest:
    """Whether the user asked to stop.

    Parameters
    ----------
    at_once : str
        The message of the `Interrupted` that a second request raises, wherever the program is.
    """

    def __init__(self, at_once: str) -> None:
        self.made = False
        self._at_once = at_once

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as requests."""
        # Only the main thread may set handlers; elsewhere the caller deals with signals.
        main = threading.current_thread() is threading.main_thread()
        kept = {name: signal.signal(name, self._ask) for name in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            yield
        finally:
            for name, handler in kept.items():
                signal.signal(name, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.made:
            raise Interrupted(self._at_once)
        self.made = True
