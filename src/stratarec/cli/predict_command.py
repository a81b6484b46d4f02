"""`stratarec predict`: scores as Parquet or CSV."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import SPLITS, Subcommand, add_data, data_or_logs, refuse_ranks, say
from stratarec.errors import ConfigError


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    command.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="pass this column through as it is (repeatable); a spreadsheet that opens a CSV file runs cells that "
        "begin with =, +, - or @: see --safe",
    )
    command.add_argument(
        "--safe",
        action="store_true",
        help="put ' before cells of a CSV file that a spreadsheet would run, as OWASP says",
    )
    command.add_argument("--split", choices=SPLITS, help="split to score (default: test)")
    command.add_argument("-o", "--output", help="Parquet file, or CSV for raw logs (default: in the run)")


def predict(args: argparse.Namespace) -> None:
    """Scores as Parquet or CSV."""
    from stratarec.distributed.mesh import joined
    from stratarec.io.atomic import check_output
    from stratarec.reporting.progress_bar import make_progress
    from stratarec.training.predict import predict as run
    from stratarec.training.predict import predict_logs
    from stratarec.training.raw_logs import FreshLogs
    from stratarec.training.run.open_run import open_run

    data, logs = data_or_logs(args, keep=args.keep)
    split = args.split or "test"
    if args.safe and not (logs and args.output and args.output.endswith(".csv")):
        raise ConfigError("--safe is of CSV files, which raw logs give: name one by -o, such as -o scores.csv")
    output = Path(args.output or Path(args.run) / f"predictions-{'log' if logs else split}.parquet")
    check_output(output)
    with joined() as mesh, open_run(args.run, data, mesh=mesh) as trained:
        progress = make_progress(quiet=args.quiet or not mesh.is_first)
        if logs:
            refuse_ranks(mesh.ranks)
            fresh = FreshLogs(trained, logs, keep=args.keep, earlier=args.history)
            rows = predict_logs(fresh, output, progress, safe=args.safe)
        else:
            rows = run(trained, split, output, progress)
    if mesh.is_first:
        say(f"{rows:,} scores in {output}")


COMMAND = Subcommand(
    name="predict",
    text="Score raw logs, in their order and without labels, or a split of a prepared data set, each label by itself.",
    example="stratarec predict runs/demo tomorrow.csv --keep user -o scores.csv",
    options=_options,
    run=predict,
    by_ranks=True,
)
