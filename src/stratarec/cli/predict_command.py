"""`stratarec predict`: scores as Parquet or CSV."""

from __future__ import annotations

import argparse

from stratarec.cli.arguments import (
    SPLITS,
    Subcommand,
    add_data,
    add_device,
    add_json,
    data_or_logs,
    output_of,
    progress_of,
    refuse_ranks,
    say,
    say_json,
    whole_number,
)
from stratarec.errors import ConfigError

MOST_ROWS = 1_000_000


def _options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    add_device(command)
    add_json(command)
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
    command.add_argument(
        "--top", type=whole_number("rows", MOST_ROWS), metavar="K", help="write the K best rows of each user, in order"
    )
    command.add_argument(
        "--by", metavar="COLUMN", help="... of each session, or (of raw logs) value of a column such as a request"
    )
    command.add_argument("--split", choices=SPLITS, help="split to score (default: test)")
    command.add_argument("-o", "--output", help="file of scores, .csv or .parquet (default: in the run)")


def predict(args: argparse.Namespace) -> None:
    """Scores as Parquet or CSV."""
    from stratarec.distributed.mesh import joined
    from stratarec.io.atomic import check_output
    from stratarec.progress import SilentProgress
    from stratarec.training.evaluate import chosen_split, column_of
    from stratarec.training.predict import WRITERS, Top, predict_logs
    from stratarec.training.predict import predict as run
    from stratarec.training.raw_logs import RawLogs
    from stratarec.training.run.open_run import open_run

    if args.by and not args.top:
        raise ConfigError("--by says whose best rows --top writes; name that too, such as --top 10")
    data, logs = data_or_logs(args, keep=args.keep)
    split = args.split or "test"
    if args.safe and not (logs and args.output and args.output.lower().endswith(".csv")):
        raise ConfigError("--safe is of CSV files, which raw logs give: name one by -o, such as -o scores.csv")
    output = output_of(args, f"predictions-{'log' if logs else split}.parquet")
    check_output(output, *WRITERS)
    with joined() as mesh, open_run(args.run, data, mesh=mesh).placed(args.device) as trained:
        progress = progress_of(args) if mesh.is_first else SilentProgress()
        if logs:
            refuse_ranks(mesh.ranks)
            by = column_of(trained.dataset.schema, args.by or "user")
            keep = [*args.keep, by] if args.top else args.keep
            fresh = RawLogs(trained, logs, keep=keep, earlier=args.history)
            top = Top(args.top, by) if args.top else None
            rows = predict_logs(fresh, output, progress, top, safe=args.safe)
        else:
            split = chosen_split(trained.dataset, split)
            rows = run(trained, split, output, progress, Top(args.top, args.by or "user") if args.top else None)
    if mesh.is_first and args.json:
        say_json({"scores": rows, "file": str(output), "model": trained.description})
    elif mesh.is_first:
        say(f"{rows:,} scores in {output}, by {trained.description}")


COMMAND = Subcommand(
    name="predict",
    text="Score raw logs, in their order and without labels, or a split of a prepared data set, each label by itself.",
    example="stratarec predict runs/demo tomorrow.csv --keep user -o scores.csv",
    options=_options,
    run=predict,
    by_ranks=True,
)
