"""Command line of StrataRec.

Heavy libraries (torch, numba) are imported inside the functions of subcommands, so that --help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        from stratarec.cli.run_command import run
    except KeyboardInterrupt:  # importing the subcommands takes a moment
        sys.stderr.write("stratarec: interrupted\n")
        return 130
    return run(arguments)
