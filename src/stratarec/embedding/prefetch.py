"""Staging of batches on a separate thread while earlier batches train.

The thread stops at *barriers*, which are known in advance: evaluations, checkpoints every N steps,
and the end of the run. `drain` is for stops that are not known in advance. In both cases the set of
staged batches does not depend on the speed of threads.
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
from stratarec.embedding.slots.memory import Tensors
from stratarec.errors import TrainingError
from stratarec.kernels.runtime.threads import limit_threads

Item = TypeVar("Item")
# Kernels of the thread use one core, because the training step uses the other cores meanwhile. If a
# device trains, the other cores are idle: 8 threads instead of 1 took a step with int8 homes from
# 18.5 to 13.1 ms (one H200).
_DEVICE_THREADS = 8


class Prefetcher(Generic[Item]):
    """Iterates over pairs ``(item, handle)`` for the items of `source`, with up to `depth` items
    staged ahead.

    Parameters
    ----------
    engine : LookupEngine
        Engine of the collection that will look up the batches.
    source : iterator
        Read on the thread, so that loading overlaps with training too.
    features : callable
        Returns the features of an item. Its second argument is a function that returns true if the
        thread must end; a wait must then raise `WaitAbandoned`.
    depth : int
        Number of items. With 0 there is no thread: an item is staged when it is requested.
    pause_after : callable
        Whether the thread pauses after item i, until item i + 1 is requested: an evaluation or a
        checkpoint comes between them, and its state must not depend on `depth`.
    tensors : callable or None
        Returns the tensors of an item that `Engine.stage` takes, if rows are on a device. It is
        called once for each item, in their order.

    Notes
    -----
    Use it as a context manager: leaving it ends the thread and releases every batch that was not
    looked up. An error of the source or of a batch is raised when the item is requested. The thread
    that requests items also trains them: a request that can only be served after the backward pass
    of an earlier item is an error.
    """

    def __init__(
        self,
        engine: LookupEngine[Any],
        source: Iterator[Item],
        features: Callable[[Item, Callable[[], bool]], KeyedJagged],
        *,
        depth: int,
        pause_after: Callable[[int], bool] = lambda place: False,
        tensors: Callable[[Item], Tensors] | None = None,
    ) -> None:
        self._engine: Any = engine
        self._source = source
        self._features = features
        self._depth = depth
        self._pause_after = pause_after
        self._tensors = tensors
        self._in_flight = engine.in_flight
        self._changed = engine.in_flight.changed
        self._ready: deque[tuple[Item, Handle]] = deque()
        self._handed_out: weakref.WeakSet[Handle] = weakref.WeakSet()
        # Number of items that were handed out, number that are or are being staged, and maximum of
        # the latter.
        self._returned = self._started = 0
        self._limit: int | None = None
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Prefetcher[Item]:
        if self._depth:
            # A daemon: the interpreter must not wait for a blocked source at exit.
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
        for _, handle in self._ready:
            handle.release()
        self._ready.clear()
        for handle in self._handed_out:
            # A batch that was looked up may still have its backward pass.
            handle.release_unused()
        self._in_flight.forgive()

    def drain(self) -> None:
        """Stage only the next `depth` items, until the item after them is requested.

        They are counted from the last item handed out, so they do not depend on the speed of the
        thread.
        """
        with self._changed:
            if self._limit is None:
                self._limit = self._returned + self._depth

    @property
    def drained(self) -> bool:
        """Whether no further item is staged, or will be before the next request."""
        with self._changed:
            return not self._ready and (
                self._thread is None or self._ended or self._returned == self._limit
            )

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> tuple[Item, Handle]:
        if self._thread is None:
            return self._hand_out(self._stage(next(self._source)))
        with self._changed:
            if self._returned == self._limit:
                self._limit = None
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._ready or self._ended or self._in_flight.blocked() is not None
            )
            if self._ready:
                pair = self._ready.popleft()
                self._returned += 1
                self._changed.notify_all()
                return self._hand_out(pair)
            blocked = None if self._ended else self._in_flight.blocked()
        if blocked is not None:
            raise TrainingError(
                f"the next batch waits for the backward pass of batch {blocked}, which was returned "
                "before: train it, or call its release(), before requesting another"
            )
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _hand_out(self, pair: tuple[Item, Handle]) -> tuple[Item, Handle]:
        self._handed_out.add(pair[1])
        return pair

    def _stage(self, item: Item) -> tuple[Item, Handle]:
        features = self._features(item, lambda: self._stopped)
        more = () if self._tensors is None else (self._tensors(item),)
        if self._thread is None:
            return item, self._engine.stage(features, *more)
        return item, self._engine.stage_ahead(features, self._depth, lambda: self._stopped, *more)

    def _run(self) -> None:
        on_device = self._engine.level0.on_device
        limit_threads(_DEVICE_THREADS if on_device else 1, idle_cores=on_device)
        try:
            for place, item in enumerate(self._source):
                if not self._may_stage(last=self._pause_after(place)):
                    return
                pair = self._stage(item)
                with self._changed:
                    self._ready.append(pair)
                    self._changed.notify_all()
        # Expected when the context is left.
        except WaitAbandoned:
            pass
        except BaseException as error:
            # Raised when the item is requested: an exception in a thread would be lost.
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_stage(self, *, last: bool) -> bool:
        """Wait until another item may be staged; False if the thread must end. A pause follows a
        `last` item.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room())
            if self._stopped:
                return False
            self._started += 1
            if last:
                self._limit = self._started
            return True

    def _has_room(self) -> bool:
        return len(self._ready) < self._depth and (self._limit is None or self._started < self._limit)
