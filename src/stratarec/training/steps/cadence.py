"""One clock for evaluation, checkpoint and stop, and the user's request to stop.

What must find the same state whatever the lookahead (an evaluation, a checkpoint by steps, the end) follows from the
step alone: it is known ahead, and is a *barrier* beyond which nothing is prepared. What depends on time or on the user
is not known ahead. It waits until every batch that may be under way by then is trained, `ahead` steps later: that, too,
follows from the step at which it was asked for, so that all processes of a run would do it after the same one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from stratarec.errors import Interrupted
from stratarec.recipe.train_section import TrainConfig


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
        self._at_once, self._signal = at_once, int(signal.SIGINT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as requests."""
        # Only the main thread may set handlers; elsewhere the caller deals with signals.
        main = threading.current_thread() is threading.main_thread()
        kept = {name: signal.signal(name, self._ask) for name in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            yield
        except Interrupted as error:
            error.signal = self._signal
            raise
        finally:
            for name, handler in kept.items():
                signal.signal(name, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self.made:
            raise Interrupted(self._at_once)
        self.made = True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What each process of a run sees for itself, and may see otherwise than the others."""

    checkpoint_age_seconds: float
    """Since the last checkpoint, or the start."""
    stop: bool
    """Whether it was asked to stop."""


Agree = Callable[[Seen], Seen]
"""Makes one of what several processes see: all call it equally often, after the same steps, and go by what it gives."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to happen between two steps; the model must not be under way for any of the first three."""

    evaluate: bool = False
    """Before anything else; it takes time, so decide again afterwards."""
    save: bool = False
    stop: bool = False
    """With a checkpoint."""
    drain: bool = False
    """Something waits until what is prepared is trained: prepare no more than may be prepared by now."""


class Cadence:
    """Decides what happens after a step.

    Parameters
    ----------
    config : TrainConfig
    total_steps : int
        Steps of the whole run.
    ahead : int
        Batches that may be prepared beyond the one that was trained last.
    stop : callable
        Whether the user asked to stop.
    agree : Agree
        By default of one process, which goes by what it sees itself.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        ahead: int = 0,
        stop: Callable[[], bool] = lambda: False,
        agree: Agree = lambda seen: seen,
    ) -> None:
        self.total_steps = total_steps
        self._evaluate_every, self._checkpoint = config.eval_every, config.checkpoint
        self._ahead, self._stop, self._agree = ahead, stop, agree
        self._saved_at = time.monotonic()
        self._due: int | None = None

    def is_barrier(self, step: int) -> bool:
        """Whether an evaluation, a checkpoint or the end is known ahead to follow `step`."""
        every = (self._evaluate_every, self._checkpoint.every_steps)
        return step >= self.total_steps or any(_is_multiple(step, steps) for steps in every)

    def decide(self, step: int, *, epoch_ended: bool, evaluated: bool) -> Decision:
        """What follows `step`.

        Parameters
        ----------
        epoch_ended : bool
            Whether it was the last one of its epoch.
        evaluated : bool
            Whether the evaluation that may follow it was made.
        """
        seen = self._seen()
        evaluates = _is_multiple(step, self._evaluate_every) if self._evaluate_every else epoch_ended
        overdue = bool(self._checkpoint.every_minutes) and (
            seen.checkpoint_age_seconds >= 60 * self._checkpoint.every_minutes
        )
        asked = seen.stop or overdue
        if asked and self._due is None:
            self._due = step + self._ahead
        now = asked and (epoch_ended or self.is_barrier(step) or (self._due is not None and step >= self._due))
        return Decision(
            evaluate=step > 0 and evaluates and not evaluated,
            save=_is_multiple(step, self._checkpoint.every_steps) or now,
            stop=seen.stop and now,
            drain=asked and not now,
        )

    def check(self) -> None:
        """Raise `Stopped` on a request to stop: for work between steps that keeps nothing."""
        if self._seen().stop:
            raise Stopped

    def saved(self) -> None:
        """A checkpoint was written now."""
        self._saved_at, self._due = time.monotonic(), None

    def _seen(self) -> Seen:
        return self._agree(Seen(checkpoint_age_seconds=time.monotonic() - self._saved_at, stop=self._stop()))


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
