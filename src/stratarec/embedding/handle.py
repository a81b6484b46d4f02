"""Batches between `prepare` and their backward pass: the handle of one, and the list of all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.slots import StagedBatch
from stratarec.errors import TrainingError


class WaitAbandoned(Exception):
    """A wait was given up: whoever waited is to end."""


class Handle(Protocol):
    """A batch whose rows are where they are looked up."""

    @property
    def features(self) -> KeyedJagged:
        """As they were given."""

    def release(self) -> None:
        """Let the rows go: there will be no (further) look-up or backward pass."""

    def release_unused(self) -> None:
        """As `release`, unless the batch was looked up: its backward pass may still come."""


class Prepared:
    """A batch whose rows are in level 0. It is looked up once, and has one backward pass.

    Batches are looked up in the order in which they were prepared. A handle that nobody holds any more lets its rows
    go; one that was never looked up then is an error of the next `prepare`, because a batch was lost.

    Parameters
    ----------
    features : KeyedJagged
        As they were given.
    staged : tuple of StagedBatch
        Each group of tables' share of the batch; its values are what kernels look up: slots, or the ids themselves.
        Empty once the rows were let go.
    number : int
        How many batches were prepared before.
    """

    __slots__ = ("__weakref__", "_generation", "_in_flight", "_state", "features", "number", "staged")

    def __init__(
        self, features: KeyedJagged, staged: tuple[StagedBatch, ...], number: int, in_flight: InFlightBatches
    ) -> None:
        self.features, self.staged, self.number = features, staged, number
        self._in_flight, self._generation, self._state = in_flight, in_flight.generation, "prepared"

    def look_up(self, in_flight: InFlightBatches) -> None:
        """Note that the batch is looked up now; `TrainingError` where that is not its turn."""
        if in_flight is not self._in_flight or self._generation != in_flight.generation:
            raise TrainingError(
                f"batch {self.number} was prepared by another collection, or before its tables were loaded or closed: "
                "prepare it again"
            )
        if self._state != "prepared":
            raise TrainingError(f"batch {self.number} was {self._state} already: prepare it again to look it up again")
        in_flight.look_up(self.number)
        self._state = "looked up"

    def finish(self) -> None:
        """Note that the backward pass begins; `TrainingError` when it is not the first one."""
        if self._state != "looked up":
            raise TrainingError(f"batch {self.number} was {self._state} already: every look-up has one backward pass")
        if self._generation != self._in_flight.generation:
            raise TrainingError(f"batch {self.number} was looked up before its tables were loaded or closed")
        self._state = "trained"

    def release(self) -> None:
        """Let the rows go: there will be no (further) look-up or backward pass."""
        if self._state in ("prepared", "looked up"):
            self._state = "released"
        self.staged = ()
        if self._generation == self._in_flight.generation:
            self._in_flight.done(self.number)

    def release_unused(self) -> None:
        """As `release`, unless the batch was looked up: its backward pass may still come."""
        if self._state == "prepared":
            self.release()

    def __del__(self) -> None:
        if self._state in ("prepared", "looked up"):
            self._in_flight.drop(self.number, self._generation)


class InFlightBatches:
    """Which batches are under way in one collection.

    `generation` counts how often all handles became void, by loading or closing. `changed` is notified whenever a batch
    is done; no other lock is taken while it is held.
    """

    def __init__(self) -> None:
        # A handle may be dropped, by the garbage collector, on a thread that holds the lock. It is entered by itself:
        # through the condition that takes three times as long, five times a step.
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.generation = 0
        self.waiting_for: int | None = None
        # Both in ascending order, because numbers rise: the first key is the least.
        self._open: dict[int, None] = {}
        self._unused: dict[int, None] = {}
        self._dropped: deque[tuple[int, int]] = deque()
        self._lost: int | None = None

    def start(self, number: int) -> None:
        """A batch is being prepared."""
        with self._lock:
            self._sweep()
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise TrainingError(
                    f"batch {lost} was prepared, and its handle dropped before it was looked up: pass every handle to "
                    "the collection, in order, or call its release()"
                )
            self._open[number] = self._unused[number] = None

    def look_up(self, number: int) -> None:
        """`TrainingError` unless `number` is the first that was not looked up yet."""
        with self._lock:
            first = self.unused()
            if first != number:
                raise TrainingError(
                    f"batch {number} is looked up before batch {first}, which was prepared first: pass handles to the "
                    f"collection in order, or release() that of batch {first}"
                )
            del self._unused[number]

    def unused(self) -> int | None:
        """The first batch that is being prepared, or was and is not looked up yet."""
        with self._lock:
            self._sweep()
            return next(iter(self._unused), None)

    def oldest(self, default: int) -> int:
        """The first batch under way, or `default`."""
        with self._lock:
            self._sweep()
            return next(iter(self._open), default)

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return len(self._open)

    def done(self, number: int) -> None:
        """The rows of a batch may go."""
        with self._lock:
            self._forget(number)
            self.changed.notify_all()

    def drop(self, number: int, generation: int) -> None:
        """As `done`, from a destructor: only noted, because this thread may be in the middle of anything here."""
        # A deque's append is atomic. The rest is left to whoever next asks (`_sweep`).
        self._dropped.append((number, generation))
        with self._lock:
            self.changed.notify_all()

    def forgive(self) -> None:
        """Whoever handed batches out gives up those whose handles were dropped: no later batch is refused for them."""
        with self._lock:
            self._sweep()
            self._lost = None

    def _sweep(self) -> None:
        while self._dropped:
            number, generation = self._dropped.popleft()
            if generation == self.generation and self._forget(number):
                self._lost = number

    def _forget(self, number: int) -> bool:
        """Whether the batch was not looked up."""
        unused = number in self._unused
        self._open.pop(number, None)
        self._unused.pop(number, None)
        return unused

    def wait_for(self, horizon: int, stopped: Callable[[], bool]) -> None:
        """Return when all batches before `horizon` are done.

        Raises
        ------
        Stopped
            When `stopped` says so, or the tables were loaded or closed.
        """
        with self._lock:
            generation, self.waiting_for = self.generation, horizon
            # Whoever waits for the batch that is prepared here must see that it waits for a batch itself.
            self.changed.notify_all()

            def given_up() -> bool:
                return stopped() or self.generation != generation

            try:
                self.changed.wait_for(lambda: given_up() or self.oldest(horizon) >= horizon)
            finally:
                self.waiting_for = None
            if given_up():
                raise WaitAbandoned

    def blocked(self) -> int | None:
        """The batch that somebody in `wait_for` waits for, if there is one."""
        with self._lock:
            if self.waiting_for is None:
                return None
            oldest = self.oldest(self.waiting_for)
            return oldest if oldest < self.waiting_for else None

    def end(self) -> None:
        """The rows are no longer what they were: every handle is void."""
        with self._lock:
            self.generation += 1
            self._open.clear()
            self._unused.clear()
            self._lost = None
            self.changed.notify_all()
