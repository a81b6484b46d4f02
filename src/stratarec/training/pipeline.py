"""A training step from a batch on disk to new weights: its stages in one place, and the clock that interrupts them.

    stage      what happens                                           where
    read       the schedule says what is trained next                 the loader's threads
    plan       the ids that tables will be asked for (`look_up`)      the reading thread
    exchange   ids go to whoever holds their rows (`Local`: nobody)   the prefetching thread
    prepare    rows come into level 0 (`engine.prepare_ahead`)        the prefetching thread
    forward, backward (which updates the rows), update of the network the training thread

The first four run ahead of the last, up to a barrier of `Cadence`. What must find the same state whatever the lookahead
(an evaluation, a checkpoint by steps, the end) is known ahead and is a barrier; what depends on time or on the user is
not, and waits until all that was prepared is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stratarec.batch import Batch
from stratarec.data.loader import Loader, run_ahead
from stratarec.embedding import Prefetcher
from stratarec.jagged import KeyedJagged
from stratarec.models import CTRModel
from stratarec.models.dedup import Lookup
from stratarec.training.config import TrainConfig

Item = tuple[Batch, Lookup]


class Schedule(Protocol):
    """What is trained next."""

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """The batches of an epoch from its `first` on; the same ones whenever it is asked."""


class Exchange(Protocol):
    """Sends the ids of a batch to the processes that hold their rows."""

    def features(self, lookup: Lookup) -> KeyedJagged:
        """What this process's tables are asked for."""


class Local:
    """The `Exchange` of one process: every row is its own."""

    def features(self, lookup: Lookup) -> KeyedJagged:
        """All ids of the batch."""
        return lookup.features


@dataclass(frozen=True)
class InOrder:
    """The `Schedule` that is the loader's order."""

    loader: Loader

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """See `Schedule.batches`."""
        return self.loader.batches(epoch, first)


class Pipeline:
    """The stages before `forward`.

    Parameters
    ----------
    model : CTRModel
        Plans its look-ups and owns the tables.
    schedule : Schedule
    ahead : int
        Batches that are read and planned ahead.
    exchange : Exchange
    """

    def __init__(self, model: CTRModel, schedule: Schedule, ahead: int, exchange: Exchange | None = None) -> None:
        self._model, self._schedule, self._ahead = model, schedule, ahead
        self._exchange = exchange or Local()

    def items(self, epoch: int, first: int = 0) -> Iterator[Item]:
        """Read and plan: the batches of an epoch and their look-ups, made ahead on a thread."""
        return run_ahead(
            lambda: ((batch, self._model.look_up(batch)) for batch in self._schedule.batches(epoch, first)), self._ahead
        )

    def prepared(self, epoch: int, first: int, barrier: Callable[[int], bool]) -> Prefetcher[Item]:
        """Exchange and prepare the rest of an epoch, a context manager over ``(item, prepared)``.

        Parameters
        ----------
        barrier : callable
            Whether nothing is to be prepared beyond the i-th item until it is trained.
        """
        engine = self._model.embeddings.engine
        return Prefetcher(
            engine,
            self.items(epoch, first),
            lambda item: self._exchange.features(item[1]),
            depth=0 if engine.resident else engine.tiers.lookahead,
            pause_after=barrier,
        )


class Cadence:
    """One clock for evaluation, checkpoint and stop. It decides; with several processes, one would for all.

    Parameters
    ----------
    config : TrainConfig
    total_steps : int
        Steps of the whole run.
    """

    def __init__(self, config: TrainConfig, total_steps: int) -> None:
        self._evaluate_every, self._checkpoint, self._total = config.eval_every, config.checkpoint, total_steps
        self._saved_at = time.monotonic()

    def is_barrier(self, step: int) -> bool:
        """Whether an evaluation, a checkpoint or the end is known ahead to follow `step`."""
        every = (self._evaluate_every, self._checkpoint.every_steps)
        return step >= self._total or any(_is_multiple(step, steps) for steps in every)

    def evaluates(self, step: int, *, epoch_ended: bool) -> bool:
        """Whether an evaluation follows `step`."""
        return _is_multiple(step, self._evaluate_every) if self._evaluate_every else epoch_ended

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows `step`, by steps or by time."""
        minutes, most = (time.monotonic() - self._saved_at) / 60, self._checkpoint.every_minutes
        return _is_multiple(step, self._checkpoint.every_steps) or bool(most and minutes >= most)

    def saved(self) -> None:
        """A checkpoint was written now."""
        self._saved_at = time.monotonic()


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
