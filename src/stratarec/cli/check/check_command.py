"""`stratarec check`: everything that can be checked of what StrataRec wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="what StrataRec wrote")


def check(args: argparse.Namespace) -> None:
    """Everything that can be checked of what StrataRec wrote."""
    from stratarec.cli.check.parts import check as run

    for line in run(Path(args.path)):
        say(line)
    say(f"{args.path} is whole")


COMMAND = Subcommand(
    name="check",
    text="Read all of a data set, run, export, delta, plan or study and check it: hashes, checksums, types, ranges.",
    example="stratarec check runs/demo",
    options=_options,
    run=check,
)
