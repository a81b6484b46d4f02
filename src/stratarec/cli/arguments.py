"""Helpers shared by all subcommands: the description of a subcommand, common options, printing."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from stratarec.errors import ConfigError
from stratarec.io.names import visible

if TYPE_CHECKING:
    from stratarec.progress import Progress

SPLITS = ("train", "valid", "test")
RUN_HELP = "directory of a finished run, as written by `train`"
# A longer message is cut after this number of characters.
_MAX_MESSAGE = 200
# Fields of a recipe that determine how logs are read, but not what their columns mean.
_READING = r"data\.(on_bad_row|source\.(format|delimiter|quote|columns|nulls|encoding|max_line_bytes))"
_FIELD = re.compile(f"{_READING}=")
# Fields that may change between the periods of a run.
_TRAINING = r"train\.(batch_size|threads|(dense|embedding)\.learning_rate|embedding\.rows)"
_PERIOD_FIELD = re.compile(rf"({_READING}|{_TRAINING}|memory\.[\w.]+)=")
_ANY_FIELD = re.compile(r"[a-z_]+(\.\w+)+=")
_FINDING_WIDTH = 63


class Subcommand(NamedTuple):
    """Description of one subcommand."""

    name: str
    text: str
    """Summary that `stratarec --help` and the command's own help print."""
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    """Adds the command's options to its parser."""
    run: Callable[[argparse.Namespace], None]
    multi_process: bool = False
    """Whether torchrun may start the command in several processes. Other commands would do all work
    in each process.
    """
    resumable: bool = False
    """Whether the same command resumes after an interruption."""


def subcommand(**description: Any) -> Callable[[Callable[[argparse.Namespace], None]], Subcommand]:
    """Make a function a `Subcommand` with these other fields."""
    return lambda run: Subcommand(run=run, **description)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line that refers to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"stratarec: {visible(shortened(message))}; see {self.prog} --help\n")


def whole_number(what: str, most: int) -> Callable[[str], int]:
    """Return a type for an option that counts `what`, from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a number of {what} from 1 to {most:,}; got {text!r}")
        return int(text)

    return read


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the positional arguments for a recipe and for overrides of its fields."""
    command.add_argument("recipe", help="YAML recipe; `stratarec init` writes one")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="FIELD=VALUE", help="override a recipe field"
    )


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the positional argument for the run that `continue`, `forget`, `rebase` and `revert`
    change.
    """
    command.add_argument("run", help=RUN_HELP)


def add_periods(command: argparse.ArgumentParser) -> None:
    """Add the positional arguments for the logs of periods; `logs_of_periods` interprets them."""
    command.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="new logs in order of time, each of which becomes one period; and fields of the recipe that "
        "change from now on, such as train.embedding.rows=batch or data.on_bad_row=skip",
    )


def logs_of_periods(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the logs of periods, and the changed fields of the recipe, in `args.files`."""
    from stratarec.training.run.run_directory import read_recipe

    fields = [word for word in args.files if _ANY_FIELD.match(word) and not Path(word).exists()]
    if fields and Path(args.run).is_dir():
        read_recipe(Path(args.run)).with_overrides(fields)  # names a field that does not exist
    for word in fields:
        if not _PERIOD_FIELD.match(word):
            raise ConfigError(
                f"{word} cannot change between periods; train a new run for it. These may change: memory, "
                "train.batch_size, train.threads, train.embedding.rows, learning "
                "rates, and how a log is read"
            )
    files = [word for word in args.files if word not in fields]
    if not files:
        raise ConfigError(f"only {fields[0]} was named and no log: name the log of the next period")
    return files, fields


def add_data(command: argparse.ArgumentParser) -> None:
    """Add the arguments for a run and for the data to which it is applied; `data_or_logs`
    interprets the data.
    """
    command.add_argument(
        "run", help=f"{RUN_HELP}; tables larger than memory are read from a temporary copy in TMPDIR"
    )
    command.add_argument(
        "data",
        nargs="*",
        help="raw logs (- reads one from standard input), and fields for reading them, such as "
        "data.source.encoding=latin-1; or a prepared data set with the same vocabularies (default: the "
        "data set of the run)",
    )
    add_repeated(
        command, "--history", "FILE", "earlier log with labels, from which user histories are built"
    )


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the option ``--device``, the device of a run's network."""
    command.add_argument(
        "--device",
        help="device of the network, and of rows that were trained in GPU memory, such as cuda or cpu "
        "(default: train.device of the run)",
    )


