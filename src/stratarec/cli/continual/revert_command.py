"""`stratarec revert`: the last period of a run is taken back."""

from __future__ import annotations

import argparse

from stratarec.cli.arguments import Subcommand, say


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run", help="directory that `train` wrote, of a run that `continue` or `rebase` added a period to"
    )


def revert(args: argparse.Namespace) -> None:
    """Remove the last period."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.chain import revert as run

    period = run(named_directory(args.run))
    name = f" ({period.file})" if period.file else ""
    model = f"that of period {period.number - 1}" if period.number > 1 else "the one that `train` wrote"
    say(f"removed period {period.number}{name}; the model is {model} again. Exports and published deltas stay")


COMMAND = Subcommand(
    name="revert",
    text="Remove the last period of a run, for example one of a wrong log. Afterwards predict, evaluate and export use "
    "the model of the period before. Data of periods before that one is removed, so one period can be taken back, and "
    "never one that forgets values.",
    example="stratarec revert runs/demo",
    options=_options,
    run=revert,
)
