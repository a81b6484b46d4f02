"""How many threads a run has, and how they wait, on a machine that others use, too.

It follows what steps take, for load says little: a neighbour may be of another container, or wait for its disk. Every
minute, and when steps become slower or faster than they were, other ways are tried for a moment each, and the fastest
is kept:

    all threads, which turn while they wait     the fastest on a machine for oneself
    ... which sleep while they wait             leaves to others what is not used; no bit changes
    half of them, a quarter ... one             tried only where sleeping is the faster: the machine is shared

Kernels give the same bits at any number of threads, matrix products of torch may not: so a run says when their number
changes, and where `train.threads` is set it never does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from stratarec.kernels.runtime.cores import cores, most_threads
from stratarec.kernels.runtime.waiting import AVAILABLE, sleep_while_waiting

# Of step seconds: how long a way is tried, before the first trial, between two of them at most, and at first at least.
_TRIAL, _FIRST, _REGULAR, _GAP = 0.25, 0.5, 60.0, 2.0
# How much faster another way must be, and how far steps may be from what they took.
_BETTER, _SLOWER, _FASTER = 0.95, 1.25, 0.5
# A way whose first step takes so many times what the best one takes is tried no longer.
_HOPELESS = 4
# Another number of threads may have other bits, so it must be worth it. With 0.8 a run stayed on two that sleep where
# one was a fifth faster: beside one busy process 0.77 of its fair share for 0.91, beside four 0.52 for 0.61.
_FEWER = 0.92
_LOOK, _SHOWN = 1.0, 3


class Way(NamedTuple):
    """How a step is computed."""

    threads: int
    sleep: bool

    def use(self) -> None:
        """From now on."""
        torch.set_num_threads(self.threads)
        sleep_while_waiting(self.sleep, self.threads)


def share_of(asked: int, most: int, ranks: int = 1) -> int:
    """Threads of each of the ranks of a machine: as `asked`, or for 0 its share of the cores; torch has `most`."""
    return asked or max(1, min(most_threads(most), cores() // ranks))


class Sharing:
    """Threads of one run, in the process and the Python thread that train it.

    Parameters
    ----------
    asked : int
        ``train.threads``; 0 for as many as there are cores, and fewer where that is faster.
    ranks : int
        Processes of the run on this machine, which divide its cores.
    say : callable
        Told when the number of threads changes.
    use : callable
        Puts a way into effect.
    """

    def __init__(
        self, asked: int, ranks: int, say: Callable[[str], None], use: Callable[[Way], None] = Way.use
    ) -> None:
        self._asked, self._ranks, self._say, self._use = asked, ranks, say, use
        self._most = torch.get_num_threads()
        self.threads = self._share()
        """Most that it has."""
        self._way = Way(self.threads, sleep=False)
        self._changes: list[tuple[int, Way]] = []
        self._said = False
        # Seconds of steps so far, when the last trial ended and how long after it the next may begin.
        self._spent, self._tried, self._gap = 0.0, _FIRST - _REGULAR, _GAP
        # What steps took since the last look, and what they took at the last decision.
        self._seconds, self._steps, self._level = 0.0, 0, 0.0
        self._trying = self._slower = False
        self._left: list[Way] = []
        self._found: dict[Way, float] = {}

    def __enter__(self) -> Sharing:
        self._use(self._way)
        return self

    def __exit__(self, *_: object) -> None:
        self._use(Way(self.threads, sleep=False))

    def _share(self) -> int:
        return share_of(self._asked, self._most, self._ranks)

    def stepped(self, seconds: float, step: int) -> None:
        """A step took so long, and `step` comes next."""
        self._spent += seconds
        self._seconds += seconds
        self._steps += 1
        if self._trying:
            if self._steps == 0 and seconds < _HOPELESS * min(self._found.values(), default=math.inf):
                self._seconds = 0.0  # the first one of a way wakes threads
            elif self._seconds >= _TRIAL:
                self._tried_one(self._forget(), step)
        elif self._spent - self._tried >= _REGULAR:
            self._look_at_cores(step)
            self._begin()
        elif self._seconds >= _LOOK:
            taken = self._forget()
            strange = not _FASTER * self._level < taken < _SLOWER * self._level
            if strange and self._spent - self._tried >= self._gap:
                self._begin(slower=taken > self._level > 0)

    def _forget(self) -> float:
        taken = self._seconds / max(self._steps, 1)
        self._seconds, self._steps = 0.0, 0
        return taken

    def _look_at_cores(self, step: int) -> None:
        """Follow a quota that was changed."""
        share = self._share()
        if share != self.threads:
            self.threads = share
            self._go(Way(share, sleep=False), step)

    def _begin(self, *, slower: bool = False) -> None:
        """Try the way that is in use once more, then others."""
        # Turning is what costs the most where others have the cores, and steps that are slower yet promise no better.
        self._slower, self._tried = slower, self._spent
        self._forget()
        self._trying = self.threads > 1 and AVAILABLE
        if self._trying:
            self._found, self._left = {}, [self._way]
            self._next()

    def _next(self) -> None:
        self._use(self._left[0])
        self._seconds, self._steps = 0.0, -1

    def _tried_one(self, taken: float, step: int) -> None:
        self._found[self._left.pop(0)] = taken
        self._left += [way for way in self._others() if way not in self._found and way not in self._left]
        if self._left:
            self._next()
            return
        best = min(self._found, key=lambda way: self._found[way] / (1.0 if way.threads == self.threads else _FEWER))
        changes = self._found[best] < _BETTER * self._found[self._way]
        best = best if changes else self._way
        self._level, self._tried, self._trying = self._found[best], self._spent, False
        self._gap = _GAP if changes else min(2 * self._gap, _REGULAR)
        self._use(best)
        if changes:
            self._go(best, step)

    def _others(self) -> list[Way]:
        """What is worth trying after what was."""
        awake, asleep = (Way(self.threads, sleep=each) for each in (False, True))
        first = [asleep] if self._slower else [awake, asleep]
        if not self._found.keys() >= set(first):
            return first
        best = min(self._found, key=lambda way: self._found[way])
        if self._asked or best == awake:
            return []
        near = [min(2 * self._way.threads, self.threads)]
        if best.threads == min(way.threads for way in self._found) > 1:
            near.append(best.threads // 2)
        return [Way(threads, sleep=threads > 1) for threads in near]

    def _go(self, way: Way, step: int) -> None:
        """Change to a way for longer than a trial."""
        if way.threads != self._way.threads and not self._said:
            self._said = True
            self._say(
                f"threads: {way.threads} for {self._way.threads} from step {step:,} on, as cores are shared; another "
                "run may differ in last bits, unless train.threads is set"
            )
        self._way = way
        self._use(way)
        self._changes.append((step, way))

    @property
    def remark(self) -> str:
        """What changed, in a line; nothing where nothing did."""
        if not self._changes:
            return ""
        parts = [f"{self._told(way)} from step {step:,} on" for step, way in self._changes[-_SHOWN:]]
        more = len(self._changes) - len(parts)
        earlier = f" ({more:,} changes before)" if more else ""
        return f"{cores()} cores, shared: {', '.join(parts)}{earlier}"

    def _told(self, way: Way) -> str:
        threads = f"{way.threads} thread{'s' * (way.threads != 1)}"
        return f"{threads}, asleep while they wait," if way.sleep else threads
