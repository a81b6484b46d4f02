"""What subcommands share: the form of one, options that several have, and how they speak."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from stratarec.errors import ConfigError
from stratarec.io.names import visible

if TYPE_CHECKING:
    from stratarec.progress import Progress

SPLITS = ("train", "valid", "test")
RUN_HELP = "directory that `train` wrote; rows that memory is not to hold are read from a folder in TMPDIR"
# Characters of a message that are repeated.
_LONGEST = 200


class Subcommand(NamedTuple):
    """One subcommand, as its module declares it."""

    name: str
    text: str
    """What it does: its line of `stratarec --help`, and the head of its own."""
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    """Adds its options."""
    run: Callable[[argparse.Namespace], None]
    by_ranks: bool = False
    """Whether torchrun may start it in several processes; else each of these would do all of it."""
    goes_on: bool = False
    """Whether the same command goes on where it was interrupted."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"stratarec: {visible(shortened(message))}; see {self.prog} --help\n")


def whole_number(what: str, most: int) -> Callable[[str], int]:
    """The type of an option that is a number of `what`, from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {what} from 1 to {most}")
        return int(text)

    return read


def add_recipe(command: argparse.ArgumentParser) -> None:
    """The recipe, and fields of it with other values."""
    command.add_argument("recipe", help="YAML recipe; `stratarec init` writes one")
    command.add_argument("overrides", nargs="*", default=[], metavar="FIELD=VALUE", help="change a field of the recipe")


def add_data(command: argparse.ArgumentParser) -> None:
    """A run, and what it is asked about; see `data_or_logs`."""
    command.add_argument("run", help=RUN_HELP)
    command.add_argument(
        "data",
        nargs="*",
        help="raw logs, read as the run's recipe says; or a prepared data set with the same vocabularies (default: "
        "the run's own)",
    )
    command.add_argument(
        "--history",
        action="append",
        default=[],
        metavar="FILE",
        help="earlier log with labels, for what users did before (repeatable)",
    )


def add_device(command: argparse.ArgumentParser) -> None:
    """Where the network of a run is; see `open_run`."""
    command.add_argument("--device", help="where the network is, such as cuda (default: train.device of the run)")


def add_json(command: argparse.ArgumentParser, what: str = "print JSON") -> None:
    """Output for machines."""
    command.add_argument(
        "--json", action="store_true", help=f"{what}; progress and errors are lines of JSON on standard error"
    )


def progress_of(args: argparse.Namespace) -> Progress:
    """The progress that was asked for, or fits where standard error goes."""
    from stratarec.progress import SilentProgress
    from stratarec.reporting.progress import JsonProgress, LineProgress, TerminalProgress

    if args.quiet:
        return SilentProgress()
    if getattr(args, "json", False):
        return JsonProgress()
    return TerminalProgress() if sys.stderr is not None and sys.stderr.isatty() else LineProgress()


def data_or_logs(args: argparse.Namespace, **options: list[str]) -> tuple[str | None, list[str]]:
    """The prepared data set behind a run, or the raw logs; what is of one of them alone is refused for the other."""
    logs = [] if len(args.data) == 1 and Path(args.data[0]).is_dir() else args.data
    if logs and args.split:
        raise ConfigError("--split is of prepared data sets, and raw logs have no splits; leave it out")
    for name, given in {**options, "history": args.history}.items():
        if given and not logs:
            raise ConfigError(f"--{name} is of raw logs, and prepared data sets hold no raw columns; name the files")
    return (None if logs or not args.data else args.data[0]), logs


def output_of(args: argparse.Namespace, name: str) -> Path:
    """Return the path of `--output`, by default `name` in the run; `CheckpointError` where that is no run."""
    from stratarec.training.run.open_run import require_run

    if args.output:
        return Path(args.output)
    require_run(Path(args.run))
    return Path(args.run) / name


def refuse_ranks(ranks: int) -> None:
    """Raw logs are read in their order, by one process."""
    if ranks > 1:
        raise ConfigError(f"raw logs are scored by one process, not by {ranks}: start it without torchrun")


def say(*lines: str) -> None:
    """Print lines, whatever characters a name, a path or a value in them has."""
    for line in lines:
        print(visible(line))


def say_json(content: object) -> None:
    """Print JSON, in ASCII."""
    print(json.dumps(content, indent=1, allow_nan=False))


def shortened(text: str) -> str:
    """Return a message in one line of bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
