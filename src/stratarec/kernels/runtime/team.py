"""Teams: the threads that run a kernel together.

The threads of a team, its *members*, take tasks from a shared counter, so a late or interrupted thread delays nobody.
The result must not depend on which member does a task.

On few cores, two pools of threads slow each other down: torch's OpenMP threads spin for some milliseconds after each of
torch's operations, and threads of another pool wait for their cores. So a team borrows torch's threads while they are
awake (`openmp`). While they sleep, the calling thread leads the team, and helper threads (`helpers`) join it if they
come before the work is done. OpenMP is not used then: at its closing barrier, a kernel that ran after a pause or next
to another busy process waited 5 to 10 ms for a thread that had nothing left to do.

This needs private interfaces of Numba. If the installed version lacks them, `DEFECT` describes the reason, one warning
reports it, and a team is one thread: slower, with the same results.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import errors, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = ["BODY", "DEFECT", "Team", "run_team", "take", "team_of"]


class Team(NamedTuple):
    """Threads that run a kernel.

    Parameters
    ----------
    launch : int
        Address of the OpenMP function that starts torch's threads, or 0 to use helper threads.
    threads : int
        Largest number of threads.
    board : ndarray
        Board on which helpers find work.
    """

    launch: int
    threads: int
    board: NDArray[np.int64]


def _defect() -> str:
    """Return the reason why the installed Numba cannot run a team, or "" if it can; no thread is started."""
    try:
        from stratarec.kernels.runtime.outline import members

        numbers = members(Team(0, 1, np.zeros(1, dtype=np.int64)))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, errors.NumbaError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "" if numbers == [1] else f"a team of one took {numbers}, expected [1]"


# Why kernels run on one thread with the installed Numba; empty if teams work.
DEFECT = _defect()

if not DEFECT:
    from stratarec.kernels.runtime.helpers import AVAILABLE, HELPERS
    from stratarec.kernels.runtime.openmp import awake
    from stratarec.kernels.runtime.outline import BODY, run_team, take
else:
    # Teams of one thread, which use only public interfaces: Numba calls the body as any other function.
    BODY = {
        "nogil": True, "cache": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    }  # fmt: skip

    @njit(nogil=True)
    def take(counter):
        """Return ``counter[0]`` and increase it by 1."""
        value = counter[0]
        counter[0] = value + 1
        return value

    @intrinsic(prefer_literal=True)
    def run_team(typingctx, team, body, arguments):
        """Call ``body(0, *arguments)`` on this thread; `team` is ignored."""
        call = body.get_call_type(typingctx, (types.int64, *arguments.types), {})
        signature = types.void(team, body, arguments)

        def codegen(context, builder, signature, args):
            parts = [builder.extract_value(args[2], place) for place in range(len(arguments.types))]
            context.get_function(body, call)(builder, [ir.IntType(64)(0), *parts])
            return context.get_dummy_value()

        return signature, codegen

    warnings.warn(
        f"kernels run on one thread: numba {numba.__version__} lacks interfaces that teams need ({DEFECT}); install a "
        "version within StrataRec's requirements",
        RuntimeWarning,
        stacklevel=2,
    )

_NO_BOARD = np.zeros(1, dtype=np.int64)


def team_of(threads: int) -> Team:
    """Return a team of `threads` threads for one kernel that starts now."""
    if DEFECT or threads < 2 or not AVAILABLE:
        return Team(0, 1, _NO_BOARD)
    # If helper threads were always used, next to torch's pool, a complete step would take 73 ms instead of 64 (D = 64,
    # batch 4,096), whether they spin or not.
    return Team(awake(threads), threads, HELPERS.ready(threads - 1))
