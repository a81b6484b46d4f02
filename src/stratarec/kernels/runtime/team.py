"""Teams: the threads that run a kernel together.

The members of a team take tasks from a shared counter, so that a late or interrupted thread delays nobody. Which member
does a task must not matter for its result.

On few cores two pools of threads harm each other: torch's OpenMP threads spin for some milliseconds after each of its
operations, and threads of another pool wait for their cores. So a team borrows torch's threads where they are awake
(`openmp`). Where they sleep it is led by the calling thread, and helpers of our own (`helpers`) join it if they come
before it is done: after a pause, or beside another busy process, OpenMP's closing barrier waited 5 to 10 ms for a
thread that had nothing left to do.

All that needs interfaces which Numba does not promise to keep. Where those of the installed version are not there,
`DEFECT` says how, a warning says so once, and a team is one thread: slower, with the same results.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numba
import numpy as np
from numba import errors
from numpy.typing import NDArray

__all__ = ["BODY", "DEFECT", "Team", "run_team", "take", "team_of"]


class Team(NamedTuple):
    """Who runs a kernel.

    Parameters
    ----------
    launch : int
        Address of the OpenMP function that starts torch's threads, or 0 for helpers of our own.
    threads : int
        Members at most.
    board : ndarray
        Where helpers find work.
    """

    launch: int
    threads: int
    board: NDArray[np.int64]


def _defect() -> str:
    """Why the installed Numba cannot run a team, or nothing where it can; starts no thread."""
    try:
        from stratarec.kernels.runtime.outline import members

        taken = members(Team(0, 1, np.zeros(1, dtype=np.int64)))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, errors.NumbaError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "" if taken == [1] else f"a team of one took {taken}, expected [1]"


DEFECT = _defect()
"""What about the installed Numba keeps kernels on one thread; empty where nothing does."""

if not DEFECT:
    from stratarec.kernels.runtime.helpers import AVAILABLE, HELPERS
    from stratarec.kernels.runtime.openmp import awake
    from stratarec.kernels.runtime.outline import BODY, run_team, take
else:
    from stratarec.kernels.runtime.single import BODY, run_team, take

    warnings.warn(
        f"kernels run on one thread, since numba {numba.__version__} lacks what several need ({DEFECT}): install a "
        "version that StrataRec's own requirements name",
        RuntimeWarning,
        stacklevel=2,
    )

_NO_BOARD = np.zeros(1, dtype=np.int64)


def team_of(threads: int) -> Team:
    """A team of `threads` members for one kernel that starts now."""
    if DEFECT or threads < 2 or not AVAILABLE:
        return Team(0, 1, _NO_BOARD)
    # Own helpers always, beside the pool of torch, took a whole step from 64 to 73 ms (D = 64, batch 4,096), whether
    # they spun or not.
    return Team(awake(threads), threads, HELPERS.ready(threads - 1))
