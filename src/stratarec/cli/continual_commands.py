"""`stratarec continue`, `forget`, `rebase` and `revert`: add periods to a finished run, or remove
the last one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import (
    add_device,
    add_json,
    add_periods,
    add_run,
    logs_of_periods,
    print_lines,
    progress_of,
    subcommand,
)
from stratarec.errors import Alarm

if TYPE_CHECKING:
    from stratarec.training.export.publish import PublishTarget
    from stratarec.training.run.periods import Period

# Maximum number of unknown values of a column that `forget` prints.
_SHOWN_VALUES = 5


def _continue_options(command: argparse.ArgumentParser) -> None:
    add_run(command)
    add_periods(command)
    add_device(command)
    add_json(command, "print one line of JSON per period")
    command.add_argument("-o", "--output", metavar="FILE", help="also write an HTML report of all periods")
    command.add_argument(
        "--publish",
        metavar="DIR",
        help="after each period, write its changes to DIR (a directory, or the URL of one in an object "
        "store) as a "
        "delta for Scorer.update; write a full export the first time, and when more than a "
        "quarter of the rows differ",
    )
    command.add_argument(
        "--alert",
        action="store_true",
        help="exit with code 3 if the AUC of the last period is significantly below the mean of the seven "
        "periods before it, or if the mean of a dense feature has moved by half a standard deviation",
    )


@subcommand(
    name="continue",
    text="Continue a finished run with new log files. Each file is one period: it is scored, its values "
    "are counted "
    "and admitted, and the model trains on it once. A period is committed as a whole or not at all. "
    "Afterwards "
    "predict, evaluate and export use the model of the last period. A file that is already "
    "part of the run is skipped.",
    example="stratarec continue runs/demo monday.parquet tuesday.parquet",
    options=_continue_options,
    resumable=True,
)
def continue_run(args: argparse.Namespace) -> None:
    """Add each file to the run as a period: score it, train on it, and commit the result."""
    from stratarec.io.atomic import check_output

    if args.output:
        check_output(Path(args.output).resolve(), ".html")
    if args.publish:
        from stratarec.training.export.publish import PublishTarget

        with PublishTarget(args.publish) as target:
            target.check()
            _continue_and_publish(args, target)
    else:
        _continue_and_publish(args, None)


def _continue_and_publish(args: argparse.Namespace, target: PublishTarget | None) -> None:
    """Add the periods, and publish each one if there is a target."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.continual_run import continue_run as run_periods
    from stratarec.training.continual.period_checks import alarms

    run, messages, published = named_directory(args.run), list[str](), ""
    files, fields = logs_of_periods(args)
    for period, is_new in run_periods(run, files, progress_of(args), args.device, fields):
        messages = alarms(period.to_dict())
        if args.json:
            print_lines(_json_line(period, messages, is_new))
        elif is_new:
            print_lines(*_summary(args.run, period, messages))
        else:
            print_lines(f"period {period.number}: {period.file} is already part of the run; skipped")
        published = ""
        if target is not None and is_new:
            published = target.publish(run)
            print_lines(*([] if args.json else [f"export {published}"]))
        if args.output:
            _write_report(Path(args.output), args.run, run, messages)
    # An earlier command may have stopped between a period and its delta.
    if target is not None and not published:
        published = target.publish(run)
        print_lines(*([] if args.json else [f"export {published}"]))
    if args.alert and messages:
        raise Alarm(f"{args.run}, period {period.number}: {'; '.join(messages)}")


def _write_report(output: Path, name: str, run: Path, messages: list[str]) -> None:
    from stratarec.reporting.drift_page import write_drift
    from stratarec.training.run import periods

    contents = [periods.read(path).to_dict() for path in periods.paths(run)]
    write_drift(output, name, [content for content in contents if content["kind"] == "log"], messages)


def _json_line(period: Period, messages: list[str], is_new: bool) -> str:
    """Return all fields of a period except its calibration maps and the bins of its reliability
    diagrams.
    """
    content = period.to_dict()
    del content["calibration"], content["format"]
    content["scores"] = {name: _without_bins(scores) for name, scores in content["scores"].items()}
    return json.dumps(content | {"alarms": messages, "skipped": not is_new}, allow_nan=False)


def _without_bins(scores: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in scores.items() if name != "reliability"}
    labels = plain.get("labels")
    return plain | (
        {"labels": {name: _without_bins(label) for name, label in labels.items()}} if labels else {}
    )


