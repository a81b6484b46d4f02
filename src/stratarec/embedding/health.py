"""Whether the rows of a collection are what training made of them: `open`, `failed` or `closed`.

A home that is read and written before any slot changes (a log) can refuse, on a full disk say, and every row is where
it was: the collection stays open. What cannot be taken back makes it `failed`: an interrupt in the middle of a move, or
a row that does not fit its codec and is found by the one pass that swaps rows with addressable homes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from stratarec.errors import StrataError, TrainingError


class Health:
    """Shared by all that moves or changes rows of one collection."""

    def __init__(self) -> None:
        self.state: Literal["open", "failed", "closed"] = "open"
        self._reason = ""

    def require(self) -> None:
        """`TrainingError` unless the state is `open`."""
        if self.state == "closed":
            raise TrainingError(
                "these tables were closed, which Trainer.train does at its end: build or open them anew"
            )
        if self.state == "failed":
            raise TrainingError(f"these tables are incomplete ({self._reason}): load a checkpoint")

    def require_not_closed(self) -> None:
        """As `require`, but a failed collection may pass: loading makes it whole."""
        if self.state == "closed":
            self.require()

    def changing(self, what: str) -> Changing:
        """Fail for good when the block is left by anything but its end or a `StrataError`, which means no harm done."""
        return Changing(self, what)

    def fail(self, reason: str) -> None:
        """From here on `require` refuses, because of `reason`."""
        if self.state == "open":
            self.state, self._reason = "failed", reason

    def recover(self) -> None:
        """All rows were loaded anew."""
        if self.state == "failed":
            self.state, self._reason = "open", ""

    def close(self) -> None:
        """There are no rows any more."""
        self.state = "closed"


class Changing:
    """What `Health.changing` gives."""

    __slots__ = ("_health", "_what")

    def __init__(self, health: Health, what: str) -> None:
        self._health, self._what = health, what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, StrataError):
            self._health.fail(f"{self._what} was interrupted by {kind.__name__}")
