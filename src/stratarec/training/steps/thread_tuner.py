"""Choose how many threads a run uses, and how they wait for work, on a machine that other processes also use.

The tuner measures how long threads that are ready to run wait for a core. If they wait much, other processes use the
cores, and the run moves one level down this list. If they have waited little for long enough, it moves one level up:

    all threads, busy-waiting                   the fastest on a machine without other processes
    all threads, sleeping while they wait       leaves idle cores to other processes; results keep the same bits
    half of the threads, a quarter ... one      for cores that other processes use all the time

Kernels give the same bits with any number of threads, but matrix products of torch may not. So the tuner reports the
first step with a different number of threads. If `train.threads` is set, the tuner changes nothing.
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

# Seconds between two measurements, and the shortest and longest time before a move up.
_INTERVAL, _SHORTEST, _LONGEST = 0.5, 2.0, 60.0
# Share of the threads' time spent waiting for a core, above which the run moves down, and below which it may move up.
# Measured with DCN V2 and batches of 256 on two cores. Shares for two busy-waiting threads, two sleeping threads and
# one thread: without other processes 0.10, 0.11, 0.07; next to one busy process 0.38, 0.35, 0.16; next to four busy
# processes 0.69, 0.67, 0.62.
_HIGH, _LOW = 0.2, 0.13
# Number of cores that other processes must take before the run moves down. Threads also wait for each other, and they
# wait if a CPU quota stops all of them at once; fewer threads would not help against either.
_MISSING = 0.2
_SHOWN = 3
_TASKS = Path("/proc/self/task")


class ThreadConfig(NamedTuple):
    """Number of threads, and whether they sleep while they wait for work."""

    threads: int
    sleep: bool

    def use(self) -> None:
        """Apply the configuration to this process."""
        torch.set_num_threads(self.threads)
        sleep_while_waiting(self.sleep, self.threads)

    def __str__(self) -> str:
        text = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{text}, asleep while they wait," if self.sleep else text


class CoreTime(NamedTuple):
    """Seconds that the threads of this process ran on a core, and seconds that they were ready but waited for one."""

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

    It is `asked`, or, if that is 0, a rank's share of the cores. `most` is the number of threads that torch has.
    """
    return asked or max(1, min(most_threads(most), cores() // ranks))


class ThreadTuner:
    """Chooses the threads of one run. Use it in the process and the Python thread that train the run.

    Parameters
    ----------
    asked : int
        ``train.threads``. With 0, the run uses as many threads as there are cores, and fewer while other processes use
        the cores.
    ranks : int
        Number of processes of the run on this machine. They divide its cores.
    report : callable
        Called with the step and a reason when the number of threads changes for the first time.
    use : callable
        Applies a configuration to this process.
    clock, core_time : callable
        Return the wall time in seconds, and the `CoreTime` of this process.
    """

    def __init__(
        self,
        asked: int,
        ranks: int,
        report: Callable[[int, str], None],
        use: Callable[[ThreadConfig], None] = ThreadConfig.use,
        clock: Callable[[], float] = time.perf_counter,
        core_time: Callable[[], CoreTime] = CoreTime.now,
    ) -> None:
        self._asked, self._ranks, self._report, self._use = asked, ranks, report, use
        self._clock, self._core_time = clock, core_time
        self._most = torch.get_num_threads()
        self.threads = share_of(asked, self._most, ranks)
        """Maximum number of threads."""
        self.has_helper: Callable[[], bool] = lambda: False
        """Whether another process works for this run. It takes cores, but fewer threads would change bits, so threads
        then only sleep while they wait."""
        self._first, self._reported = self.threads, False
        self._level = 0
        self._changes: list[tuple[int, ThreadConfig]] = []
        # Seconds to wait before a move up. They double whenever a move up has to be undone.
        self._patience = _SHORTEST
        self._measured = self._changed = -1.0
        self._before = CoreTime(0.0, 0.0)
        self._went_up = False
        self._quota, self._quota_read = math.inf, -math.inf

    def __enter__(self) -> ThreadTuner:
        self._use(self._ladder[self._level])  # the second phase of a run goes on as the first one ended
        return self

    def __exit__(self, *_: object) -> None:
        self._use(ThreadConfig(self.threads, sleep=False))

    @property
    def _ladder(self) -> list[ThreadConfig]:
        """Configurations in order, from the fastest one on idle cores to the one that needs the fewest cores."""
        rungs, threads = [ThreadConfig(self.threads, sleep=False)], self.threads
        while threads > 1:
            rungs.append(ThreadConfig(threads, sleep=True))
            threads //= 2
        return [*rungs, ThreadConfig(1, sleep=False)] if self.threads > 1 else rungs

    def after_step(self, step: int) -> None:
        """Measure at most every half second, and change the configuration if threads wait for cores.

        `step` is the number of the next step.
        """
        now = self._clock()
        if self._asked or not AVAILABLE or now - self._measured < _INTERVAL:
            return
        before, self._before = self._before, self._core_time()
        last, self._measured = self._measured, now
        ran, waited = (max(b - a, 0.0) for a, b in zip(before, self._before, strict=True))
        if now - self._quota_read > _LONGEST:
            self._quota, self._quota_read = quota() / self._ranks, now  # 5 ms
        threads = share_of(0, self._most, self._ranks)
        if threads != self.threads:  # the CPU quota has changed
            self.threads = threads
            self._change(0, now, step)
        elif last >= 0 and ran > 0:
            has_cores = ran / (now - last) > min(self.threads, self._quota) - _MISSING
            self._decide(0.0 if has_cores else waited / (ran + waited), now, step)

    def _decide(self, share: float, now: float, step: int) -> None:
        """Move one level down if `share`, the share of time spent waiting, is large. Move one level up if it has been
        small for long enough.
        """
        elapsed = now - self._changed
        lowest = len(self._ladder) - 1
        if share > _HIGH and self._level < (min(1, lowest) if self.has_helper() else lowest):
            if self._went_up and elapsed < _SHORTEST:
                self._patience = min(2 * self._patience, _LONGEST)
            self._went_up = False
            self._change(self._level + 1, now, step)
        elif share < _LOW and self._level > 0:
            if self._went_up and elapsed >= _SHORTEST:
                self._patience = _SHORTEST
            if elapsed >= self._patience:
                self._went_up = True
                self._change(self._level - 1, now, step)

    def _change(self, level: int, now: float, step: int) -> None:
        self._level, self._changed = level, now
        config = self._ladder[level]
        self._changes.append((step, config))
        if config.threads != self._first and not self._reported:
            self._reported = True
            reason = f"threads change from {self._first} to {config.threads}, as other processes use the cores"
            self._report(step, reason)
        self._use(config)

    @property
    def remark(self) -> str:
        """Text of one line about the last changes; empty if there were none."""
        if not self._changes:
            return ""
        parts = [f"{config} from step {step:,} on" for step, config in self._changes[-_SHOWN:]]
        more = len(self._changes) - len(parts)
        earlier = f" ({more:,} changes before)" if more else ""
        return f"{cores()} cores, shared: {', '.join(parts)}{earlier}"
