"""`stratarec evaluate`: metrics of a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import (
    SPLITS,
    Subcommand,
    add_data,
    add_device,
    add_json,
    data_or_logs,
    progress_of,
    refuse_ranks,
    say,
    say_json,
    whole_number,
)
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.models.metrics import Ranked

MOST_PLACES = 1_000_000


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    add_device(command)
    add_json(command)
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
    from stratarec.progress import SilentProgress
    from stratarec.reporting.metric_texts import bins, lines, ranks, sliced
    from stratarec.training.baseline.beside import beside
    from stratarec.training.evaluate import (
        check_group_column,
        chosen_split,
        column_of,
        evaluate_split,
        rank_within,
        split_groups,
    )
    from stratarec.training.raw_logs import RawLogs, evaluate_logs
    from stratarec.training.run.open_run import open_run

    if args.at and not args.rank_by:
        raise ConfigError("--at says how many places --rank-by looks at; name that too, such as --rank-by user")
    at = sorted({*args.at}) or [10]
    data, logs = data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh).placed(args.device) as trained:
        progress = progress_of(args) if mesh.is_first else SilentProgress()
        told: dict[str, Any] = {"model": trained.description}
        if mesh.is_first and not args.json:
            say(f"model: {trained.description}")
        if logs:
            refuse_ranks(mesh.ranks)
            rank_by = [column_of(trained.dataset.schema, name) for name in args.rank_by]
            fresh = RawLogs(trained, logs, keep=[*args.by, *rank_by], earlier=args.history, labelled=True)
            told_logs = evaluate_logs(fresh, progress, args.by, rank_by, at)
            whole = told_logs.whole
            if args.json:
                by = {
                    name: {str(value): figures(each) for value, each in found}
                    for name, found in told_logs.slices.items()
                }
                say_json({**told, "log": figures(whole), "by": by, "rank_by": _plain(told_logs.ranked)})
                return
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
            check_group_column(trained.dataset.schema, name)
        for split in [chosen_split(trained.dataset, name) for name in args.split or ["test"]]:
            precision = trained.recipe.train.precision
            found_split, scored = evaluate_split(
                trained.model, trained.dataset, split, precision=precision, progress=progress, mesh=mesh
            )
            if not mesh.is_first:
                continue
            orders = {
                name: rank_within(list(found_split), scored, split_groups(trained.dataset, split, scored, name), at)
                for name in args.rank_by
            }
            score_split = figures(found_split)
            told[split] = {**score_split, "rank_by": _plain(orders)}
            if not args.json:
                say(*lines(split, score_split), *bins(split, score_split))
                say(*beside(trained.dataset, split, score_split))
                for name, order in orders.items():
                    say(*ranks(split, name, order))
        if mesh.is_first and args.json:
            say_json(told)
        elif mesh.is_first:
            say(*trained.dataset.suspicions)


def _plain(ranked: Mapping[str, Mapping[str, Ranked]]) -> dict[str, Any]:
    """Column -> label -> figures, as JSON data."""
    return {
        column: {
            label: {
                name: {key: None if value != value else value for key, value in asdict(one).items()}
                for name, one in each.figures.items()
            }
            for label, each in found.items()
        }
        for column, found in ranked.items()
    }


COMMAND = Subcommand(
    name="evaluate",
    text="Print metrics of a trained model on raw logs with labels, or on splits of a prepared data set.",
    example="stratarec evaluate runs/demo tomorrow.csv --by country",
    options=_options,
    run=evaluate,
    by_ranks=True,
)
