"""`stratarec prepare`: raw logs -> a prepared data set."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from stratarec.cli.arguments import Subcommand, add_json, add_recipe, progress_of, say, say_json
from stratarec.io.names import visible

if TYPE_CHECKING:
    from stratarec.data.prepare.executor import Executor


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    add_json(command)
    command.add_argument("--overwrite", action="store_true", help="replace a data set made from other logs or settings")
    command.add_argument(
        "--ray",
        metavar="CLUSTER",
        help="work on a Ray cluster whose machines share the paths of logs and data set: auto for the one that this "
        "machine is of, HOST:PORT, or local[:N] for N processes of this machine (needs stratarec[ray])",
    )


def prepare(args: argparse.Namespace) -> None:
    """Raw logs -> a prepared data set."""
    from stratarec.data.prepare.prepare import prepare as run
    from stratarec.recipe import Recipe

    recipe = Recipe.load(args.recipe, args.overrides)
    with _executor(args.ray) as executor:
        dataset = run(
            recipe.data,
            name=recipe.name,
            overwrite=args.overwrite,
            progress=progress_of(args),
            executor=executor,
        )
    if args.json:
        say_json(
            {
                "dataset": str(dataset.path),
                "samples": {split: dataset.samples(split) for split in dataset.splits},
                "labels": {
                    split: {name: each.to_dict() for name, each in dataset.label_counts(split).items()}
                    for split in dataset.splits
                },
                "rows": dataset.table_rows(),
                "bad_rows": dataset.about.bad_rows,
                "suspicions": dataset.suspicions,
            }
        )
        return
    for split in dataset.splits:
        samples = dataset.samples(split)
        counts = dataset.label_counts(split).items()
        rate = "".join(
            f", {count.positives / count.known:.2%} positive"
            + (f" ({visible(label)})" if dataset.schema.labels else "")
            for label, count in counts
            if count.known
        )
        say(f"{split:6} {samples:>12,} samples{rate}")
    say(f"tables {len(dataset.vocabularies):>12,}, {sum(dataset.table_rows().values()):,} rows")
    say(*dataset.suspicions)
    if dataset.about.leaks:
        say("  what is known only afterwards is of no use: leave it out of data.source.schema")
    if dataset.about.bad_rows:
        say(f"left out {dataset.about.bad_rows:,} bad rows")
    say(f"prepared {dataset.path}")


def _executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """Who does the pieces of `prepare`."""
    if address is None:
        return nullcontext()
    from stratarec.data.prepare.ray_executor import on_ray

    return on_ray(address)


COMMAND = Subcommand(
    name="prepare",
    text="Turn raw logs into a prepared data set. Resumes where an interrupted call stopped.",
    example="stratarec prepare criteo.yaml 'data.source.paths=[day_*.gz]'",
    options=_options,
    run=prepare,
    goes_on=True,
)
