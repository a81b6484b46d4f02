"""`stratarec explain`: what a model goes by."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import (
    SPLITS,
    Subcommand,
    add_data,
    add_json,
    data_or_logs,
    output_of,
    progress_of,
    say,
    say_json,
    whole_number,
)
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.progress import Progress
    from stratarec.training.run.open_run import TrainedModel

PAGE = "explanation.html"
MOST_SAMPLES, MOST_REPEATS = 1_000_000, 1000


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    command.add_argument("--split", choices=SPLITS, help="split to look at (default: test, else valid)")
    command.add_argument(
        "--row", metavar="[FILE:]ROW", help="what the score of this row of a log comes from, as `predict` numbers rows"
    )
    command.add_argument(
        "--feature", action="append", default=[], metavar="NAME", help="these features alone (repeatable)"
    )
    command.add_argument(
        "--samples", type=whole_number("samples", MOST_SAMPLES), metavar="N", help="samples to look at (default: 4096)"
    )
    command.add_argument(
        "--repeats", type=whole_number("repeats", MOST_REPEATS), metavar="N", help="permutations (default: 5)"
    )
    command.add_argument("--seed", type=whole_number("seeds", 1 << 31), help="of samples and permutations (default: 1)")
    add_json(command, "print JSON, and write no page")
    command.add_argument("-o", "--output", metavar="FILE", help=f"page with the curves (default: {PAGE} in the run)")


def explain(args: argparse.Namespace) -> None:
    """What a model goes by."""
    from stratarec.io.atomic import check_output
    from stratarec.training.run.open_run import open_run

    data, logs = data_or_logs(args)
    for name in ("samples", "repeats", "seed", "output"):
        if args.row and getattr(args, name):
            raise ConfigError(f"--{name} is of all samples, and --row of one: leave one of them out")
    if logs and not args.row:
        raise ConfigError("raw logs are explained a row at a time: name one by --row, or prepare them as a data set")
    if args.json and args.output:
        raise ConfigError("--json prints what --output draws: leave one of them out")
    output = output_of(args, PAGE)
    if not args.row and not args.json:
        check_output(output.resolve(), ".html")
    with open_run(args.run, data) as trained:
        progress = progress_of(args)
        if args.row:
            _explain_row(args, trained, logs, progress)
        else:
            _explain_all(args, trained, output, progress)


def _explain_all(args: argparse.Namespace, trained: TrainedModel, output: Path, progress: Progress) -> None:
    from stratarec.reporting.explain_page import print_explanation, write_explanation
    from stratarec.training.evaluate import chosen_split
    from stratarec.training.explain.explain import REPEATS, SAMPLES, explained, with_curves
    from stratarec.training.explain.probe import Probe, columns_of, drawn

    columns_of(trained.dataset.schema, args.feature)
    split, seed = chosen_split(trained.dataset, args.split), args.seed or 1
    batch = drawn(trained.dataset, split, args.samples or SAMPLES, seed)
    probe = Probe(trained.model, trained.dataset, batch, trained.recipe.train.precision)
    found: dict[str, Any] = {
        "model": trained.description,
        "split": split,
        "of": trained.dataset.samples(split),
        **explained(
            probe, args.feature, repeats=args.repeats or REPEATS, seed=seed, progress=progress, check=lambda: None
        ),
    }
    found = with_curves(found, probe, args.feature, progress)
    if args.json:
        say_json(found)
        return
    print_explanation(found)
    write_explanation(output, trained.recipe.name, found)
    say(f"page: {output}")


def _explain_row(args: argparse.Namespace, trained: TrainedModel, logs: list[str], progress: Progress) -> None:
    from stratarec.reporting.explain_page import print_row
    from stratarec.training.evaluate import chosen_split
    from stratarec.training.explain.explain import explained_row
    from stratarec.training.explain.probe import Probe, row_of_split
    from stratarec.training.raw_logs import RawLogs

    file, _, number = args.row.rpartition(":")
    if not number.isdecimal() or not 1 <= int(number) < 1 << 40:
        raise ConfigError(f"--row {args.row}: expected the number of a row, or FILE:ROW")
    if logs:
        batch = RawLogs(trained, logs, earlier=args.history).sample(file, int(number))
    else:
        batch = row_of_split(trained.dataset, chosen_split(trained.dataset, args.split), file, int(number))
    probe = Probe(trained.model, trained.dataset, batch, trained.recipe.train.precision)
    found = {"model": trained.description, "row": args.row, **explained_row(probe, args.feature)}
    if args.json:
        say_json(found)
    else:
        print_row(found)


COMMAND = Subcommand(
    name="explain",
    text="Show which features a model goes by, how numbers bend its predictions, and what one row's score comes from.",
    example="stratarec explain runs/demo\n  stratarec explain runs/demo tomorrow.csv --row 17",
    options=_options,
    run=explain,
)
