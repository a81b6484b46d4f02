"""`stratarec forget`: values leave a run that has ended, and by the next delta what serves."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say

# Unknown values of a column that are printed.
_NAMED = 5


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
    from stratarec.training.continual.forget import forget as run
    from stratarec.training.run.run_directory import read_recipe

    path = named_directory(args.run)
    result = run(path, args.file)
    recipe = read_recipe(path)
    for name, known in result.known.items():
        unknown = result.unknown[name]
        named = f"; not known: {', '.join(map(str, unknown.head(_NAMED)))}" if len(unknown) else ""
        more = f" and {len(unknown) - _NAMED:,} more" if len(unknown) > _NAMED else ""
        say(f"{name}: forgot {known:,} of {known + len(unknown):,} values{named}{more}")
    say(
        *(
            f"warning: another process reads {each}, which has them; a later command removes it"
            for each in result.remaining
        ),
        f"left   {recipe.data.path}, {Path(args.run) / 'checkpoints'}, logs and exports are as they were: remove them, "
        "or, of exports, write the next with --since",
        f"model  {Path(args.run) / 'periods' / f'period-{result.period.number:05d}'}",
    )


COMMAND = Subcommand(
    name="forget",
    text="Take named values (a user who asks for it) out of a run that has ended: vocabularies, counts, histories and "
    "rows, all or nothing. What serves forgets them with the next delta (`stratarec export --since`).",
    example="stratarec forget runs/demo users.csv",
    options=_options,
    run=forget,
)
