"""What long work tells whoever watches."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one task at a time."""

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None:
        """A task of `total` units begins; `done` of them were finished by an earlier run."""

    def advance(self, amount: int, note: str = "") -> None:
        """`amount` more units are finished."""

    def finish(self) -> None:
        """The task is over."""

    def say(self, message: str) -> None:
        """A line worth keeping."""


class SilentProgress:
    """Says nothing."""

    def start(self, task: str, total: int, unit: str, done: int = 0) -> None: ...

    def advance(self, amount: int, note: str = "") -> None: ...

    def finish(self) -> None: ...

    def say(self, message: str) -> None: ...


@contextmanager
def timed(seconds: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add what a block takes to the entry `name`; a microsecond itself."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
