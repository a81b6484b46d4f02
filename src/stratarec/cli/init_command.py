"""`stratarec init`: a log, or the name of a shipped recipe -> a recipe to start from."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say
from stratarec.cli.init.shipped import copy_shipped, shipped
from stratarec.errors import ConfigError
from stratarec.io.names import shell_word, visible

# Characters of a terminal's line that are worth wrapping to.
_LEAST_ROOM = 20


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", nargs="*", help="files, directories, globs or URLs of one log")
    command.add_argument(
        "--label",
        default="",
        metavar="COLUMN",
        help="the label: 0 and 1, yes and no, numbers to compare; or COLUMN=WORD, where it is 1 if the column says so",
    )
    command.add_argument("--recipe", metavar="NAME", help=f"copy this one: {', '.join(shipped())}")
    command.add_argument("-o", "--output", help="YAML file (default: named like the log, here)")


def init(args: argparse.Namespace) -> None:
    """A log, or the name of a shipped recipe -> a recipe to start from."""
    from stratarec.cli.init.draft import draft

    output = Path(args.output) if args.output else None
    if bool(args.recipe) == bool(args.log):
        raise ConfigError(f"init needs a log, or one of --recipe {', '.join(shipped())}")
    if args.recipe:
        path = copy_shipped(args.recipe, output)
    else:
        path, sample, guesses = draft(tuple(args.log), output, args.label)
        width = max(len(visible(each.name)) for each in guesses.columns)
        for each in guesses.columns:
            _tell(f"{visible(each.name):{width}}  {each.role:8}  ", visible(each.reason))
        if not sample.whole:
            say(f"guessed from {sample.frame.height:,} rows of about {sample.total:,}")
    word = shell_word(path)
    say(f"wrote {path}; look at it, then: stratarec prepare {word} && stratarec train {word}")


def _tell(head: str, reason: str) -> None:
    """One column; on a terminal its reason stays beside it."""
    room = shutil.get_terminal_size().columns - len(head)
    lines = textwrap.wrap(reason, room) if sys.stdout.isatty() and room > _LEAST_ROOM else [reason]
    say(head + lines[0], *(f"{' ' * len(head)}{line}" for line in lines[1:]))


COMMAND = Subcommand(
    name="init",
    text="Write a recipe to start from: look at a log (CSV, TSV, JSON lines, Parquet) and guess what its columns are, "
    "or copy a recipe that comes with StrataRec.",
    example="stratarec init clicks.csv.gz && stratarec prepare clicks.yaml",
    options=_options,
    run=init,
)
