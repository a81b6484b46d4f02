"""Batches prepared on a thread of their own while earlier ones train.

The thread stops at barriers (evaluations, checkpoints by steps, the end), whose places are known beforehand; `drain`
is for what comes unforeseen. Both leave the same batches prepared whatever was fast.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding.lookup_engine import Handle, LookupEngine, WaitAbandoned
from stratarec.errors import TrainingError
from stratarec.kernels.runtime.threads import limit_threads

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over ``(item, prepared)`` of `source`, prepared up to `depth` items ahead of what was handed out last.

    Parameters
    ----------
    engine : LookupEngine
        Of the collection that will see the batches.
    source : iterator
        Read on the thread, so that loading overlaps with training too.
    features : callable
        What of an item the collection looks up; its second argument says whether it may end waiting by `WaitAbandoned`.
    depth : int
        With 0 there is no thread: an item is prepared when it is asked for.
    pause_after : callable
        Whether nothing is prepared beyond the i-th item until it has been trained: an evaluation or a checkpoint
        follows it, which must find the same state whatever the depth.

    Notes
    -----
    Use it as a context manager: leaving it ends the thread and releases every batch that was not looked up. An error of
    the source or of a batch is raised where the item is asked for. The thread that asks for items trains them: one that
    asks for more than can be prepared before it has trained what it got gets an error.
    """

    def __init__(
        self,
        engine: LookupEngine[Any],
        source: Iterator[Item],
        features: Callable[[Item, Callable[[], bool]], KeyedJagged],
        *,
        depth: int,
        pause_after: Callable[[int], bool] = lambda place: False,
    ) -> None:
        self._engine, self._source, self._features, self._depth = engine, source, features, depth
        self._pause_after = pause_after
        self._in_flight = engine.in_flight
        self._changed = engine.in_flight.changed
        self._ready: deque[tuple[Item, Handle]] = deque()
        self._given: weakref.WeakSet[Handle] = weakref.WeakSet()
        # Counts of items: handed out, prepared or being prepared, and that may be prepared before all were handed out.
        self._handed = self._begun = 0
        self._limit: int | None = None
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Prefetcher[Item]:
        if self._depth:
            # A daemon: an interpreter that ends must not wait for a source that blocks.
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for _, prepared in self._ready:
            prepared.release()
        self._ready.clear()
        for prepared in self._given:
            # One that was looked up may still have its backward pass.
            prepared.release_unused()
        self._in_flight.forgive()

    def drain(self) -> None:
        """Prepare no more than the `depth` items that may be prepared by now, until the one after them is asked for.

        How many that are follows from what was handed out, not from how fast the thread was.
        """
        with self._changed:
            if self._limit is None:
                self._limit = self._handed + self._depth

    @property
    def drained(self) -> bool:
        """Whether nothing is prepared beyond the item handed out last, nor will be before the next is asked for."""
        with self._changed:
            return not self._ready and (self._thread is None or self._ended or self._handed == self._limit)

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> tuple[Item, Handle]:
        if self._thread is None:
            return self._given_out(self._prepare(next(self._source)))
        with self._changed:
            if self._handed == self._limit:
                self._limit = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._ended or self._in_flight.blocked() is not None)
            if self._ready:
                found = self._ready.popleft()
                self._handed += 1
                self._changed.notify_all()
                return self._given_out(found)
            blocked = None if self._ended else self._in_flight.blocked()
        if blocked is not None:
            raise TrainingError(
                f"the next batch waits for the backward pass of batch {blocked}, which was handed out before: train "
                "it, or release() it, before asking for more"
            )
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _given_out(self, found: tuple[Item, Handle]) -> tuple[Item, Handle]:
        self._given.add(found[1])
        return found

    def _prepare(self, item: Item) -> tuple[Item, Handle]:
        if self._thread is None:
            return item, self._engine.prepare(self._features(item, lambda: False))

        def stopped() -> bool:
            return self._stopped

        return item, self._engine.prepare_ahead(self._features(item, stopped), self._depth, stopped)

    def _run(self) -> None:
        # Kernels of preparing take one core, or they would wait for those of the step that trains meanwhile.
        limit_threads(1)
        try:
            for place, item in enumerate(self._source):
                if not self._may_prepare(last=self._pause_after(place)):
                    return
                self._hand_over(self._prepare(item))
        # Whoever leaves the context asked for it.
        except WaitAbandoned:
            pass
        except BaseException as error:
            # Raised where the item is asked for: nobody sees an exception of a thread.
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_prepare(self, *, last: bool) -> bool:
        """Wait until there is to be another item, the `last` one before a pause; False when there is to be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room())
            if self._stopped:
                return False
            self._begun += 1
            if last:
                self._limit = self._begun
            return True

    def _has_room(self) -> bool:
        return len(self._ready) < self._depth and (self._limit is None or self._begun < self._limit)

    def _hand_over(self, found: tuple[Item, Handle]) -> None:
        with self._changed:
            self._ready.append(found)
            self._changed.notify_all()
