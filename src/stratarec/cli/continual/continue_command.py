"""`stratarec continue`: a run goes on with the files that came since it ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import Subcommand, say

if TYPE_CHECKING:
    from stratarec.training.run.periods import Period


# Deviations by which the mean of a feature has moved that are worth a line.
_MOVED = 0.5


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="directory that `train` wrote, of a run that has ended")
    command.add_argument("files", nargs="+", metavar="FILE", help="logs that follow, each a period, in their order")
    command.add_argument("--json", action="store_true", help="print a line of JSON for each period")


def continue_(args: argparse.Namespace) -> None:
    """Score, count, train and commit each file."""
    from stratarec.io.owned_directory import named_directory
    from stratarec.reporting.progress_bar import make_progress
    from stratarec.training.continual.continual_run import continue_run

    for period in continue_run(named_directory(args.run), args.files, make_progress(quiet=args.quiet)):
        say(*([_line(period)] if args.json else _told(args.run, period)))


def _line(period: Period) -> str:
    """All that a period says, but the bins of its calibration and the maps."""
    content = period.to_dict()
    del content["calibration"], content["format"]
    content["scores"] = {name: _without_bins(found) for name, found in content["scores"].items()}
    return json.dumps(content, allow_nan=False)


def _without_bins(found: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in found.items() if name != "reliability"}
    labels = plain.get("labels")
    return plain | ({"labels": {name: _without_bins(each) for name, each in labels.items()}} if labels else {})


def _told(run: str, period: Period) -> list[str]:
    from stratarec.reporting.metric_names import show

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
    moved = {name: found.shift for name, found in period.dense.items() if abs(found.shift) > _MOVED}
    for name, shift in moved.items():
        lines.append(f"  {name}: its mean has moved by {shift:+.1f} deviations since the run's first log")
    before, low, high = period.auc.before, period.auc.low, period.auc.high
    if before is not None and low is not None and high is not None and not low <= before <= high:
        lines.append(f"  AUC was {before:.5f} in the periods before; by chance it is {low:.5f} to {high:.5f} here")
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
