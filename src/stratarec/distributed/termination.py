"""SIGTERM, which `torchrun` sends to the ranks that are left when one of them fails, and which ends a process silently.

It becomes an exception, so that a rank says why it ends. Where somebody else takes the signal (a run that writes a
checkpoint first), this one is out of the way.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """This process got SIGTERM. No `Exception`: nothing on the way out takes it for a failure."""


class Termination:
    """Whether SIGTERM still ends what this process does."""

    def __init__(self) -> None:
        self._heeded = True

    def ignore(self) -> None:
        """From here on the process ends anyway."""
        self._heeded = False

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if self._heeded:
            self._heeded = False
            raise Terminated

    @contextmanager
    def listening(self) -> Iterator[Termination]:
        """Raise `Terminated` on the first SIGTERM; the others are ignored. Only the main thread may listen."""
        main = threading.current_thread() is threading.main_thread()
        kept = signal.signal(signal.SIGTERM, self._tell) if main else None
        try:
            yield self
        finally:
            if main:
                signal.signal(signal.SIGTERM, kept)
