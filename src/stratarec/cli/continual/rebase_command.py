"""`stratarec rebase`: rows of a run that went on are numbered anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, say


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="directory that `train` wrote, of a run that has ended")


def rebase(args: argparse.Namespace) -> None:
    """Number rows by recent counts, without those that nobody has any more."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.renew import rebase as run

    period, sizes, rounded = run(named_directory(args.run))
    scores = "scores are the same to the bit"
    if rounded:
        scores += f", except where one of {rounded:,} rows is used that a cache had as floats and that is rounded now"
    say(
        *(f"{name}: {after:,} rows, {before - after:,} dropped" for name, (before, after) in sizes.items()),
        f"{scores}; the next export is a full one, not a delta",
        f"model  {Path(args.run) / 'periods' / f'period-{period.number:05d}'}",
    )


COMMAND = Subcommand(
    name="rebase",
    text="Renumber the rows of a run by recent counts, and drop the rows of evicted and forgotten values. Scores stay "
    "the same to the bit, which is checked before anything is committed; only rows that a cache has as floats above an "
    "encoded table (memory.precision) are rounded, and their number is printed.",
    example="stratarec rebase runs/demo",
    options=_options,
    run=rebase,
)
