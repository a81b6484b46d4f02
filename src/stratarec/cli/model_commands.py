"""`stratarec evaluate`, `predict`, `explain` and `export`: use the model of a finished run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import (
    RUN_HELP,
    SPLITS,
    add_data,
    add_device,
    add_json,
    add_repeated,
    data_or_logs,
    output_of,
    print_findings,
    print_json,
    print_lines,
    progress_of,
    require_one_process,
    subcommand,
    whole_number,
)
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.distributed.mesh import Mesh
    from stratarec.models.metrics import Ranked
    from stratarec.progress import Progress
    from stratarec.training.run.open_run import TrainedModel

_EXPLANATION = "explanation.html"
# Maximum values of options.
_MOST_ROWS, _MOST_REPEATS = 1_000_000, 1000


def _evaluate_options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    add_device(command)
    add_json(command)
    add_repeated(command, "--by", "COLUMN", "also print metrics per value of COLUMN")
    within = "each user, session or, for raw logs, value of a column such as a request id"
    add_repeated(command, "--rank-by", "COLUMN", f"also print ranking metrics within {within}")
    command.add_argument(
        "--at",
        action="append",
        type=whole_number("places", _MOST_ROWS),
        default=[],
        metavar="K",
        help="cut-off of the ranking metrics (repeatable; default: 10)",
    )
    command.add_argument(
        "--split",
        choices=SPLITS,
        action="append",
        default=[],
        help="split to evaluate (repeatable; default: test)",
    )


@subcommand(
    name="evaluate",
    text="Print metrics of a trained model on raw logs with labels, or on splits of a prepared data set.",
    example="stratarec evaluate runs/demo tomorrow.csv --by country",
    options=_evaluate_options,
    multi_process=True,
)
def evaluate(args: argparse.Namespace) -> None:
    """Print metrics of a trained model."""
    from stratarec.distributed.mesh import joined
    from stratarec.progress import SilentProgress
    from stratarec.training.run.open_run import open_run

    if args.at and not args.rank_by:
        raise ConfigError("--at requires --rank-by, such as --rank-by user")
    cutoffs = sorted({*args.at}) or [10]
    data, logs = data_or_logs(args, by=args.by)
    with joined() as mesh, open_run(args.run, data, mesh=mesh, device=args.device) as trained:
        progress = progress_of(args) if mesh.is_first else SilentProgress()
        if mesh.is_first and not args.json:
            print_lines(f"model: {trained.description}")
        if logs:
            require_one_process(mesh.ranks)
            results = _evaluate_logs(args, trained, logs, cutoffs, progress)
        else:
            results = _evaluate_splits(args, trained, cutoffs, progress, mesh)
        if mesh.is_first and args.json:
            print_json({"model": trained.description, **results})
        elif mesh.is_first:
            print_lines(*trained.dataset.suspicions)


def _evaluate_logs(
    args: argparse.Namespace, trained: TrainedModel, logs: list[str], cutoffs: list[int], progress: Progress
) -> dict[str, Any]:
    """Print metrics of a model on raw logs, and return the metrics as JSON data."""
    from stratarec.models.metrics import figures
    from stratarec.reporting.metric_texts import bins, lines, ranks, sliced
    from stratarec.training.continual.period_checks import Novelty
    from stratarec.training.evaluate import column_of
    from stratarec.training.raw_logs import RawLogs, evaluate_logs

    rank_by = [column_of(trained.dataset.schema, name) for name in args.rank_by]
    user = trained.dataset.schema.user
    novelty = Novelty(trained.dataset, user)
    fresh = RawLogs(
        trained.with_fields(args.fields),
        logs,
        keep=[*args.by, *rank_by],
        earlier=args.history,
        labelled=True,
        novelty=novelty.of if user in novelty.features else None,
    )
    result = evaluate_logs(fresh, progress, args.by, rank_by, cutoffs)
    metrics, trained_files = figures(result.overall), fresh.trained_files
    if not args.json:
        print_lines(*lines("log", metrics))
        if result.users:
            every, new = result.users
            print_lines(
                f"users: {every:,}, of whom {new:,} ({new / max(every, 1):.1%}) are "
                "not in the training split"
            )
        print_lines(*bins("log", metrics))
        for file in trained_files:
            print_lines("the model was trained on rows of this log, so metrics are too good:", f"  {file}")
        for name, ranked in result.ranked.items():
            print_lines(*ranks("log", name, ranked))
        for name, slices in result.slices.items():
            for label in result.overall:
                title = name if len(result.overall) == 1 else f"{name} ({label})"
                print_lines(
                    *sliced(title, [(value, by_label[label].to_dict()) for value, by_label in slices])
                )
    by_column = {
        name: {str(value): figures(by_label) for value, by_label in slices}
        for name, slices in result.slices.items()
    }
    users = dict(zip(("all", "new"), result.users, strict=True)) if result.users else None
    rankings = _ranks_as_json(result.ranked)
    return {"log": metrics, "users": users, "by": by_column, "rank_by": rankings, "trained": trained_files}


def _evaluate_splits(
    args: argparse.Namespace, trained: TrainedModel, cutoffs: list[int], progress: Progress, mesh: Mesh
) -> dict[str, Any]:
    """Print metrics of a model on splits (the first rank prints), and return the metrics as JSON
    data.
    """
    from stratarec.models.metrics import figures
    from stratarec.reporting.metric_texts import bins, lines, ranks
    from stratarec.training.baseline.baselines import compare_with_baselines
    from stratarec.training.evaluate import (
        check_group_column,
        chosen_split,
        evaluate_split,
        rank_within,
        split_groups,
    )

    dataset, results = trained.dataset, dict[str, Any]()
    for name in args.rank_by:
        check_group_column(dataset.schema, name)
    for split in [chosen_split(dataset, name) for name in args.split or ["test"]]:
        precision = trained.recipe.train.precision
        by_label, scored = evaluate_split(
            trained.model, dataset, split, precision=precision, progress=progress, mesh=mesh
        )
        if not mesh.is_first:
            continue
        ranked = {
            name: rank_within(list(by_label), scored, split_groups(dataset, split, scored, name), cutoffs)
            for name in args.rank_by
        }
        metrics, is_trained = figures(by_label), split in trained.trained_splits
        results[split] = {**metrics, "rank_by": _ranks_as_json(ranked), "trained": is_trained}
        if not args.json:
            print_lines(*lines(split, metrics), *bins(split, metrics))
            if is_trained:
                print_lines(
                    f"the model was trained on the {split} split: these metrics are "
                    "too good for new samples"
                )
            print_findings(
                "baselines", compare_with_baselines(dataset, split, scored, trained.recipe.model)
            )
            for name, one in ranked.items():
                print_lines(*ranks(split, name, one))
    return results


def _ranks_as_json(ranked: Mapping[str, Mapping[str, Ranked]]) -> dict[str, Any]:
    """Return column -> label -> metrics as JSON data, with null for NaN."""
    return {
        column: {
            label: {
                name: {key: None if value != value else value for key, value in asdict(metric).items()}
                for name, metric in one.figures.items()
            }
            for label, one in by_label.items()
        }
        for column, by_label in ranked.items()
    }


def _predict_options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    add_device(command)
    add_json(command)
    cells = "a spreadsheet executes CSV cells that begin with =, +, - or @: see --safe"
    add_repeated(command, "--keep", "COLUMN", f"copy COLUMN of the log to the output unchanged; {cells}")
    command.add_argument(
        "--safe",
        action="store_true",
        help="put ' before CSV cells that a spreadsheet would execute, as OWASP recommends",
    )
    command.add_argument(
        "--top",
        type=whole_number("rows", _MOST_ROWS),
        metavar="K",
        help="write only the K highest scores of each user, sorted",
    )
    command.add_argument(
        "--by",
        metavar="COLUMN",
        help="with --top: rank within each session or, for raw logs, value of a column such as a request "
        "id, instead of each user",
    )
    command.add_argument("--split", choices=SPLITS, help="split to score (default: test)")
    command.add_argument(
        "-o",
        "--output",
        help="output file or URL of one, .csv, .csv.gz or .parquet, or - for CSV on standard output "
        "(default: Parquet file in the run)",
    )


@subcommand(
    name="predict",
    text="Score raw logs, which need no labels, or a split of a prepared data set. The output keeps the "
    "order of the rows and has one column per label.",
    example="stratarec predict runs/demo tomorrow.csv --keep user -o scores.csv",
    options=_predict_options,
    multi_process=True,
)
def predict(args: argparse.Namespace) -> None:
    """Write scores as Parquet or CSV."""
    from stratarec.distributed.mesh import joined
    from stratarec.io.remote import is_url, uploaded
    from stratarec.progress import SilentProgress
    from stratarec.training.evaluate import chosen_split, column_of
    from stratarec.training.predict import STANDARD_OUTPUT, Top, check_scores_file, predict_logs
    from stratarec.training.predict import predict as run
    from stratarec.training.raw_logs import RawLogs
    from stratarec.training.run.open_run import open_run

    if args.by and not args.top:
        raise ConfigError("--by requires --top, such as --top 10")
    data, logs = data_or_logs(args, keep=args.keep)
    split = args.split or "test"
    if args.safe and not (logs and args.output and args.output.lower().endswith((".csv", ".csv.gz", "-"))):
        raise ConfigError(
            "--safe applies to raw logs with CSV output: name a CSV file, such as -o scores.csv"
        )
    default = f"predictions-{'log' if logs else split}.parquet"
    place = args.output if is_url(args.output or "") else output_of(args, default)
    if place == STANDARD_OUTPUT and args.json:
        raise ConfigError("--json prints to standard output, as -o - does: leave one of them out")
    with ExitStack() as stack:
        output = stack.enter_context(uploaded(place))
        check_scores_file(output)
        mesh = stack.enter_context(joined())
        trained = stack.enter_context(open_run(args.run, data, mesh=mesh, device=args.device))
        progress = progress_of(args) if mesh.is_first else SilentProgress()
        if logs:
            require_one_process(mesh.ranks)
            by = column_of(trained.dataset.schema, args.by or "user")
            keep = [*args.keep, by] if args.top else args.keep
            fresh = RawLogs(trained.with_fields(args.fields), logs, keep=keep, earlier=args.history)
            top = Top(args.top, by) if args.top else None
            rows = predict_logs(fresh, output, progress, top, safe=args.safe)
        else:
            split = chosen_split(trained.dataset, split)
            rows = run(
                trained, split, output, progress, Top(args.top, args.by or "user") if args.top else None
            )
    if mesh.is_first and args.json:
        print_json({"scores": rows, "file": str(place), "model": trained.description})
    elif mesh.is_first and place != STANDARD_OUTPUT:
        print_lines(f"wrote {rows:,} score{'s' * (rows != 1)} to {place}; model: {trained.description}")


def _explain_options(command: argparse.ArgumentParser) -> None:
    add_data(command)
    command.add_argument(
        "--split", choices=SPLITS, help="split to use (default: test if there is one, else valid)"
    )
    command.add_argument(
        "--row",
        metavar="[FILE:]ROW",
        help="explain the score of this row of a log; rows are numbered as in the output of `predict`",
    )
    add_repeated(command, "--feature", "NAME", "explain only this feature")
    command.add_argument(
        "--samples",
        type=whole_number("samples", _MOST_ROWS),
        metavar="N",
        help="number of samples (default: 4096)",
    )
    command.add_argument(
        "--repeats",
        type=whole_number("repeats", _MOST_REPEATS),
        metavar="N",
        help="number of permutations per feature (default: 5)",
    )
    command.add_argument(
        "--seed", type=whole_number("seeds", 1 << 31), help="seed of samples and permutations (default: 1)"
    )
    add_json(command, "print JSON, and write no page")
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"HTML page with the curves (default: {_EXPLANATION} in the run)",
    )


@subcommand(
    name="explain",
    text="Show which features a model uses, how its predictions depend on numeric features, and how each "
    "feature contributes to the score of one row.",
    example="stratarec explain runs/demo\n  stratarec explain runs/demo tomorrow.csv --row 17",
    options=_explain_options,
)
def explain(args: argparse.Namespace) -> None:
    """Show which features a model uses."""
    from stratarec.io.atomic import check_output
    from stratarec.training.evaluate import chosen_split
    from stratarec.training.run.open_run import open_run

    data, logs = data_or_logs(args)
    for name in ("samples", "repeats", "seed", "output"):
        if args.row and getattr(args, name):
            raise ConfigError(f"--{name} has no effect with --row: leave one of them out")
    if logs and not args.row:
        raise ConfigError(
            "raw logs are explained one row at a time: add --row, or prepare the logs as a data set"
        )
    if args.json and args.output:
        raise ConfigError("--json writes no page: leave out --json or --output")
    output = output_of(args, _EXPLANATION)
    if not args.row and not args.json:
        check_output(output.resolve(), ".html")
    with ExitStack() as stack:
        trained = stack.enter_context(open_run(args.run, data))
        if args.row:
            _explain_row(args, trained, logs)
            return
        if trained.is_refitted and chosen_split(trained.dataset, args.split) in trained.trained_splits:
            # A model that was trained on the split (`train.refit`) remembers its rows, which would
            # exaggerate each importance.
            stack.close()
            trained = stack.enter_context(open_run(args.run, data, tested=True))
        _explain_all(args, trained, output)


def _explain_all(args: argparse.Namespace, trained: TrainedModel, output: Path) -> None:
    from stratarec.reporting.explain_page import print_explanation, write_explanation
    from stratarec.training.evaluate import chosen_split
    from stratarec.training.explain.explain import REPEATS, SAMPLES, explain_columns, with_curves
    from stratarec.training.explain.probe import Probe, columns_of, draw_samples

    columns_of(trained.dataset.schema, args.feature)
    split, seed = chosen_split(trained.dataset, args.split), args.seed or 1
    progress = progress_of(args)
    batch = draw_samples(trained.dataset, split, args.samples or SAMPLES, seed)
    probe = Probe(trained.model, trained.dataset, batch, trained.recipe.train.precision)
    explanation: dict[str, Any] = {
        "model": trained.description,
        "split": split,
        "of": trained.dataset.samples(split),
        **explain_columns(
            probe,
            args.feature,
            repeats=args.repeats or REPEATS,
            seed=seed,
            progress=progress,
            check=lambda: None,
        ),
    }
    explanation = with_curves(explanation, probe, args.feature, progress)
    if args.json:
        print_json(explanation)
        return
    print_explanation(explanation)
    write_explanation(output, trained.recipe.name, explanation)
    print_lines(f"page: {output}")


def _explain_row(args: argparse.Namespace, trained: TrainedModel, logs: list[str]) -> None:
    from stratarec.reporting.explain_page import print_row
    from stratarec.training.evaluate import chosen_split
    from stratarec.training.explain.explain import explain_row
    from stratarec.training.explain.probe import Probe, row_of_split
    from stratarec.training.raw_logs import RawLogs

    file, _, number = args.row.rpartition(":")
    if not number.isdecimal() or not 1 <= int(number) < 1 << 40:
        raise ConfigError(f"--row must be a row number or FILE:ROW; got {args.row}")
    if logs:
        batch = RawLogs(trained.with_fields(args.fields), logs, earlier=args.history).sample(
            file, int(number)
        )
    else:
        batch = row_of_split(trained.dataset, chosen_split(trained.dataset, args.split), file, int(number))
    probe = Probe(trained.model, trained.dataset, batch, trained.recipe.train.precision)
    explanation = {"model": trained.description, "row": args.row, **explain_row(probe, args.feature)}
    if args.json:
        print_json(explanation)
    else:
        print_row(explanation)


def _export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help=RUN_HELP)
    command.add_argument(
        "-o",
        "--output",
        help="directory of the export, or the URL of one in an object store (default: export in the run)",
    )
    command.add_argument(
        "--since",
        metavar="EXPORT",
        help="also write the changes since EXPORT to OUTPUT.delta, for Scorer.update",
    )
    command.add_argument(
        "--onnx", action="store_true", help="also write the network as network.onnx (needs stratarec[onnx])"
    )


@subcommand(
    name="export",
    text="Export a trained model as data: configuration, weights, tables and vocabularies. "
    "`stratarec.Scorer` scores rows with it.",
    example="stratarec export runs/demo -o out",
    options=_export_options,
)
def export(args: argparse.Namespace) -> None:
    """Export a trained model."""
    from stratarec.io.atomic import check_absent
    from stratarec.io.remote import check_store_url, is_url, local_copy, upload_directory
    from stratarec.io.scratch import temporary_directory
    from stratarec.serving.export_manifest import DELTA, MANIFEST, ExportManifest
    from stratarec.serving.exported_model import ExportedModel
    from stratarec.training.export.export import export as run
    from stratarec.training.export.write_delta import write_delta
    from stratarec.training.run.open_run import open_run

    with ExitStack() as stack:
        since = Path(stack.enter_context(local_copy(args.since, "--since"))) if args.since else None
        if is_url(args.output or ""):
            place, output = args.output.rstrip("/"), stack.enter_context(temporary_directory()) / "export"
            check_store_url(place, "--output")
        else:
            output = output_of(args, "export")
            place = str(output)
        # If an earlier call was killed between export and delta, the export exists. It is then
        # checked and kept.
        repeated = bool(since and output.name) and (output / MANIFEST).is_file()
        if not repeated:
            check_absent(output)
        delta, delta_place = output.with_name(f"{output.name}.delta"), f"{place}.delta"
        if since:
            check_absent(delta)
            ExportManifest.read(since)
        with open_run(args.run, same_samples=False) as trained:
            run(trained, output, onnx=args.onnx, repeated=repeated)
            if is_url(place):
                upload_directory(output, place, MANIFEST, "--output")
            print_lines(f"export {place}; model: {trained.description}")
        if since is None:
            return
        share = write_delta(ExportedModel.open(since), output, delta)
        if share is None:
            print_lines(
                f"no delta: more than a quarter of the rows differ from {args.since}; use {place} instead"
            )
            return
        if is_url(place):
            upload_directory(delta, delta_place, DELTA, "--output")
        print_lines(f"delta  {delta_place}, {share:.1%} of the rows, relative to {args.since}")
