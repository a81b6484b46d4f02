"""Failures of ranks: SIGTERM as an exception, heartbeats, and reports of which rank ended and why.

`Termination`: when a rank fails, torchrun sends SIGTERM to the others, which would end a process
without a message. Here the signal becomes an exception, so that a rank reports why it ends. If
other code handles the signal, as a run does to write a checkpoint first, `Termination` does
nothing.

`Heartbeat`: some waits have unknown length, because a rank that reads a terabyte is slow but alive.
A thread of each rank increments a counter in the rendezvous store, and waiting ranks check that the
counters of the others change.

`RollCall`: a failed collective reports a broken connection and not the process that caused it. So
each process that meets a failure or ends with an error writes this to the store, where the others
read it. With torchrun, the agent holds the store, which then outlives every rank. Otherwise rank 0
holds it, and a missing store means that rank 0 has ended. Before ranks connect, each answers a roll
call; a rank that has answered and has no heartbeat has ended. No rank connects before all have
answered, because connecting waits in one call of torch for the complete timeout.
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
    """Signal handler that raises `Terminated` at the first SIGTERM."""

    def __init__(self) -> None:
        self._active = True

    def ignore(self) -> None:
        """Ignore SIGTERM from now on, because the process is already ending."""
        self._active = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._active:
            self._active = False
            raise Terminated

    @contextmanager
    def listening(self) -> Iterator[Termination]:
        """Context manager in which the first SIGTERM raises `Terminated` and later ones are
        ignored.

        It has an effect only in the main thread.
        """
        main = threading.current_thread() is threading.main_thread()
        previous = signal.signal(signal.SIGTERM, self._handle) if main else None
        try:
            yield self
        finally:
            if main:
                signal.signal(signal.SIGTERM, previous)


_LOOKS_PER_PATIENCE, _MOST_BEAT_SECONDS = 6, 1.0


class Heartbeat:
    """Context manager that sends this rank's heartbeat and observes the heartbeats of the others.

    Parameters
    ----------
    store : Store
        Rendezvous store that all ranks share.
    rank, ranks : int
        Number of this rank, and number of ranks.
    timeout : float
        Seconds without a heartbeat after which a rank is considered ended.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
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
        # When the rank that holds the store ends, the others notice it by their connections.
        with contextlib.suppress(RuntimeError):
            while True:
                # A counter and not a time, because the clocks of hosts differ.
                count += 1
                self._store.set(f"beat/{self._rank}", str(count))
                if self._stop.wait(min(self._timeout / _LOOKS_PER_PATIENCE, _MOST_BEAT_SECONDS)):
                    return

    def look(self, patience: float | None = None) -> None:
        """Raise `RankError` if a rank has had no heartbeat for `patience` seconds, by default the
        timeout.

        The call is cheap and may be frequent.
        """
        now, patience = time.monotonic(), patience or self._timeout
        if now - self._looked < patience / _LOOKS_PER_PATIENCE:
            return
        self._looked = now
        for rank in self._others:
            name = f"beat/{rank}"
            if not self._store.check([name]):
                continue  # it has not started yet
            count = self._store.get(name)
            previous, since = self._seen.get(rank, (None, now))
            if count != previous:
                # Measured with the clock of this rank, because the clocks of hosts differ.
                self._seen[rank] = (count, now)
            elif now - since > patience:
                raise RankError(f"rank {rank} does not answer: no heartbeat for {patience:g} s; {_AGAIN}")


_GRACE_SECONDS, _LINGER_SECONDS = 5.0, 2.0
_POLL_SECONDS = 0.02
_AGAIN = "start the run again, or let torchrun restart it with --max-restarts"
_ANSWERED, _HEARD, _BROKEN = "stratarec/answered", "stratarec/heard", "stratarec/broken"


