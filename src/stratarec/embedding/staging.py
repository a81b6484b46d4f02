"""Bringing the rows of batches into level 0 in order, at once or ahead of time.

What may be evicted when batch n is staged follows from n and the lookahead k alone: rows that batches n - k and later
used stay. Staging n therefore waits for the backward pass of batch n - k - 1, and never looks at what has finished by
chance: moves, and with them the rounding of rows that go home, are the same in every run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.embedding.groups import TieredGroup
from stratarec.errors import TrainingError
from stratarec.jagged import KeyedJagged
from stratarec.kernels.memory import RECYCLER


@dataclass(eq=False)
class Staged:
    """A batch whose rows are in level 0 until it is released.

    Parameters
    ----------
    features : KeyedJagged
        As they were given.
    slots : ndarray
        ``[N]`` int32: of each id its slot, relative to its table's first; nothing where a table lies whole in level 0.
    batch : int
        How many batches were staged before.
    """

    features: KeyedJagged
    slots: NDArray[np.int32]
    batch: int


class Stager:
    """Stages batches of a collection in order and knows which are still in use.

    Parameters
    ----------
    groups : sequence of TieredGroup
        Those whose rows must be brought in.
    """

    def __init__(self, groups: Sequence[TieredGroup]) -> None:
        self.groups = tuple(groups)
        self.batches = 0
        self._open: set[int] = set()
        self._ahead: dict[int, Staged] = {}
        self._changed = threading.Condition()
        self._closed = False

    def claim(self, features: KeyedJagged) -> Staged:
        """The batch as it was staged ahead, or staged now."""
        staged = self._ahead.pop(id(features), None)
        return staged or self._stage(features, self._oldest(), self._refuse)

    def stage_ahead(self, features: KeyedJagged, lookahead: int) -> None:
        """Stage on a thread of the caller's, once the backward pass `lookahead` + 1 batches before is done."""
        horizon = self.batches - lookahead
        self._wait_for(horizon)
        self._ahead[id(features)] = self._stage(features, horizon, lambda: self._wait_for(self.batches - 1))

    def release(self, staged: Staged) -> None:
        """Let the rows of a batch go."""
        self._done(staged.batch)

    def open(self) -> None:
        """Allow `stage_ahead` to wait."""
        self._closed = False

    def close(self) -> None:
        """Forget what was staged ahead and end a wait of `stage_ahead`: no backward pass will come."""
        with self._changed:
            self._closed = True
            self._ahead.clear()
            self._changed.notify_all()

    def _stage(self, features: KeyedJagged, horizon: int, settle: Callable[[], None]) -> Staged:
        if not self.groups:
            return Staged(features, np.empty(0, dtype=np.int32), self.batches)
        slots = RECYCLER.empty(features.values.numel()).view(torch.int32).numpy()
        batch = self.batches
        self.batches += 1
        with self._changed:
            self._open.add(batch)
        try:
            for group in self.groups:
                group.stage(features, slots, batch=batch, horizon=horizon, settle=settle)
        except BaseException:
            self._done(batch)
            raise
        staged = Staged(features, slots, batch)
        # A forward pass without a backward pass must not hold its slots forever.
        weakref.finalize(staged, self._done, batch).atexit = False
        return staged

    def _oldest(self) -> int:
        """The first batch in use, or the next one."""
        with self._changed:
            return min(self._open, default=self.batches)

    def _done(self, batch: int) -> None:
        with self._changed:
            self._open.discard(batch)
            self._changed.notify_all()

    def _wait_for(self, horizon: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or min(self._open, default=horizon) >= horizon)
            if self._closed:
                raise TrainingError("staging was stopped")

    def _refuse(self) -> None:
        if len(self._open) > 1:
            raise TrainingError(
                f"{len(self._open)} batches are between forward and backward and their rows do not fit level 0 "
                "together; raise cache_rows, or call backward before the next forward"
            )
