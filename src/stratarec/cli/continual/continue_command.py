"""`stratarec continue`: a run goes on with the files that came since it ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import Subcommand, add_json, progress_of, say
from stratarec.errors import Alarm

if TYPE_CHECKING:
    from stratarec.training.run.periods import Period


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="directory that `train` wrote, of a run that has ended")
    command.add_argument("files", nargs="+", metavar="FILE", help="logs that follow, each a period, in their order")
    add_json(command, "print a line of JSON for each period")
    command.add_argument("-o", "--output", metavar="FILE", help="also write an HTML page of all periods")
    command.add_argument(
        "--publish",
        metavar="DIR",
        help="after each period write there what it changed, as a delta for Scorer.update; first, or where more than a "
        "quarter of the rows differ, a full export",
    )
    command.add_argument(
        "--alert",
        action="store_true",
        help="exit with code 3 where the last AUC is below that of the seven periods before by more than chance gives, "
        "or the mean of a number has moved by half a deviation",
    )


def continue_(args: argparse.Namespace) -> None:
    """Score, count, train and commit each file."""
    from stratarec.io.atomic import check_output
    from stratarec.io.owned_directory import named_directory
    from stratarec.training.continual.continual_run import continue_run
    from stratarec.training.continual.drift import alarms

    if args.output:
        check_output(Path(args.output).resolve(), ".html")
    run, alarming, published = named_directory(args.run), list[str](), ""
    if args.publish:
        from stratarec.training.export.publish import check_publish, publish

        check_publish(run, Path(args.publish))
    for period, is_new in continue_run(run, args.files, progress_of(args)):
        alarming = alarms(period.to_dict())
        if args.json:
            say(_line(period, alarming, is_new))
        else:
            say(*(_told(args.run, period, alarming) if is_new else [_skipped(period)]))
        published = ""
        if args.publish and is_new:
            published = publish(run, Path(args.publish))
            say(*([] if args.json else [f"serve  {published}"]))
        if args.output:
            from stratarec.reporting.drift_page import write_drift
            from stratarec.training.run import periods

            told_all = [periods.read(path).to_dict() for path in periods.paths(run)]
            write_drift(Path(args.output), args.run, [each for each in told_all if each["kind"] == "log"], alarming)
    if args.publish and not published:  # the command before may have ended between a period and its delta
        published = publish(run, Path(args.publish))
        say(*([] if args.json else [f"serve  {published}"]))
    if args.alert and alarming:
        raise Alarm(f"{args.run}, period {period.number}: {'; '.join(alarming)}")


def _skipped(period: Period) -> str:
    return f"period {period.number}: made of {period.file} already, which is skipped"


def _line(period: Period, alarming: list[str], is_new: bool) -> str:
    """Return all fields of a period, except the bins of its calibration and the maps."""
    content = period.to_dict()
    del content["calibration"], content["format"]
    content["scores"] = {name: _without_bins(found) for name, found in content["scores"].items()}
    return json.dumps(content | {"alarms": alarming, "skipped": not is_new}, allow_nan=False)


def _without_bins(found: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in found.items() if name != "reliability"}
    labels = plain.get("labels")
    return plain | ({"labels": {name: _without_bins(each) for name, each in labels.items()}} if labels else {})


def _told(run: str, period: Period, alarming: list[str]) -> list[str]:
    from stratarec.reporting.metric_texts import show

    scores = period.to_dict()["scores"]
    whole = scores["all"]
    lines = [
        f"period {period.number}: {period.file}, {whole['samples']:,} samples, scored before they were trained on: "
        f"AUC {show(whole['auc'], 5)}, log loss {show(whole['log_loss'], 5)}, normalized entropy "
        f"{show(whole['normalized_entropy'], 5)}, calibration {show(whole['calibration'], 3)}"
    ]
    for kind in (name for name in scores if name != "all"):
        share = scores[kind]["samples"] / max(whole["samples"], 1)
        lines.append(f"  {kind:<6}{share:7.1%} of the samples, AUC {show(scores[kind]['auc'], 5)}")
    for name, found in period.lookups.items():
        total = max(found.known + found.tail + found.new, 1)
        lines.append(
            f"  {name}: {found.tail / total:.1%} of the lookups are of rare values, {found.new / total:.1%} of new "
            f"ones; {found.admitted:,} values got a row, of {found.rows:,}"
            + (f", {found.evicted:,} lost theirs" if found.evicted else "")
        )
    lines += [f"  {line}" for line in alarming]
    return [*lines, f"model  {Path(run) / 'periods' / f'period-{period.number:05d}'}"]


COMMAND = Subcommand(
    name="continue",
    text="Go on with a run that has ended, file by file: score each, count and admit its values, train on it once, and "
    "commit all of that or nothing. Afterwards predict, evaluate and export use the model of the last period.",
    example="stratarec continue runs/demo monday.parquet tuesday.parquet",
    options=_options,
    run=continue_,
    goes_on=True,
)
