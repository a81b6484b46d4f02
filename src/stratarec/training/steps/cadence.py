"""Decide after which steps a run is evaluated, saved or stopped.

Evaluations, checkpoints every N steps and the end of the run must see the same state for every
lookahead. Their steps are known in advance, so each is a *barrier*: no batch beyond it is staged
before it is reached. Checkpoints every N minutes and stops by the user are not known in advance.
They are delayed until all batches that may already have been staged are trained: `ahead` steps
after the request, or earlier at a barrier or the end of an epoch. The delay depends only on the
step of the request, so all processes of a run act after the same step.
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
    """Raised to abort work without partial results (an evaluation) when the user asks to stop."""


class StopSignal:
    """Remembers whether a signal (SIGINT, SIGTERM or SIGHUP) asked the run to stop.

    Parameters
    ----------
    at_once : str
        Error message of a second signal, which raises `Interrupted` immediately.
    """

    def __init__(self, at_once: str) -> None:
        self.received = False
        self._at_once = at_once
        self._signal = int(signal.SIGINT)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the context."""
        # Only the main thread may set handlers. In another thread, the caller must handle signals.
        main = threading.current_thread() is threading.main_thread()
        handlers = {
            name: signal.signal(name, self._receive)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # SIGHUP stays ignored if it was, as `nohup` sets it.
            if main and (name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN)
        }
        try:
            yield
        except Interrupted as error:
            error.signal = self._signal
            raise
        finally:
            for name, handler in handlers.items():
                signal.signal(name, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self.received:
            raise Interrupted(self._at_once)
        self.received = True


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Clock and stop signal as one process sees them; other processes may see others."""

    checkpoint_age_seconds: float
    """Seconds since the last checkpoint, or since the start if there is none."""
    stop: bool
    """Whether the process was asked to stop."""


Agree = Callable[[Observation], Observation]
"""Combines all processes' observations; every process calls it after the same steps."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Actions between two steps. While batches are in flight, only `drain` is possible."""

    evaluate: bool = False
    """Evaluate before all other actions, then decide again, because an evaluation takes time."""
    save: bool = False
    stop: bool = False
    """Write a checkpoint and stop."""
    drain: bool = False
    """Stage no further batches: an action must wait until the staged ones are trained."""


class Cadence:
    """Decides what happens after a step.

    Parameters
    ----------
    config : TrainConfig
        Intervals of evaluations and checkpoints, and limits of the run.
    total_steps : int
        Number of steps of the whole run.
    ahead : int
        Maximum number of batches that are staged but not trained yet.
    stop : callable
        Returns whether the user asked to stop.
    agree : Agree
        Combines the observations of several processes. By default there is one process.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        ahead: int = 0,
        stop: Callable[[], bool] = lambda: False,
        agree: Agree = lambda observation: observation,
    ) -> None:
        self.total_steps = total_steps
        self._evaluate_every = config.eval_every
        self._checkpoint = config.checkpoint
        self._ahead = ahead
        self._stop = stop
        self._agree = agree
        self._saved_at = time.monotonic()
        self._due: int | None = None

    def is_barrier(self, step: int) -> bool:
        """Return whether an evaluation, a checkpoint or the end of the run is due after `step`."""
        every = (self._evaluate_every, self._checkpoint.every_steps)
        return step >= self.total_steps or any(_is_multiple(step, steps) for steps in every)

    def decide(self, step: int, *, epoch_ended: bool, evaluated: bool) -> Decision:
        """Return the actions after `step`.

        Parameters
        ----------
        epoch_ended : bool
            Whether `step` was the last step of its epoch.
        evaluated : bool
            Whether the evaluation after `step` is already done.
        """
        observation = self._observe()
        evaluates = _is_multiple(step, self._evaluate_every) if self._evaluate_every else epoch_ended
        overdue = bool(self._checkpoint.every_minutes) and (
            observation.checkpoint_age_seconds >= 60 * self._checkpoint.every_minutes
        )
        requested = observation.stop or overdue
        if requested and self._due is None:
            self._due = step + self._ahead
        now = requested and (
            epoch_ended or self.is_barrier(step) or (self._due is not None and step >= self._due)
        )
        return Decision(
            evaluate=step > 0 and evaluates and not evaluated,
            save=_is_multiple(step, self._checkpoint.every_steps) or now,
            stop=observation.stop and now,
            drain=requested and not now,
        )

    def check(self) -> None:
        """Raise `Stopped` if the user asked to stop."""
        if self._observe().stop:
            raise Stopped

    def saved(self) -> None:
        """Measure the time until the next checkpoint from now on, because one was just written."""
        self._saved_at = time.monotonic()
        self._due = None

    def _observe(self) -> Observation:
        age = time.monotonic() - self._saved_at
        return self._agree(Observation(checkpoint_age_seconds=age, stop=self._stop()))


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
