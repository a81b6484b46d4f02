"""`stratarec check`: verify everything that StrataRec wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, print_lines


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="data set, run, export, delta, plan or study")


def check(args: argparse.Namespace) -> None:
    """Verify everything that StrataRec wrote."""
    from stratarec.cli.checks.artifacts import check as run

    for line in run(Path(args.path)):
        print_lines(line)
    print_lines(f"{args.path} is complete and undamaged")


CHECK = Subcommand(
    name="check",
    text="Read a whole data set, run, export, delta, plan or study, and verify hashes, checksums, types and ranges.",
    example="stratarec check runs/demo",
    options=_options,
    run=check,
)
