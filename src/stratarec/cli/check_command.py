"""`stratarec check`: verify everything that StrataRec wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import print_lines, subcommand


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="data set, run, export, delta, plan or study")


@subcommand(
    name="check",
    text="Read a whole data set, run, export, delta, plan or study, and verify hashes, "
    "checksums, types and ranges.",
    example="stratarec check runs/demo",
    options=_options,
)
def check(args: argparse.Namespace) -> None:
    """Verify everything that StrataRec wrote."""
    from stratarec.cli.checks import dataset

    path = Path(args.path)
    if dataset.is_dataset(path):
        lines = dataset.check(path)
    else:
        from stratarec.cli.checks import artifacts

        lines = artifacts.check(path)
    for line in lines:
        print_lines(line)
    print_lines(f"{args.path} is complete and undamaged")
