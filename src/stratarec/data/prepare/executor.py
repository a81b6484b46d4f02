"""What `prepare` does in numbered pieces that are independent of each other, and who does them.

A stage leaves its outcomes in files, so that it matters neither who does a piece nor in which order, and a piece may be
done twice. Nothing crosses partitions but sums of counts, moments and repeats, which the process that runs `prepare`
adds in order of their numbers: the bytes of a data set do not depend on who did what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from stratarec.progress import Progress


class Stage(Protocol):
    """A part of `prepare` in pieces 0, 1, ...; it can be pickled."""

    def __call__(self, number: int) -> Iterator[int]:
        """Do a piece, and give what to advance the progress by."""
        ...

    def memory(self, number: int) -> int:
        """About how many bytes a process holds that does the piece."""
        ...


class Executor(Protocol):
    """Does the pieces of stages."""

    @property
    def readers(self) -> int:
        """How many may read one log at once."""
        ...

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        """Pieces to come write in `work`, which this process holds, and may read `logs`."""
        ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        """Do those pieces of `stage`; whatever one of them raises ends it."""
        ...


class SerialExecutor:
    """One piece after another, in this process."""

    readers = 1

    def begin(self, work: Path, logs: Sequence[str]) -> None: ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        for number in numbers:
            for amount in stage(number):
                progress.advance(amount)
