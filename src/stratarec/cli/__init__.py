"""The command line: a module a subcommand, ``train_command.py`` for `stratarec train`, has its options and its work.

Heavy imports (torch, numba) are inside the functions of subcommands, so that --help answers at once.
"""

from stratarec.cli.main import main

__all__ = ["main"]
