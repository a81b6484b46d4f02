"""Signs of life, for waits whose length nobody knows: a rank that reads a terabyte is slow, not gone.

A thread of each rank counts in the rendezvous store. Whoever waits for others looks whether their counts still change.
"""

from __future__ import annotations

import contextlib
import threading
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from stratarec.errors import RankError

_BEATS_PER_TIMEOUT = 6


class Heartbeat:
    """One rank's signs of life, and what it sees of those of the others; a context manager.

    Parameters
    ----------
    store : Store
    rank, ranks : int
    timeout : float
        Seconds without a sign after which a rank counts as gone.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._others = [other for other in range(ranks) if other != rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        # The store goes with the rank that holds it; the others learn that by their connections.
        with contextlib.suppress(RuntimeError):
            while True:
                count += 1
                self._store.set(f"beat/{self._rank}", str(count))
                if self._stop.wait(self._timeout / _BEATS_PER_TIMEOUT):
                    return

    def look(self) -> None:
        """`RankError` where a rank gave no sign for too long; cheap to call often."""
        now = time.monotonic()
        if now - self._looked < self._timeout / _BEATS_PER_TIMEOUT:
            return
        self._looked = now
        for rank in self._others:
            name = f"beat/{rank}"
            count = self._store.get(name) if self._store.check([name]) else b""
            known, since = self._seen.get(rank, (None, now))
            if count != known:
                self._seen[rank] = (count, now)
            elif now - since > self._timeout:
                raise RankError(
                    f"rank {rank} is gone: no sign of life for {self._timeout:g} s (distributed.timeout); start again, "
                    "or let torchrun do it with --max-restarts"
                )
