"""`stratarec evaluate`: metrics of a trained model."""

from __future__ import annotations

import argparse

from stratarec.cli.arguments import (
    SPLITS,
    Subcommand,
    add_data,
    add_device,
    data_or_logs,
    refuse_ranks,
    say,
    whole_number,
)
from stratarec.errors import ConfigError

MOST_PLACES = 1_000_000


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    add_device(command)
    command.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="metrics of each value of this column (repeatable)"
    )
    command.add_argument(
        "--rank-by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="the order within each user, session, or (of raw logs) value of a column such as a request (repeatable)",
    )
    command.add_argument(
        "--at",
        action="append",
        type=whole_number("places", MOST_PLACES),
        default=[],
        metavar="K",
        help="places that --rank-by looks at (repeatable; default: 10)",
    )
    command.add_argument(
        "--split", choices=SPLITS, action="append", default=[], help="split to evaluate (repeatable; default: test)"
    )


def evaluate(args: argparse.Namespace) -> None:
    """Metrics of a trained model."""
    from stratarec.distributed.mesh import joined
    from stratarec.models.metrics import figures
    from stratarec.reporting.metric_names import bins, lines, ranks, sliced
    from stratarec.reporting.progress_bar import make_progress
    from stratarec.training.baseline.beside import beside
    from stratarec.training.evaluation.evaluate import chosen_split, evaluate_split
    from stratarec.training.evaluation.rank_within import check_kept, column_of, groups_of_split, rank_within
    from stratarec.training.raw_logs import FreshLogs, evaluate_logs
    from stratarec.training.run.open_run import open_run

    if args.at and not args.rank_by:
        raise ConfigError("--at says how many places --rank-by looks at; name that too, such as --rank-by user")
    at = sorted({*args.at}) or [10]
    data, logs = data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh).placed(args.device) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if mesh.is_first:
            say(f"model: {trained.told}")
        if logs:
            refuse_ranks(mesh.ranks)
            rank_by = [column_of(trained.dataset.schema, name) for name in args.rank_by]
            fresh = FreshLogs(trained, logs, keep=[*args.by, *rank_by], earlier=args.history, labelled=True)
            told_logs = evaluate_logs(fresh, progress, args.by, rank_by, at)
            whole = told_logs.whole
            say(*lines("log", figures(whole)), *bins("log", figures(whole)))
            for name, ranked in told_logs.ranked.items():
                say(*ranks("log", name, ranked))
            for name, found in told_logs.slices.items():
                for label in whole:
                    head = name if len(whole) == 1 else f"{name} ({label})"
                    say(*sliced(head, [(value, each[label].to_dict()) for value, each in found]))
            say(*trained.dataset.suspicions)
            return
        for name in args.rank_by:
            check_kept(trained.dataset.schema, name)
        for split in [chosen_split(trained.dataset, name) for name in args.split or ["test"]]:
            precision = trained.recipe.train.precision
            found_split, scored = evaluate_split(
                trained.model, trained.dataset, split, precision=precision, progress=progress, mesh=mesh
            )
            if mesh.is_first:
                told = figures(found_split)
                say(*lines(split, told), *bins(split, told), *beside(trained.dataset, split, told))
                for name in args.rank_by:
                    group = groups_of_split(trained.dataset, split, scored, name)
                    say(*ranks(split, name, rank_within(list(found_split), scored, group, at)))
        if mesh.is_first:
            say(*trained.dataset.suspicions)


COMMAND = Subcommand(
    name="evaluate",
    text="Print metrics of a trained model on raw logs with labels, or on splits of a prepared data set.",
    example="stratarec evaluate runs/demo tomorrow.csv --by country",
    options=_options,
    run=evaluate,
    by_ranks=True,
)
