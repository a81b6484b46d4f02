"""Choose how the threads of a run wait for work, on a machine that other processes also use.

Threads that wait busily are the fastest on a machine without other processes. Threads that sleep
leave idle cores to other processes. The tuner measures how long threads that are ready to run wait
for a core: if they wait much, other processes use the cores, and the threads sleep. If they have
waited little for long enough, they wait busily again.

The number of threads stays the same, because matrix products of torch may have other bits with
another number. Next to busy processes, sleeping threads are as fast as fewer threads
(`docs/log.md`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from stratarec.kernels.runtime.cores import cores, most_threads, quota
from stratarec.kernels.runtime.helpers import AVAILABLE
from stratarec.kernels.runtime.waiting import sleep_while_waiting

# Seconds between two measurements, and the shortest and longest time before threads wait busily
# again.
_INTERVAL, _SHORTEST, _LONGEST = 0.5, 2.0, 60.0
# Share of the threads' time spent waiting for a core, above which they sleep, and below which they
# may wait busily. Measured with DCN V2 and batches of 256 on two cores. Shares for two busy-waiting
# threads and for two sleeping threads: without other processes 0.10, 0.11; next to one busy process
# 0.38, 0.35; next to four 0.69, 0.67.
_HIGH, _LOW = 0.2, 0.13
# Number of cores that other processes must take before threads sleep. Threads also wait for each
# other, and they wait if a CPU quota stops all of them at once; sleeping would not help against
# either.
_MISSING = 0.2
_SHOWN = 3
_TASKS = Path("/proc/self/task")


class CoreTime(NamedTuple):
    """Seconds that the threads of this process ran on a core, and seconds that they were ready but
    waited for one.
    """

    ran: float
    waited: float

    @classmethod
    def now(cls) -> CoreTime:
        """Return the totals over all living threads; zeros if the system does not provide them."""
        ran = waited = 0
        for path in _TASKS.glob("*/schedstat"):
            try:
                first, second, _ = path.read_text().split()
            except (OSError, ValueError):  # the thread has ended, or the kernel keeps no such statistics
                continue
            ran, waited = ran + int(first), waited + int(second)
        return cls(ran / 1e9, waited / 1e9)


def share_of(asked: int, most: int, ranks: int = 1) -> int:
    """Return the number of threads for each of `ranks` ranks on this machine.

    It is `asked`, or, if that is 0, a rank's share of the cores. `most` is the number of threads
    that torch has.
    """
    return asked or max(1, min(most_threads(most), cores() // ranks))


class ThreadTuner:
    """Chooses how the threads of one run wait. Use it in the process and the Python thread that
    train the run.

    Parameters
    ----------
    asked : int
        ``train.threads``, the number of threads; 0 for as many as there are cores.
    ranks : int
        Number of processes of the run on this machine. They divide its cores.
    use : callable
        Called with true if threads shall sleep while they wait, and with the number of threads.
    clock, core_time : callable
        Return the wall time in seconds, and the `CoreTime` of this process.
    """

    def __init__(
        self,
        asked: int,
        ranks: int,
        use: Callable[[bool, int], None] = sleep_while_waiting,
        clock: Callable[[], float] = time.perf_counter,
        core_time: Callable[[], CoreTime] = CoreTime.now,
    ) -> None:
        self._ranks = ranks
        self._use = use
        self._clock = clock
        self._core_time = core_time
        self.threads = share_of(asked, torch.get_num_threads(), ranks)
        """Number of threads."""
        self._is_asleep = False
        self._changes: list[tuple[int, bool]] = []
        # Seconds to wait before threads wait busily again. They double whenever this has to be
        # undone.
        self._patience = _SHORTEST
        self._measured = self._changed = -1.0
        self._before = CoreTime(0.0, 0.0)
        self._quota = math.inf
        self._quota_read = -math.inf

    def __enter__(self) -> ThreadTuner:
        self._use(self._is_asleep, self.threads)  # the second phase of a run goes on as the first one ended
        return self

    def __exit__(self, *_: object) -> None:
        self._use(False, self.threads)

    def after_step(self, step: int) -> None:
        """Measure at most every half second, and change how threads wait if they wait for cores.

        `step` is the number of the next step.
        """
        now = self._clock()
        if not AVAILABLE or self.threads == 1 or now - self._measured < _INTERVAL:
            return
        before, self._before = self._before, self._core_time()
        last, self._measured = self._measured, now
        ran, waited = (max(b - a, 0.0) for a, b in zip(before, self._before, strict=True))
        if now - self._quota_read > _LONGEST:
            # Rarely, because reading the quota takes 5 ms.
            self._quota = quota() / self._ranks
            self._quota_read = now
        if last >= 0 and ran > 0:
            has_cores = ran / (now - last) > min(self.threads, self._quota) - _MISSING
            self._decide(0.0 if has_cores else waited / (ran + waited), now, step)

    def _decide(self, share: float, now: float, step: int) -> None:
        """Let threads sleep if `share`, the share of time spent waiting for cores, is large. Let
        them wait busily if it has been small for long enough.
        """
        elapsed = now - self._changed
        if not self._is_asleep and share > _HIGH:
            was_wrong = bool(self._changes) and elapsed < _SHORTEST
            self._patience = min(2 * self._patience, _LONGEST) if was_wrong else _SHORTEST
            self._change(True, now, step)
        elif self._is_asleep and share < _LOW and elapsed >= self._patience:
            self._change(False, now, step)

    def _change(self, is_asleep: bool, now: float, step: int) -> None:
        self._is_asleep = is_asleep
        self._changed = now
        self._changes.append((step, is_asleep))
        self._use(is_asleep, self.threads)

    @property
    def remark(self) -> str:
        """Text of one line about the last changes; empty if there were none."""
        if not self._changes:
            return ""
        parts = [
            f"{'asleep' if is_asleep else 'busy'} from step {step:,} on"
            for step, is_asleep in self._changes[-_SHOWN:]
        ]
        more = len(self._changes) - len(parts)
        earlier = f" ({more:,} changes before)" if more else ""
        return f"{cores()} cores, shared: threads that wait are {', '.join(parts)}{earlier}"
