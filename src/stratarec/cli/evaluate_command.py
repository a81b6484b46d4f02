"""`stratarec evaluate`: metrics of a trained model."""

from __future__ import annotations

import argparse

from stratarec.cli.arguments import SPLITS, Subcommand, add_data, data_or_logs, refuse_ranks, say


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    command.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="metrics of each value of this column (repeatable)"
    )
    command.add_argument(
        "--split", choices=SPLITS, action="append", default=[], help="split to evaluate (repeatable; default: test)"
    )


def evaluate(args: argparse.Namespace) -> None:
    """Metrics of a trained model."""
    from stratarec.distributed.mesh import joined
    from stratarec.models.metrics import figures
    from stratarec.reporting.metric_names import bins, lines, sliced
    from stratarec.reporting.progress_bar import make_progress
    from stratarec.training.evaluation.evaluate import evaluate_split
    from stratarec.training.raw_logs import FreshLogs, evaluate_logs
    from stratarec.training.run.open_run import open_run

    data, logs = data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if logs:
            refuse_ranks(mesh.ranks)
            fresh = FreshLogs(trained, logs, keep=args.by, earlier=args.history, labelled=True)
            whole, slices = evaluate_logs(fresh, progress)
            say(*lines("log", figures(whole)), *bins("log", figures(whole)))
            for name, found in slices.items():
                for label in whole:
                    head = name if len(whole) == 1 else f"{name} ({label})"
                    say(*sliced(head, [(value, each[label].to_dict()) for value, each in found]))
            return
        for split in args.split or ["test"]:
            precision = trained.recipe.train.precision
            found_split, _ = evaluate_split(
                trained.model, trained.dataset, split, precision=precision, progress=progress, mesh=mesh
            )
            if mesh.is_first:
                told = figures(found_split)
                say(*lines(split, told), *bins(split, told))


COMMAND = Subcommand(
    name="evaluate",
    text="Print metrics of a trained model on raw logs with labels, or on splits of a prepared data set.",
    example="stratarec evaluate runs/demo tomorrow.csv --by country",
    options=_options,
    run=evaluate,
    by_ranks=True,
)
