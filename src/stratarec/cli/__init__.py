"""Command line of StrataRec.

Heavy libraries (torch, numba) are imported inside the functions of subcommands, so that --help
answers at once.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Loading libraries creates many objects and little garbage. With Python's usual thresholds,
    # looking for garbage took 4 to 8 % of the processor time of `prepare` and `predict`.
    gc.set_threshold(1_000_000, 50, 100)
    # When a process ends, Python would look for garbage among all objects of torch: 0.6 s.
    atexit.register(gc.freeze)
    try:
        from stratarec.cli.run_command import run
    except KeyboardInterrupt:  # importing the subcommands takes a moment
        sys.stderr.write("stratarec: interrupted\n")
        return 130
    return run(arguments)
