"""Who is still there: what processes tell each other by the store once a collective has failed.

A collective says that a connection broke, never which process is to blame. So each process that meets a failure, or
leaves with an error of its own, writes that down in the rendezvous store; the others read it. Under `torchrun` the
store is held by its agent and outlives every rank; without it, it ends with rank 0, which then is the one that is gone.
"""

from __future__ import annotations

import contextlib
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from stratarec.distributed.termination import Terminated
from stratarec.errors import RankError

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02


class RollCall:
    """The list of one run's processes.

    Parameters
    ----------
    store : Store
        Shared by all ranks.
    rank, ranks : int
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks

    def leave(self, reason: str) -> None:
        """Note that this rank ends with an error; the first reason counts."""
        with contextlib.suppress(RuntimeError):
            if not self._store.check([self._left(self._rank)]):
                self._store.set(self._left(self._rank), reason)

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
            return RankError("rank 0 is gone, which held the rendezvous store; see its own message, and start again")

    def _called(self, error: BaseException) -> RankError:
        self._store.set(self._here(self._rank), "")
        deadline, silent = time.monotonic() + _GRACE_SECONDS, self._others()
        while silent and time.monotonic() < deadline:
            left = [rank for rank in self._others() if self._store.check([self._left(rank)])]
            if left:
                return RankError(self._store.get(self._left(left[0])).decode())
            silent = [rank for rank in silent if not self._store.check([self._here(rank)])]
            time.sleep(_POLL_SECONDS)
        if silent:
            names = ", ".join(str(rank) for rank in silent)
            what = f"rank {names} is" if len(silent) == 1 else f"ranks {names} are"
            if isinstance(error, Terminated):
                return RankError(
                    f"{what} gone, or did not answer within {_GRACE_SECONDS:g} s when rank {self._rank} was told to "
                    "end (SIGTERM)"
                )
            return RankError(
                f"{what} gone: killed, out of memory, or cut off from rank {self._rank}; start again, or let torchrun "
                "do it with --max-restarts"
            )
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
