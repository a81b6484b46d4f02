"""Choose the number of threads of a run, and how they wait, on a machine that other processes use.

The tuner measures steps, because the load average says little: another process may be in another container, or wait for
its disk. Every minute, and when steps become slower or faster, it tries other configurations for a moment each and
keeps the fastest:

    all threads, busy-waiting                   the fastest on a machine without other processes
    all threads, sleeping while they wait       leaves idle cores to other processes; no bit changes
    half of them, a quarter ... one             tried only if sleeping is faster: other processes use the cores

Kernels give the same bits with any number of threads, matrix products of torch may not. So the tuner reports the first
step with another number of threads, a trial included. If `train.threads` is set, the number never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from stratarec.kernels.runtime.cores import cores, most_threads
from stratarec.kernels.runtime.waiting import AVAILABLE, sleep_while_waiting

# Seconds of steps: length of a trial, time before the first trial, longest and first shortest time between two trials.
_TRIAL, _FIRST, _REGULAR, _GAP = 0.25, 0.5, 60.0, 2.0
# Ratio of step times below which a configuration replaces the current one; ratios that start a trial.
_BETTER, _SLOWER, _FASTER = 0.95, 1.25, 0.5
# A trial ends early if its first step takes so many times the fastest step time.
_HOPELESS = 4
# Another number of threads may have other bits, so it must be worth it. With 0.8 a run stayed on two that sleep where
# one was a fifth faster: beside one busy process 0.77 of its fair share for 0.91, beside four 0.52 for 0.61.
_FEWER = 0.92
_LOOK, _SHOWN = 1.0, 3


class ThreadConfig(NamedTuple):
    """Number of threads, and whether they sleep while they wait."""

    threads: int
    sleep: bool

    def use(self) -> None:
        """Apply the configuration to this process."""
        torch.set_num_threads(self.threads)
        sleep_while_waiting(self.sleep, self.threads)


def share_of(asked: int, most: int, ranks: int = 1) -> int:
    """Return the threads of each rank of a machine: `asked`, or for 0 a share of the cores; torch has `most`."""
    return asked or max(1, min(most_threads(most), cores() // ranks))


class ThreadTuner:
    """Threads of one run, in the process and the Python thread that train it.

    Parameters
    ----------
    asked : int
        ``train.threads``; 0 for as many as there are cores, and fewer where that is faster.
    ranks : int
        Processes of the run on this machine, which divide its cores.
    report : callable
        Called with the step and a reason when a step has another number of threads for the first time.
    use : callable
        Applies a configuration.
    """

    def __init__(
        self,
        asked: int,
        ranks: int,
        report: Callable[[int, str], None],
        use: Callable[[ThreadConfig], None] = ThreadConfig.use,
    ) -> None:
        self._asked, self._ranks, self._report, self._use = asked, ranks, report, use
        self._most = torch.get_num_threads()
        self.threads = self._share()
        """Maximum number of threads."""
        self._config = ThreadConfig(self.threads, sleep=False)
        self._changes: list[tuple[int, ThreadConfig]] = []
        self._first, self._reported = self.threads, False
        # Seconds of steps so far, when the last trial ended, and the least time from it to the next one.
        self._spent, self._tried, self._gap = 0.0, _FIRST - _REGULAR, _GAP
        # Seconds and number of steps since the last measurement, and the step time at the last decision.
        self._seconds, self._steps, self._level = 0.0, 0, 0.0
        self._trying = self._slower = False
        self._left: list[ThreadConfig] = []
        self._times: dict[ThreadConfig, float] = {}

    def __enter__(self) -> ThreadTuner:
        self._use(self._config)
        return self

    def __exit__(self, *_: object) -> None:
        self._use(ThreadConfig(self.threads, sleep=False))

    def _share(self) -> int:
        return share_of(self._asked, self._most, self._ranks)

    def stepped(self, seconds: float, step: int) -> None:
        """Record the seconds of a step; `step` is the next one."""
        self._spent += seconds
        self._seconds += seconds
        self._steps += 1
        if self._trying:
            if self._steps == 0 and seconds < _HOPELESS * min(self._times.values(), default=math.inf):
                self._seconds = 0.0  # the first step of a configuration wakes threads
            elif self._seconds >= _TRIAL:
                self._end_trial(self._mean_seconds(), step)
        elif self._spent - self._tried >= _REGULAR:
            self._look_at_cores(step)
            self._begin(step)
        elif self._seconds >= _LOOK:
            taken = self._mean_seconds()
            strange = not _FASTER * self._level < taken < _SLOWER * self._level
            if strange and self._spent - self._tried >= self._gap:
                self._begin(step, slower=taken > self._level > 0)

    def _mean_seconds(self) -> float:
        """Return the mean seconds of the steps since the last call."""
        taken = self._seconds / max(self._steps, 1)
        self._seconds, self._steps = 0.0, 0
        return taken

    def _look_at_cores(self, step: int) -> None:
        """Follow a change of the CPU quota."""
        share = self._share()
        if share != self.threads:
            self.threads = share
            self._change(ThreadConfig(share, sleep=False), step)

    def _begin(self, step: int, *, slower: bool = False) -> None:
        """Start trials with the current configuration."""
        # Busy-waiting costs the most if other processes use the cores; steps that became slower make no gain likely.
        self._slower, self._tried = slower, self._spent
        self._mean_seconds()
        self._trying = self.threads > 1 and AVAILABLE
        if self._trying:
            self._times, self._left = {}, [self._config]
            self._next_trial(step)

    def _next_trial(self, step: int) -> None:
        self._apply(self._left[0], step)
        self._seconds, self._steps = 0.0, -1

    def _end_trial(self, taken: float, step: int) -> None:
        self._times[self._left.pop(0)] = taken
        self._left += [each for each in self._candidates() if each not in self._times and each not in self._left]
        if self._left:
            self._next_trial(step)
            return
        times = self._times
        best = min(times, key=lambda each: times[each] / (1.0 if each.threads == self.threads else _FEWER))
        changes = times[best] < _BETTER * times[self._config]
        best = best if changes else self._config
        self._level, self._tried, self._trying = times[best], self._spent, False
        self._gap = _GAP if changes else min(2 * self._gap, _REGULAR)
        if changes:
            self._change(best, step)
        else:
            self._apply(best, step)

    def _candidates(self) -> list[ThreadConfig]:
        """Return the configurations to try after those that were tried."""
        awake, asleep = (ThreadConfig(self.threads, sleep=each) for each in (False, True))
        first = [asleep] if self._slower else [awake, asleep]
        if not self._times.keys() >= set(first):
            return first
        best = min(self._times, key=lambda each: self._times[each])
        if self._asked or best == awake:
            return []
        near = [min(2 * self._config.threads, self.threads)]
        if best.threads == min(each.threads for each in self._times) > 1:
            near.append(best.threads // 2)
        return [ThreadConfig(threads, sleep=threads > 1) for threads in near]

    def _change(self, config: ThreadConfig, step: int) -> None:
        """Apply a configuration until the next trials."""
        self._config = config
        self._apply(config, step)
        self._changes.append((step, config))

    def _apply(self, config: ThreadConfig, step: int) -> None:
        """Apply a configuration; report the first one with another number of threads."""
        before = self._first
        if config.threads != before and not self._reported:
            self._reported = True
            self._report(step, f"threads change from {before} to {config.threads}, as other processes use the cores")
        self._use(config)

    @property
    def remark(self) -> str:
        """Lasting changes in one line; empty if there were none."""
        if not self._changes:
            return ""
        parts = [f"{_describe(config)} from step {step:,} on" for step, config in self._changes[-_SHOWN:]]
        more = len(self._changes) - len(parts)
        earlier = f" ({more:,} changes before)" if more else ""
        return f"{cores()} cores, shared: {', '.join(parts)}{earlier}"


def _describe(config: ThreadConfig) -> str:
    threads = f"{config.threads} thread{'s' * (config.threads != 1)}"
    return f"{threads}, asleep while they wait," if config.sleep else threads
