"""`stratarec init`: a log, or the name of a shipped recipe -> a recipe to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say
from stratarec.errors import ConfigError
from stratarec.io.names import visible


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", nargs="*", help="files, globs or URLs of one log")
    command.add_argument("--label", default="", metavar="COLUMN", help="the label: 0 and 1, or numbers to compare")
    command.add_argument("--recipe", metavar="NAME", help="copy this one: avazu, criteo, demo, globo or trivago")
    command.add_argument("-o", "--output", help="YAML file (default: named like the log, here)")


def init(args: argparse.Namespace) -> None:
    """A log, or the name of a shipped recipe -> a recipe to start from."""
    from stratarec.cli.init.draft import draft
    from stratarec.cli.init.guess import lines
    from stratarec.cli.init.shipped import copy_shipped, shipped

    output = Path(args.output) if args.output else None
    if bool(args.recipe) == bool(args.log):
        raise ConfigError(f"init needs a log, or one of --recipe {', '.join(shipped())}")
    if args.recipe:
        path = copy_shipped(args.recipe, output)
    else:
        path, sample, guesses = draft(tuple(args.log), output, args.label)
        width = max(len(visible(name)) for name, _, _ in lines(guesses))
        for name, role, reason in lines(guesses):
            say(f"{visible(name):{width}}  {role:8}  {reason}")
        if not sample.whole:
            say(f"guessed from {sample.frame.height:,} rows of about {sample.total:,}")
    say(f"wrote {path}; look at it, then: stratarec prepare {path} && stratarec train {path}")


COMMAND = Subcommand(
    name="init",
    text="Write a recipe to start from: look at a log (CSV, TSV, JSON lines, Parquet) and guess what its columns are, "
    "or copy a recipe that comes with StrataRec.",
    example="stratarec init clicks.csv.gz && stratarec prepare clicks.yaml",
    options=_options,
    run=init,
)