class RollCall:
    """Messages of a run's processes in the rendezvous store: that they start, and why they end.

    Parameters
    ----------
    store : Store
        Shared by all ranks.
    rank, ranks : int
        Number of this rank, and number of ranks.
    holds_store : bool
        Whether this process holds the store, so that the store ends with the process.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, holds_store: bool) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._holds_store = holds_store
        self._leaves = False

    def leave(self, reason: str) -> None:
        """Store the reason why this rank ends with an error; later reasons are ignored."""
        self._leaves = True
        with contextlib.suppress(RuntimeError):
            # Later errors, of closed connections, say less than the first one.
            if not self._store.check([self._key_of_reason(self._rank)]):
                self._store.set(self._key_of_reason(self._rank), reason)
                self._store.set(_BROKEN, reason)

    def linger(self) -> None:
        """If the store ends with this process, wait until others have read why this rank ended."""
        if not (self._leaves and self._holds_store):
            return
        limit = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            reasons = [self._key_of_reason(rank) for rank in self._others()]
            while time.monotonic() < limit and not self._store.check(reasons):
                time.sleep(_POLL_SECONDS)

    def answer(
        self,
        about: Mapping[str, object],
        heart: Heartbeat,
        timeout: float,
        compare: Callable[[Sequence[Mapping[str, object]]], RankError | None],
    ) -> None:
        """Answer the roll call, and wait until all ranks have answered.

        Parameters
        ----------
        about : mapping
            Description of this rank, as JSON.
        heart : Heartbeat
            Heartbeat of this rank.
        timeout : float
            Seconds to wait for missing ranks.
        compare : callable
            Compares the descriptions of all ranks. If it returns an error, the error is raised on
            all ranks.

        Raises
        ------
        RankError
            If a rank does not start, has ended, or failed with an error.
        """
        try:
            # Sorted: ranks may have built equal settings in different orders.
            self._gather(_ANSWERED, json.dumps(about, sort_keys=True), heart, timeout)
            answers = [json.loads(self._store.get(f"{_ANSWERED}/{rank}")) for rank in range(self._ranks)]
            different = compare(answers)
            # A rank may have ended after its answer. If rank 0 holds the store, the others must
            # read it before it ends.
            self._gather(_HEARD, "", heart, timeout, leave=different is not None and self._rank != 0)
        except RankError:
            raise
        except RuntimeError as error:
            raise _store_gone() from error
        if different is not None:
            raise different

    def _gather(
        self, key: str, content: str, heart: Heartbeat, timeout: float, *, leave: bool = False
    ) -> None:
        """Store this rank's content, and wait for that of all ranks unless `leave` is true."""
        self._store.set(f"{key}/{self._rank}", content)
        deadline, counted = time.monotonic() + timeout, self._store.add(key, 1)
        while counted < self._ranks and not leave:
            if self._store.check([_BROKEN]):
                raise RankError(self._store.get(_BROKEN).decode())
            if self._rank == 0:  # a single rank checks the heartbeats of the others
                heart.look(_GRACE_SECONDS)
            if time.monotonic() > deadline:
                missing = [rank for rank in self._others() if not self._store.check([f"{key}/{rank}"])]
                raise RankError(
                    f"{_named(missing)} did not start within {timeout:g} s (distributed.timeout): see its "
                    "own message, or start all ranks with the same address and number of ranks"
                )
            time.sleep(_POLL_SECONDS)
            counted = self._store.add(key, 0)

    def explain(self, error: BaseException) -> RankError:
        """Return the error to raise after `error` ended this rank's work. It names the rank that
        ended or is silent.

        Parameters
        ----------
        error : BaseException
            Error of a failed collective, or `Terminated`.

        Notes
        -----
        The call takes up to five seconds, so that other ranks can meet the same failure and report
        it.
        """
        try:
            return self._find_cause(error)
        except RuntimeError:  # the store ended with the rank that held it
            return _store_gone()

    def _find_cause(self, error: BaseException) -> RankError:
        self._store.set(self._here(self._rank), "")
        # Long enough for ranks that are busy in a kernel to meet the failure.
        deadline, silent = time.monotonic() + _GRACE_SECONDS, self._others()
        while silent and time.monotonic() < deadline:
            ended = [rank for rank in self._others() if self._store.check([self._key_of_reason(rank)])]
            # A reported reason is preferred: silent ranks may only have lost their connection to
            # that rank.
            if ended:
                return RankError(self._store.get(self._key_of_reason(ended[0])).decode())
            silent = [rank for rank in silent if not self._store.check([self._here(rank)])]
            time.sleep(_POLL_SECONDS)
        if silent:
            if isinstance(error, Terminated):
                return RankError(
                    f"{_named(silent)} ended, or did not answer within {_GRACE_SECONDS:g} s when rank "
                    f"{self._rank} received SIGTERM"
                )
            return RankError(
                f"{_named(silent)} ended: killed, out of memory, or disconnected from "
                f"rank {self._rank}; {_AGAIN}"
            )
        if isinstance(error, Terminated):
            return RankError(f"rank {self._rank} received SIGTERM")
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RankError(
            f"rank {self._rank}: ranks lost their connections although all ranks run ({first}); check the "
            "links between them, or increase distributed.timeout"
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    @staticmethod
    def _key_of_reason(rank: int) -> str:
        return f"stratarec/left/{rank}"

    @staticmethod
    def _here(rank: int) -> str:
        return f"stratarec/here/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) != 1]} {', '.join(str(rank) for rank in ranks)}"


def _store_gone() -> RankError:
    return RankError(
        "rank 0, which runs the rendezvous store, ended; see its message, and start the run again"
    )
