"""Which segments to rewrite, and the thread that does so.

Greedy: the segment with the least live rows costs the least to move for the space that it gives back. What is moved
goes to segments of its own, because rows that lived through one compaction are likely to live through the next.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import numpy as np

from stratarec.embedding.stores.log.segments import Segments

# Compaction begins a little before the bound, so that writers seldom wait for it.
_EARLY = 0.96
# A segment fuller than this gives back less than it costs.
_MOST_LIVE = 0.95


def dead_weight(segments: Segments, most_amplification: float) -> bool:
    """Whether the segments are larger than `most_amplification` times what is live in them, four segments aside."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 4 * segments.layout.segment_blocks * segments.layout.per_block
    return cells > most_amplification * int(segments.live.sum()) + free


def background_due(segments: Segments, most_amplification: float) -> bool:
    """Whether the background thread should compact: early by space, or because slots run out."""
    cells = int(segments.blocks.sum()) * segments.layout.per_block
    free = 2 * segments.layout.segment_blocks * segments.layout.per_block
    early = cells > _EARLY * most_amplification * int(segments.live.sum()) + free
    return early or len(segments.used) > segments.layout.slots - 12


def victim(segments: Segments) -> int:
    """The slot to rewrite next, or -1 when that would gain nothing."""
    sealed = np.flatnonzero(segments.sealed)
    if not len(sealed):
        return -1
    live, cells = segments.live[sealed], segments.blocks[sealed] * segments.layout.per_block
    if len(segments.used) > segments.layout.slots - 12:
        return int(sealed[np.argmin(live)])
    best = int(np.argmin(live / cells))
    return int(sealed[best]) if live[best] <= _MOST_LIVE * cells[best] else -1


class Background:
    """A thread that calls `work` when woken; what it raises is kept for the caller's next call."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._wake, self._ends = work, Event(), False
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def wake(self) -> None:
        """Have `work` called soon."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="stratarec-compaction", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ends:
                return
            try:
                self._work()
            except Exception as error:
                self._error = error

    def raise_error(self) -> None:
        """Raise what the thread met, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread."""
        self._ends = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
