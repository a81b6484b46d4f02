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
    told = (
        f"{rounded:,} rows that a cache had as floats are rounded, as they are when they leave it; " if rounded else ""
    )
    say(
        *(f"{name}: {after:,} rows, {before - after:,} dropped" for name, (before, after) in sizes.items()),
        f"{told}scores are the same, to the bit, of samples that have every row; exports go on with a full one, not a "
        "delta",
        f"model  {Path(args.run) / 'periods' / f'period-{period.number:05d}'}",
    )


COMMAND = Subcommand(
    name="rebase",
    text="Number the rows of a run that went on anew: by recent counts, without rows of values that are evicted or "
    "forgotten. Scores stay the same to the bit, which is shown before anything is committed.",
    example="stratarec rebase runs/demo",
    options=_options,
    run=rebase,
)