def add_json(command: argparse.ArgumentParser, what: str = "print JSON") -> None:
    """Add the option ``--json`` for machine-readable output."""
    command.add_argument(
        "--json", action="store_true", help=f"{what}; write progress and errors to stderr as JSON lines"
    )


def add_repeated(command: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    """Add an option that may be given several times; its values are a list, empty by default."""
    command.add_argument(option, action="append", default=[], metavar=metavar, help=f"{text} (repeatable)")


def progress_of(args: argparse.Namespace) -> Progress:
    """Return the progress display that the options choose. The default is a bar on a terminal, and
    lines elsewhere.
    """
    from stratarec.progress import SilentProgress
    from stratarec.reporting.progress import JsonProgress, LineProgress, TerminalProgress

    if args.quiet:
        return SilentProgress()
    if getattr(args, "json", False):
        return JsonProgress()
    return TerminalProgress() if sys.stderr is not None and sys.stderr.isatty() else LineProgress()


def data_or_logs(args: argparse.Namespace, **options: list[str]) -> tuple[str | None, list[str]]:
    """Return the prepared data set, or the raw logs, that the arguments name.

    Fields of the recipe for reading logs, such as ``data.on_bad_row=skip``, move from `args.data`
    to `args.fields`. If a log is ``-``, standard input is read.

    Parameters
    ----------
    options : list of str
        Values of options that only raw logs support, by their names.
    """
    from stratarec.data.sources.files import STANDARD_INPUT, copy_standard_input
    from stratarec.io.owned_directory import MARKER

    args.fields = [word for word in args.data if _FIELD.match(word) and not Path(word).exists()]
    args.data = [word for word in args.data if word not in args.fields]
    # Any other directory contains the files of a log, as for `init` and `prepare`.
    logs = [] if len(args.data) == 1 and (Path(args.data[0]) / MARKER).exists() else args.data
    if args.fields and not logs:
        raise ConfigError(f"{args.fields[0]} applies to raw logs; name log files")
    if STANDARD_INPUT in logs:
        copy_standard_input()
    if logs and args.split:
        raise ConfigError("--split applies to prepared data sets; raw logs have no splits. Leave it out")
    for name, values in {**options, "history": args.history}.items():
        if values and not logs:
            raise ConfigError(
                f"--{name} applies to raw logs; a prepared data set has no raw columns. Name log files"
            )
    return (None if logs or not args.data else args.data[0]), logs


def output_of(args: argparse.Namespace, name: str) -> Path:
    """Return the path of `--output`, by default `name` in the run.

    Raises
    ------
    CheckpointError
        If the default is needed and `args.run` is not a run.
    """
    from stratarec.training.run.open_run import require_run

    if args.output:
        return Path(args.output)
    require_run(Path(args.run))
    return Path(args.run) / name


def require_one_process(ranks: int) -> None:
    """Refuse several processes for raw logs, which are read in order."""
    if ranks > 1:
        raise ConfigError(
            f"raw logs are scored by one process; this command has {ranks}: start it without torchrun"
        )


def print_lines(*lines: str) -> None:
    """Print lines, with control characters of names, paths and values escaped."""
    for line in lines:
        print(visible(line))


def print_findings(head: str, sentences: Sequence[str]) -> None:
    """Print sentences, wrapped, in a column to the right of the word `head`."""
    wrapped = [line for sentence in sentences for line in textwrap.wrap(sentence, _FINDING_WIDTH)]
    print_lines(*(f"{'' if number else head:17}{line}" for number, line in enumerate(wrapped)))


def print_json(content: object) -> None:
    """Print JSON in ASCII."""
    print(json.dumps(content, indent=1, allow_nan=False))


def shortened(text: str) -> str:
    """Return a message on one line, cut to a bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
