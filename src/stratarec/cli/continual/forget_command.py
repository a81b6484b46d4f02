"""`stratarec forget`: values leave a run that has ended, and by the next delta what serves."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="directory that `train` wrote, of a run that has ended")
    command.add_argument(
        "file",
        metavar="FILE",
        help="CSV or Parquet: a column for each vocabulary or feature, or the users' column, named for it, with values",
    )


def forget(args: argparse.Namespace) -> None:
    """Take values out of vocabularies, counts, events and rows."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.renew import forget as run
    from stratarec.training.run.run_directory import read_recipe

    path = named_directory(args.run)
    period, known, remaining = run(path, args.file)
    recipe = read_recipe(path)
    say(
        *(f"{name}: {found:,} values were known, and are no more" for name, found in known.items()),
        *(
            f"warning: {each} still holds them, as a process reads it; any later forget or continue removes it"
            for each in remaining
        ),
        f"left   {recipe.data.path}, {Path(args.run) / 'checkpoints'}, logs and exports are as they were: remove them, "
        "or, of exports, write the next with --since",
        f"model  {Path(args.run) / 'periods' / f'period-{period.number:05d}'}",
    )


COMMAND = Subcommand(
    name="forget",
    text="Take named values (a user who asks for it) out of a run that has ended: vocabularies, counts, histories and "
    "rows, all or nothing. What serves forgets them with the next delta (`stratarec export --since`).",
    example="stratarec forget runs/demo users.csv",
    options=_options,
    run=forget,
)
