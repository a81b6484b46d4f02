"""`stratarec prepare` and `stratarec profile`: write a prepared data set, and measure it."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from stratarec.cli.arguments import (
    SPLITS,
    add_json,
    add_recipe,
    print_json,
    print_lines,
    progress_of,
    subcommand,
)
from stratarec.io.names import visible

if TYPE_CHECKING:
    from stratarec.data.prepare.executor import Executor


def _prepare_options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    add_json(command)
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a data set that was prepared from other logs or settings",
    )
    command.add_argument(
        "--ray",
        metavar="CLUSTER",
        help="run on a Ray cluster whose machines share the paths of logs and data set: auto for this "
        "machine's cluster, or HOST:PORT (needs stratarec[ray])",
    )


@subcommand(
    name="prepare",
    text="Turn raw logs into a prepared data set. Resumes where an interrupted call stopped. Values in "
    "names of folders (day=2024-01-31/) are not read as columns.",
    example="stratarec prepare criteo.yaml 'data.source.paths=[day_*.gz]'",
    options=_prepare_options,
    resumable=True,
)
def prepare(args: argparse.Namespace) -> None:
    """Turn raw logs into a prepared data set."""
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
        print_json(
            {
                "dataset": str(dataset.path),
                "samples": {split: dataset.samples(split) for split in dataset.splits},
                "labels": {
                    split: {name: count.to_dict() for name, count in dataset.label_counts(split).items()}
                    for split in dataset.splits
                },
                "rows": dataset.table_rows(),
                "bad_rows": dataset.about.bad_rows,
                "suspicions": dataset.suspicions,
            }
        )
        return
    for split in dataset.splits:
        rates = "".join(
            f", {count.positives / count.known:.2%} positive"
            + (f" ({visible(label)})" if dataset.schema.labels else "")
            for label, count in dataset.label_counts(split).items()
            if count.known
        )
        print_lines(f"{split:6} {dataset.samples(split):>12,} samples{rates}")
    print_lines(f"tables {len(dataset.vocabularies):>12,}, {sum(dataset.table_rows().values()):,} rows")
    print_lines(*dataset.suspicions)
    if dataset.about.leaks:
        print_lines(
            "  a column that is only known after the label cannot help: remove it from data.source.schema"
        )
    if dataset.about.bad_rows:
        print_lines(f"skipped {dataset.about.bad_rows:,} bad rows")
    print_lines(f"prepared {dataset.path}")


def _executor(address: str | None) -> AbstractContextManager[Executor | None]:
    if address is None:
        return nullcontext()
    from stratarec.data.prepare.ray_executor import on_ray

    return on_ray(address)


def _profile_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("dataset", help="prepared data set")
    command.add_argument(
        "--split", choices=SPLITS, default="train", help="split to measure (default: train)"
    )
    command.add_argument("--batch-size", type=int, default=4096, help="samples per batch (default: 4096)")
    command.add_argument(
        "--batches", type=int, default=20, help="number of batches to measure (default: 20)"
    )


@subcommand(
    name="profile",
    text="Measure how often values repeat in batches, what deduplication saves, and which rows are hot.",
    example="stratarec profile data/globo --batch-size 4096",
    options=_profile_options,
)
def profile(args: argparse.Namespace) -> None:
    """Measure repeated values and hot rows, and print them as tables."""
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.data.duplication import profile as measure_duplication
    from stratarec.hot.calibrator import budgets, warn_inherited_ids
    from stratarec.reporting.profile_tables import print_hot, print_profile
    from stratarec.training.torch_setup import torch_settings

    dataset = Dataset.open(args.dataset, verify="used")
    # Batches are only counted. With several torch threads, waiting for each other would take longer
    # than the work.
    with dataset.locked(), torch_settings(threads=1):
        duplication = measure_duplication(
            dataset, args.split, batch_size=args.batch_size, batches=args.batches
        )
        points = budgets(dataset)
    print_profile(duplication)
    print_hot(points, warn_inherited_ids(dataset))
