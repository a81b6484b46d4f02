"""Run a kernel on torch's own OpenMP threads.

Numba's `prange` brings a second pool of threads. After a parallel operation the workers of a pool spin for some
milliseconds before they sleep, so torch's spinning workers hold the cores while Numba's wait for them, and the reverse.
`run_team` hands the kernel to the runtime that torch itself is linked with instead: one pool, always warm.

The members of a team take tasks from a shared counter, so that a late or interrupted thread delays nobody. Which member
does a task must not matter for its result.

That needs interfaces which Numba does not promise to keep. Where those of the installed version are not there, `DEFECT`
says how, a warning says so once, and a team is one thread: slower, with the same results.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path

import numba
import torch
from numba import errors

__all__ = ["BODY", "DEFECT", "launcher", "run_team", "take"]


@cache
def launcher() -> int:
    """Address of the ``GOMP_parallel`` that torch uses, or 0 where its runtime has none: kernels then run serially."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _defect() -> str:
    """Why the installed Numba cannot run a team, or nothing where it can; starts no thread."""
    try:
        from stratarec.kernels.openmp import members

        taken = members(0, 1)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, errors.NumbaError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "" if taken == [1] else f"a team of one took {taken}, expected [1]"


DEFECT = _defect()
"""What about the installed Numba keeps kernels on one thread; empty where nothing does."""

if not DEFECT:
    from stratarec.kernels.openmp import BODY, run_team, take
else:
    from stratarec.kernels.alone import BODY, run_team, take

    warnings.warn(
        f"kernels run on one thread, since numba {numba.__version__} lacks what several need ({DEFECT}): install a "
        "version that StrataRec's own requirements name",
        RuntimeWarning,
        stacklevel=2,
    )
