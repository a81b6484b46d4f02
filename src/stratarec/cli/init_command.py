"""`stratarec init`: write a recipe for a log, or copy a recipe that comes with StrataRec."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from importlib import resources
from pathlib import Path

from stratarec.cli.arguments import print_lines, subcommand
from stratarec.errors import ConfigError
from stratarec.io.hidden_packages import hidden_packages
from stratarec.io.names import shell_word, visible

# Minimum width in characters for wrapped text next to the names of columns, and maximum width for
# names.
_MIN_WIDTH, _MAX_WIDTH = 20, 60


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", nargs="*", help="files, directories, globs or URLs of one log")
    command.add_argument(
        "--label",
        default="",
        metavar="COLUMN",
        help="label column: 0 and 1, two words such as yes and no, or numbers to compare with a threshold; "
        "COLUMN=WORD makes WORD the positive value",
    )
    command.add_argument("--recipe", metavar="NAME", help=f"copy a recipe: {', '.join(shipped_names())}")
    command.add_argument("-o", "--output", help="YAML file (default: name of the log, in this directory)")


@subcommand(
    name="init",
    text="Write a first recipe: read a log (CSV, TSV, JSON lines, Parquet, Arrow) and guess the role of "
    "each column, or copy a recipe that comes with StrataRec.",
    example="stratarec init clicks.csv.gz && stratarec prepare clicks.yaml",
    options=_options,
)
def init(args: argparse.Namespace) -> None:
    """Write a recipe for a log, or copy a recipe that comes with StrataRec."""
    output = Path(args.output) if args.output else None
    if bool(args.recipe) == bool(args.log):
        raise ConfigError(f"init needs either a log or --recipe {', '.join(shipped_names())}")
    if args.recipe:
        path = copy_shipped(args.recipe, output)
    else:
        from stratarec.cli.init.draft import draft

        with hidden_packages():  # the draft fits LightGBM
            path, sample, guesses = draft(tuple(args.log), output, args.label, print_lines)
        rows = [(column.name, str(column.role), column.reason) for column in guesses.columns]
        events = {column.name for column in guesses.of("time")}
        rows += [
            (date.column.name, "date", date.reason) for date in guesses.dates if date.column.name in events
        ]
        if (history := guesses.history) is not None:
            rows.append((history.name, "history" if history.drafted else "ignored", history.reason))
        width = min(max(len(visible(name)) for name, _, _ in rows), _MAX_WIDTH)
        for name, role, reason in rows:
            _print_column(f"{visible(name):{width}}  {role:8}  ", visible(reason))
        if encoding := sample.options.get("encoding"):
            print_lines(
                f"the log is not UTF-8 and was read as {encoding}: check that names and values look right"
            )
        if guesses.bad_rows:
            print_lines(f"{guesses.bad_rows}: `prepare` skips them (data.on_bad_row)")
        if not sample.is_complete:
            print_lines(f"guessed from {sample.frame.height:,} of about {sample.total:,} rows")
    word = shell_word(path)
    print_lines(f"wrote {path}; check it, then: stratarec prepare {word} && stratarec train {word}")


def _print_column(head: str, reason: str) -> None:
    """Print one column; on a terminal the reason is wrapped next to it."""
    width = shutil.get_terminal_size().columns - len(head)
    lines = textwrap.wrap(reason, width) if sys.stdout.isatty() and width > _MIN_WIDTH else [reason]
    print_lines(head + lines[0], *(f"{' ' * len(head)}{line}" for line in lines[1:]))


def shipped_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with StrataRec."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _recipes().iterdir()))


def copy_shipped(name: str, output: Path | None) -> Path:
    """Copy the recipe `name` to `output`, by default a file of its name in this directory; return
    the file.

    Raises
    ------
    ConfigError
        If there is no such recipe.
    StorageError
        If `output` exists, or cannot be written.
    """
    from stratarec.io.atomic import check_absent, write_text

    names = shipped_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"known recipes: {', '.join(names)}"
        raise ConfigError(f"--recipe {name!r} does not come with StrataRec; {hint}")
    path = output or Path(f"{name}.yaml")
    check_absent(path, ".yaml", ".yml")
    write_text(path, (_recipes() / f"{name}.yaml").read_text(encoding="utf-8"))
    return path


def _recipes() -> resources.abc.Traversable:
    return resources.files("stratarec") / "recipes"
