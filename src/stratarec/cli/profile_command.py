"""`stratarec profile`: how values repeat, how rows are used again, and which are hot."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.cli.arguments import SPLITS, Subcommand, progress_of, say
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.hot.calibrator import HotProfile


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("dataset", help="prepared data set")
    command.add_argument("--split", choices=SPLITS, default="train", help="split to measure (default: train)")
    command.add_argument("--batch-size", type=int, default=4096, help="samples a batch (default: 4096)")
    command.add_argument("--batches", type=int, default=20, help="batches to look at (default: 20)")
    command.add_argument("-o", "--output", help="HTML report (default: beside the data set)")
    hot = command.add_argument_group("hot rows: which rows fill a budget best, and how many inputs need no others")
    hot.add_argument(
        "--hot",
        metavar="BYTES",
        help="for weights and optimizer state of hot rows, such as 64MiB; written as .hot.json",
    )
    hot.add_argument("--dim", type=int, default=16, metavar="D", help="floats of a row (default: 16)")
    hot.add_argument(
        "--optimizer", default="rowwise_adagrad", metavar="KIND", help="of rows (default: rowwise_adagrad)"
    )
    hot.add_argument(
        "--classify", action="store_true", help="count the hot inputs of every split, not only of a sample"
    )


def profile(args: argparse.Namespace) -> None:
    """How values repeat, how rows are used again, and which are hot, as tables and an HTML report."""
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.data.duplication import profile as run
    from stratarec.embedding.optimizers import RowOptimizerConfig
    from stratarec.hot.calibrator import budgets, warn_inherited_ids
    from stratarec.hot.reuse import measure_drift, measure_reuse
    from stratarec.hot.selection import row_bytes_of
    from stratarec.io.atomic import check_output
    from stratarec.reporting.profile_page import print_drift, print_hot, print_profile, print_reuse, write_profile
    from stratarec.training.torch_setup import torch_settings

    dataset = Dataset.open(args.dataset, verify="used")
    beside = dataset.path.resolve()
    output = Path(args.output or beside.with_name(f"{beside.name}-profile.html"))
    check_output(output, ".html")
    if args.classify and args.hot is None:
        raise ConfigError("--classify counts inputs that need hot rows alone: say how many bytes these have by --hot")
    # Threads of torch wait for each other longer than they work at batches that are only counted.
    with dataset.locked(), torch_settings(threads=1):
        row_bytes = row_bytes_of(dataset, args.dim, RowOptimizerConfig(kind=args.optimizer))
        hot = None if args.hot is None else _profile_hot(args, dataset, row_bytes, output.with_suffix(".hot.json"))
        counted = _classify(args, dataset, hot, output) if hot is not None and args.classify else []
        found = run(dataset, args.split, batch_size=args.batch_size, batches=args.batches)
        progress = progress_of(args)
        reuse = measure_reuse(dataset, args.split, batch_size=args.batch_size, progress=progress)
        drift = measure_drift(dataset, args.split)
        points = budgets(dataset, row_bytes) if hot is None else hot.points
    print_profile(found)
    print_reuse(reuse)
    print_drift(drift)
    if hot is not None:
        remark = warn_inherited_ids(dataset)
        print_hot(hot, [*counted, *([f"note: {remark}"] if remark else [])])
    write_profile(output, found, reuse, points, hot, drift)
    say(f"report {output}")


def _profile_hot(args: argparse.Namespace, dataset: Dataset, row_bytes: Mapping[str, int], output: Path) -> HotProfile:
    """Which rows are hot, written to `output`."""
    from stratarec.config.units import parse_bytes
    from stratarec.hot.calibrator import calibrate
    from stratarec.io.atomic import check_output

    check_output(output)
    profile = calibrate(dataset, row_bytes, parse_bytes(args.hot, "--hot"))
    profile.write(output)
    say(f"hot rows {output}")
    return profile


def _classify(args: argparse.Namespace, dataset: Dataset, profile: HotProfile, beside: Path) -> list[str]:
    """How many inputs of each split are hot, counted; counts are kept `beside`."""
    from stratarec.hot.hot_loader import classify
    from stratarec.hot.selection import parts_of

    parts, lines = parts_of(dataset, profile.row_bytes), []
    hot = profile.hot(parts)
    for split in dataset.splits:
        if samples := dataset.samples(split):
            path = beside.with_suffix(f".hot-{split}.json")
            found = classify(dataset, parts, hot, split, path, progress_of(args)).inputs
            lines.append(f"{split:6} {found:>12,} of {samples:,} inputs are hot, {found / samples:.2%}")
    return lines


COMMAND = Subcommand(
    name="profile",
    text="Measure how values repeat inside sessions and batches, and what deduplication saves; how rows are used "
    "again, and what caches of each size would find; and which rows are hot.",
    example="stratarec profile data/globo --batch-size 4096 --hot 64MiB",
    options=_options,
    run=profile,
)
