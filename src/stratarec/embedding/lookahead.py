"""Batches staged on a thread of their own while earlier ones train."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from stratarec.embedding.staging import Stager
from stratarec.jagged import KeyedJagged
from stratarec.kernels.threads import limit_threads

Item = TypeVar("Item")


class Lookahead(Generic[Item]):
    """Iterates over `source`, staging up to `depth` items ahead of the one that was handed out last.

    Parameters
    ----------
    stager : Stager
        Of the collection that will see the items.
    source : iterator
        Read on the thread, so that loading overlaps with training too.
    features : callable
        What of an item the collection looks up.
    depth : int
        0 hands items out as they are; they are staged when the collection sees them.
    pause_after : callable
        Whether staging stops after the i-th item until it has been trained: an evaluation or a checkpoint follows it,
        which must find the same state whatever the depth.

    Notes
    -----
    Use it as a context manager: leaving it ends the thread. An error of the source or of staging is raised where the
    item is asked for.
    """

    def __init__(
        self,
        stager: Stager,
        source: Iterator[Item],
        features: Callable[[Item], KeyedJagged],
        *,
        depth: int,
        pause_after: Callable[[int], bool] = lambda place: False,
    ) -> None:
        self._stager, self._source, self._features, self._depth = stager, source, features, depth
        self._pause_after = pause_after
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._parked = self._halted = self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lookahead[Item]:
        if self._depth:
            self._stager.open()
            self._thread = threading.Thread(target=self._run, name="lookahead", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._stager.close()
        self._thread.join()

    @property
    def settled(self) -> bool:
        """Whether nothing is staged beyond the item that was handed out last, nor before the next is asked for."""
        with self._changed:
            return not self._depth or (self._parked and not self._ready)

    def halt(self) -> None:
        """Stage nothing more: what is staged already is still handed out, then this is `settled`."""
        if self._depth:
            with self._changed:
                self._halted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._parked)

    def __iter__(self) -> Lookahead[Item]:
        return self

    def __next__(self) -> Item:
        if not self._depth:
            return next(self._source)
        with self._changed:
            if self._parked and not self._ready and not self._ended:
                self._parked = self._halted = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _run(self) -> None:
        limit_threads(1)
        try:
            for place, item in enumerate(self._source):
                self._stager.stage_ahead(self._features(item), self._depth)
                if not self._hand_over(item, pause=self._pause_after(place)):
                    return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._parked = self._ended = True
                self._changed.notify_all()

    def _hand_over(self, item: Item, *, pause: bool) -> bool:
        """Queue a staged item and wait until the next one may be staged; False when there is to be none."""
        with self._changed:
            self._ready.append(item)
            self._parked = pause
            self._changed.notify_all()
            while not self._stopped:
                if self._halted and not self._parked:
                    self._parked = True
                    self._changed.notify_all()
                if not self._parked and len(self._ready) < self._depth:
                    return True
                self._changed.wait()
            return False
