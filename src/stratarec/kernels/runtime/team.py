"""Teams: the threads that run a kernel together.

The threads of a team, its *members*, take tasks from a shared counter, so a late or interrupted
thread delays nobody. The result must not depend on which member does a task.

On few cores, two pools of threads slow each other down: torch's OpenMP threads spin for some
milliseconds after each of torch's operations, and threads of another pool wait for their cores. So
a team borrows torch's threads while they are awake (`openmp`). While they sleep, the calling thread
leads the team, and helper threads (`helpers`) join it if they come before the work is done. OpenMP
is not used then: at its closing barrier, a kernel that ran after a pause or next to another busy
process waited 5 to 10 ms for a thread that had nothing left to do.
"""

from __future__ import annotations

from typing import NamedTuple

from stratarec.kernels.runtime.helpers import AVAILABLE, HELPERS
from stratarec.kernels.runtime.openmp import awake
from stratarec.kernels.runtime.outline import BODY, run_team, take

__all__ = ["BODY", "Team", "run_team", "take", "team_of"]


class Team(NamedTuple):
    """Threads that run a kernel.

    Parameters
    ----------
    launch : int
        Address of the function that starts the threads, torch's or `workers.lead`; 0 for the
        calling thread alone.
    threads : int
        Largest number of threads.
    board : int
        Address of the board on which helpers find work; 0 for torch's threads.
    """

    launch: int
    threads: int
    board: int


_ALONE = Team(0, 1, 0)


def team_of(threads: int) -> Team:
    """Return a team of `threads` threads for one kernel that starts now."""
    if threads < 2 or not AVAILABLE:
        return _ALONE
    # If helper threads were always used, next to torch's pool, a complete step would take 73 ms
    # instead of 64 (D = 64, batch 4,096), whether they spin or not.
    if launch := awake(threads):
        return Team(launch, threads, 0)
    launch, board = HELPERS.ready(threads - 1)
    return Team(launch, threads, board)