def _summary(run: str, period: Period, messages: list[str]) -> list[str]:
    from stratarec.reporting.metric_texts import show

    scores = period.to_dict()["scores"]
    total = scores["all"]
    lines = [
        f"period {period.number}: {period.file}, {total['samples']:,} samples, scored before training on "
        f"them: AUC {show(total['auc'], 5)}, log loss {show(total['log_loss'], 5)}, normalized entropy "
        f"{show(total['normalized_entropy'], 5)}, calibration {show(total['calibration'], 3)}"
    ]
    for kind in (name for name in scores if name != "all"):
        share = scores[kind]["samples"] / max(total["samples"], 1)
        lines.append(f"  {kind:<6}{share:7.1%} of samples, AUC {show(scores[kind]['auc'], 5)}")
    for name, counts in period.lookups.items():
        lookups = max(counts.known + counts.tail + counts.new, 1)
        lines.append(
            f"  {name}: {counts.tail / lookups:.1%} of lookups hit rare values, {counts.new / lookups:.1%} "
            f"new values; {counts.admitted:,} values got a row, {counts.rows:,} rows in total"
            + (f", {counts.evicted:,} values lost their row" if counts.evicted else "")
        )
    lines += [f"  {message}" for message in messages]
    return [*lines, _model_line(run, period)]


def _model_line(run: str, period: Period) -> str:
    return f"model  {Path(run) / 'periods' / f'period-{period.number:05d}'}"


def _forget_options(command: argparse.ArgumentParser) -> None:
    add_run(command)
    command.add_argument(
        "file",
        metavar="FILE",
        help="CSV or Parquet with the values to forget; each column has the name of a vocabulary, of a "
        "feature, or of the user column",
    )


@subcommand(
    name="forget",
    text="Remove values, such as a user who asked for it, from a finished run: from vocabularies, counts, "
    "histories "
    "and rows, all or nothing. A served model forgets them with the next delta "
    "(`stratarec export --since`).",
    example="stratarec forget runs/demo users.csv",
    options=_forget_options,
)
def forget(args: argparse.Namespace) -> None:
    """Remove values from vocabularies, counts, events and rows."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.forget import forget as run
    from stratarec.training.run.run_directory import read_recipe

    path = named_directory(args.run)
    result = run(path, args.file)
    data = read_recipe(path).data.path
    for name, count in result.known.items():
        unknown = result.unknown[name]
        more = f" and {len(unknown) - _SHOWN_VALUES:,} more" if len(unknown) > _SHOWN_VALUES else ""
        shown = (
            f"; unknown: {', '.join(map(str, unknown.head(_SHOWN_VALUES)))}{more}" if len(unknown) else ""
        )
        print_lines(f"{name}: forgot {count:,} of {count + len(unknown):,} values{shown}")
    earlier = [
        data,
        *(path for path in (Path(args.run) / "checkpoints", Path(args.run) / "refit") if path.exists()),
    ]
    print_lines(
        *(
            f"warning: another process reads {path}, which still contains the values; "
            "the next command removes it"
            for path in result.remaining
        ),
        f"note   {', '.join(map(str, earlier))}, logs and exports still contain the values: remove them; "
        "for an export that is in use, write the next one with --since",
        _model_line(args.run, result.period),
    )


@subcommand(
    name="rebase",
    text="Renumber the rows of a run by recent counts, and drop the rows of evicted and forgotten values. "
    "Every call "
    "adds a period, also when nothing changes. Scores stay identical to the bit, which is verified before "
    "the commit; "
    "only rows that a cache holds as floats above an encoded table (memory.precision) are rounded, and the "
    "command prints their number.",
    example="stratarec rebase runs/demo",
    options=add_run,
)
def rebase(args: argparse.Namespace) -> None:
    """Renumber rows by recent counts, and drop rows that no value uses."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.rebase import rebase as run

    period, sizes, rounded = run(named_directory(args.run))
    scores = "scores are identical to the bit"
    if rounded:
        scores += f", except where a sample uses one of {rounded:,} cached float rows, which were rounded when encoded"
    print_lines(
        *(f"{name}: {after:,} rows, {before - after:,} dropped" for name, (before, after) in sizes.items()),
        f"{scores}; the next export is a full one, not a delta",
        _model_line(args.run, period),
    )


@subcommand(
    name="revert",
    text="Remove the last period of a run, for example one with a wrong log. Afterwards predict, evaluate "
    "and export "
    "use the model of the period before. Only one period can be removed, because the data of earlier "
    "periods is deleted; a period of `forget` cannot be removed.",
    example="stratarec revert runs/demo",
    options=add_run,
)
def revert(args: argparse.Namespace) -> None:
    """Remove the last period."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.chain import revert as run

    period = run(named_directory(args.run))
    name = f" ({period.file})" if period.file else ""
    model = f"the one of period {period.number - 1}" if period.number > 1 else "the one that `train` wrote"
    print_lines(
        f"removed period {period.number}{name}; the model is again {model}. Exports "
        "and deltas are unchanged"
    )
