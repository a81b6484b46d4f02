"""Rows that travel while the batch before is trained: a thread with connections of its own.

Every batch whose ranks agreed on halves is sent once, in the order of preparing, also one that is released unused:
ranks never disagree on what comes next. It is sent when all batches before its predecessor are done, because it holds
no row of the predecessor; or when it is looked up, because nothing is trained until that ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stratarec.distributed.collectives import Channel
from stratarec.embedding.prepared import Flight, Stopped
from stratarec.errors import TrainingError
from stratarec.kernels.threads import limit_threads


@dataclass(eq=False)
class Parcel:
    """What a batch gets early.

    Parameters
    ----------
    horizon : int or None
        It may be read when all batches before this one are done; None: at any time.
    send : callable
        Reads and exchanges; gives the arrays, filled as far as rows came.
    """

    horizon: int | None
    send: Callable[[Callable[[], bool]], Sequence[Tensor]]
    wanted: bool = False
    """Whether its batch is looked up now."""
    arrays: Sequence[Tensor] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None


class Courier:
    """Sends parcels one after another.

    Parameters
    ----------
    channel : Channel
        Used by its thread alone.
    flight : Flight
        Of this rank's own tables.
    """

    def __init__(self, channel: Channel, flight: Flight) -> None:
        self._channel, self._flight, self._changed = channel, flight, flight.changed
        self._waiting: deque[Parcel] = deque()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def give(self, parcel: Parcel) -> None:
        """Send it in its turn."""
        with self._changed:
            self._waiting.append(parcel)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
                self._thread.start()

    def hurry(self, parcel: Parcel) -> None:
        """Its batch is looked up now."""
        with self._changed:
            parcel.wanted = True
            self._changed.notify_all()

    def take(self, parcel: Parcel) -> Sequence[Tensor]:
        """The arrays, when they came; what went wrong meanwhile is raised."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: parcel.done)
        self._channel.awaited_seconds += time.perf_counter() - began
        if parcel.error is not None:
            raise parcel.error
        arrays, parcel.arrays = parcel.arrays, ()
        return arrays

    def close(self) -> None:
        """End the thread; what was not sent never is."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        limit_threads(1)
        error: BaseException | None = None
        while (parcel := self._next(error)) is not None:
            try:
                # After an error the channel is of no use: the other ranks still wait for what was not sent.
                if error is None:
                    parcel.arrays = parcel.send(lambda: self._stopped)
            except Stopped:
                error = TrainingError("the tables were closed while rows were on their way")
            except BaseException as found:
                error = found
            with self._changed:
                parcel.error, parcel.done = error, True
                self._changed.notify_all()

    def _next(self, error: BaseException | None) -> Parcel | None:
        """The next parcel when it may be sent; None at the end."""

        def ready() -> bool:
            if self._stopped:
                return True
            if not self._waiting:
                return False
            # Batches are looked up in order, so whatever comes before a wanted one was released.
            wanted = any(parcel.wanted for parcel in self._waiting)
            return error is not None or wanted or self._flight.settled(self._waiting[0].horizon)

        with self._changed:
            self._changed.wait_for(ready)
            if not self._stopped:
                return self._waiting.popleft()
            for parcel in self._waiting:
                parcel.error, parcel.done = TrainingError("the tables were closed"), True
            self._changed.notify_all()
            return None
