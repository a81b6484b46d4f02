"""Who is still there, and why a process ends: SIGTERM as an exception, signs of life, and the list of those that left.

`Termination`: torchrun sends SIGTERM to the ranks that are left when one of them fails, and it ends a process silently.
It becomes an exception, so that a rank says why it ends. Where somebody else takes the signal (a run that writes a
checkpoint first), this one is out of the way.

`Heartbeat`: for waits whose length nobody knows, since a rank that reads a terabyte is slow, not gone. A thread of each
rank counts in the rendezvous store; whoever waits for others looks whether their counts still change.

`RollCall`: a collective says that a connection broke, never which process is to blame. So each process that meets a
failure, or leaves with an error of its own, writes that down in the store; the others read it. Under torchrun the store
is held by its agent and outlives every rank; without it, it ends with rank 0, which then is the one that is gone.
Before there are connections that could break, ranks answer the roll: whoever answered and gives no sign of life is
gone. What torch does to connect waits in one call for its whole timeout, so nobody begins it before all are there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from stratarec.errors import RankError, Terminated


class Termination:
    """Whether SIGTERM still ends what this process does."""

    def __init__(self) -> None:
        self._heeded = True

    def ignore(self) -> None:
        """From here on the process ends anyway."""
        self._heeded = False

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if self._heeded:
            self._heeded = False
            raise Terminated

    @contextmanager
    def listening(self) -> Iterator[Termination]:
        """Raise `Terminated` on the first SIGTERM; the others are ignored. Only the main thread may listen."""
        main = threading.current_thread() is threading.main_thread()
        kept = signal.signal(signal.SIGTERM, self._tell) if main else None
        try:
            yield self
        finally:
            if main:
                signal.signal(signal.SIGTERM, kept)


_LOOKS_PER_PATIENCE, _MOST_BEAT_SECONDS = 6, 1.0


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
                # A count, not a time: clocks of hosts differ.
                count += 1
                self._store.set(f"beat/{self._rank}", str(count))
                if self._stop.wait(min(self._timeout / _LOOKS_PER_PATIENCE, _MOST_BEAT_SECONDS)):
                    return

    def look(self, patience: float | None = None) -> None:
        """`RankError` where a rank that gave signs gave none for so many seconds, by default the timeout; cheap to call
        often."""
        now, patience = time.monotonic(), patience or self._timeout
        if now - self._looked < patience / _LOOKS_PER_PATIENCE:
            return
        self._looked = now
        for rank in self._others:
            name = f"beat/{rank}"
            if not self._store.check([name]):
                continue  # it has not come yet
            count = self._store.get(name)
            known, since = self._seen.get(rank, (None, now))
            if count != known:
                # By this rank's clock: those of hosts differ.
                self._seen[rank] = (count, now)
            elif now - since > patience:
                raise RankError(f"rank {rank} is gone: no sign of life for {patience:g} s; {_AGAIN}")


_GRACE_SECONDS, _LINGER_SECONDS = 5.0, 2.0
_POLL_SECONDS = 0.02
_AGAIN = "start again, or let torchrun do it with --max-restarts"
_ANSWERED, _HEARD, _BROKEN = "stratarec/answered", "stratarec/heard", "stratarec/broken"


class RollCall:
    """The list of one run's processes.

    Parameters
    ----------
    store : Store
        Shared by all ranks.
    rank, ranks : int
    holds_store : bool
        Whether the store ends with this process.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, holds_store: bool) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._holds_store, self._leaves = holds_store, False

    def leave(self, reason: str) -> None:
        """Note that this rank ends with an error; the first reason counts."""
        self._leaves = True
        with contextlib.suppress(RuntimeError):
            # What follows an error (closed connections) would say less than the error.
            if not self._store.check([self._left(self._rank)]):
                self._store.set(self._left(self._rank), reason)
                self._store.set(_BROKEN, reason)

    def linger(self) -> None:
        """Let the others read why this rank left, before the store goes with it."""
        if not (self._leaves and self._holds_store):
            return
        limit = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < limit and not self._store.check([self._left(rank) for rank in self._others()]):
                time.sleep(_POLL_SECONDS)

    def answer(
        self, about: Mapping[str, object], heart: Heartbeat, timeout: float,
        compare: Callable[[Sequence[Mapping[str, object]]], RankError | None],
    ) -> None:  # fmt: skip
        """Be there, and wait until all ranks are.

        Parameters
        ----------
        about : mapping
            JSON that this rank says of itself.
        heart : Heartbeat
            Of this rank.
        timeout : float
            Seconds to wait for those that did not come yet.
        compare : callable
            Is given what every rank said, in their order; what it returns is raised on all of them.

        Raises
        ------
        RankError
            For ranks that do not come, that are gone again, or that left with an error.
        """
        try:
            # Sorted: ranks may have made the same settings in another order.
            self._gather(_ANSWERED, json.dumps(about, sort_keys=True), heart, timeout)
            said = [json.loads(self._store.get(f"{_ANSWERED}/{rank}")) for rank in range(self._ranks)]
            different = compare(said)
            # Whoever answered may be gone again. The store may be rank 0's own: the others must have read it before.
            self._gather(_HEARD, "", heart, timeout, leave=different is not None and self._rank != 0)
        except RankError:
            raise
        except RuntimeError as error:
            raise _store_gone() from error
        if different is not None:
            raise different

    def _gather(self, what: str, content: str, heart: Heartbeat, timeout: float, *, leave: bool = False) -> None:
        """Be counted, and unless this rank may `leave`, wait until all are."""
        self._store.set(f"{what}/{self._rank}", content)
        deadline, counted = time.monotonic() + timeout, self._store.add(what, 1)
        while counted < self._ranks and not leave:
            if self._store.check([_BROKEN]):
                raise RankError(self._store.get(_BROKEN).decode())
            if self._rank == 0:  # one looks after the others, whose beats are many
                heart.look(_GRACE_SECONDS)
            if time.monotonic() > deadline:
                missing = [rank for rank in self._others() if not self._store.check([f"{what}/{rank}"])]
                raise RankError(
                    f"{_named(missing)} did not come within {timeout:g} s (distributed.timeout): look at its own "
                    "message, or start all ranks with the same address and number of ranks"
                )
            time.sleep(_POLL_SECONDS)
            counted = self._store.add(what, 0)

    def explain(self, error: BaseException) -> RankError:
        """What to raise where `error` ended the work of this rank: the rank that left, or that does not answer.

        Parameters
        ----------
        error : BaseException
            Of a collective that failed, or `Terminated`.

        Notes
        -----
        Takes up to five seconds, in which other ranks meet the same failure and answer.
        """
        try:
            return self._called(error)
        except RuntimeError:  # the store is gone, and with it whoever held it
            return _store_gone()

    def _called(self, error: BaseException) -> RankError:
        self._store.set(self._here(self._rank), "")
        # Long enough for ranks that are busy in a kernel to meet the failure themselves.
        deadline, silent = time.monotonic() + _GRACE_SECONDS, self._others()
        while silent and time.monotonic() < deadline:
            left = [rank for rank in self._others() if self._store.check([self._left(rank)])]
            # A reason beats a guess: who left said why, and others may only have lost their connection to it.
            if left:
                return RankError(self._store.get(self._left(left[0])).decode())
            silent = [rank for rank in silent if not self._store.check([self._here(rank)])]
            time.sleep(_POLL_SECONDS)
        if silent:
            what = f"{_named(silent)} {'is' if len(silent) == 1 else 'are'}"
            if isinstance(error, Terminated):
                return RankError(
                    f"{what} gone, or did not answer within {_GRACE_SECONDS:g} s when rank {self._rank} was told to "
                    "end (SIGTERM)"
                )
            return RankError(f"{what} gone: killed, out of memory, or cut off from rank {self._rank}; {_AGAIN}")
        if isinstance(error, Terminated):
            return RankError(f"rank {self._rank} was told to end (SIGTERM)")
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RankError(
            f"rank {self._rank}: ranks lost each other though all of them run ({first}); look at the network between "
            "them, or raise the timeout"
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    @staticmethod
    def _left(rank: int) -> str:
        return f"stratarec/left/{rank}"

    @staticmethod
    def _here(rank: int) -> str:
        return f"stratarec/here/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) != 1]} {', '.join(str(rank) for rank in ranks)}"


def _store_gone() -> RankError:
    return RankError("rank 0 is gone, which held the rendezvous store; see its own message, and start again")
