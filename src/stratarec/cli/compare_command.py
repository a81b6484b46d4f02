"""`stratarec compare`: runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, add_json, say, say_json


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", metavar="run", help="directories that `train` wrote")
    add_json(command)
    command.add_argument("-o", "--output", metavar="FILE", help="also write an HTML page with the curves")


def compare(args: argparse.Namespace) -> None:
    """Runs side by side."""
    from stratarec.io.atomic import check_output
    from stratarec.training.compare import RunComparison

    if args.output:
        check_output(Path(args.output).resolve(), ".html")
    found = RunComparison.read(args.runs)
    if args.json:
        say_json(found.to_dict())
    else:
        from stratarec.reporting.compare_page import print_contest

        print_contest(found.to_dict())
    if args.output:
        from stratarec.reporting.compare_page import write_contest

        write_contest(Path(args.output), found.to_dict(), found.courses)
        say(*([] if args.json else [f"report {args.output}"]))


COMMAND = Subcommand(
    name="compare",
    text="Show runs side by side: metrics, steps, time, bytes, and the fields in which their recipes differ.",
    example="stratarec compare runs/small runs/large -o runs.html",
    options=_options,
    run=compare,
)
