"""A news portal's log day by day: a run that goes on with each day, against one trained anew on all days up to then.

Samples are made of the Globo.com click log once, as the `clicks` source makes them, and written as a log of a user's
own: Parquet files a day, histories as lists. Both begin with the same run of the first day. Then each day is scored
before it is trained on: by the one run that `stratarec continue` takes through the days, and by another that is
prepared and trained anew on all days so far, with schedules over as many steps as one pass takes. Seconds are of the
processor, of all threads, with preparing and scoring. A third forgets what it counted of values without a row after
each day (`data.vocabulary.candidates: 0`): what carried counts give is the first's AUC over this one's. All is of one
user in twenty.

`auc_delta_idle` is over the days from the fifth on, of one run that takes eight, and another that gives up rows of
articles that nobody clicked for three days (`data.vocabulary.evict`), less the first; `rows_idle` the articles' rows
that the other has in the end, without those that are nobody's, over the first's.

The day behind the last is taken hour by hour, each scored before it is learned, against what the model of the day
before says of all of it: `auc_delta_hourly` over all samples, `auc_delta_hourly_within` the mean within hours.
`seconds_to_scorer` is from the command on an hour of the next day, in a process of its own, to the answer of a `Scorer`
that took the delta it published; `seconds_into_1e8` what 10,000 rows and a checkpoint of them take in a log of 10^8
rows that was restored from a checkpoint (`continual_hours`).

`auc_delta_lightgbm`, `auc_delta_torchrec` and `auc_delta_river` are over the days that all of them score, of the run
that takes eight less what a team would do by hand (`continual_peers`), `seconds_over_*` the processor's seconds.

`bytes_ratio` is what a period wrote of tables over the records of the rows that it trained, `slowdown` the processor's
seconds a sample of the last day over those of the first that is not the first of the process.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl
import torch

from benchmarks import continual_peers as by_hand
from benchmarks.continual_days import BATCH, USERS, Days, cut, logs_of, make_logs
from benchmarks.continual_hours import hourly, into_a_log, to_scorer
from benchmarks.registry import PeerMissing
from benchmarks.sessions import recipe as shipped
from stratarec.data.sources.clicks import ClicksConfig
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.run import periods
from stratarec.training.run.periods import Period
from stratarec.training.torch_setup import torch_settings

DAYS, QUICK_DAYS, SEEDS = 4, 3, 3
# What idle articles are told by: the first lose their rows at the end of the fourth.
IDLE_DAYS, IDLE = 8, "3d"


def written(run: Path, period: Period, before: Path) -> dict[str, int]:
    """Bytes of tables that a period wrote, and of the records of rows that it trained."""
    path = periods.only_checkpoint(periods.of_number(run, period.number))
    known = {file.stat().st_ino for file in before.rglob("rows-*")}
    files = [file for file in (path / "tables").rglob("rows-*") if file.stat().st_ino not in known]
    touched = 0
    for group in checkpoint.read_state(path)["tables"]["groups"]:
        new = {file.name for file in files if file.parent.parent.name == group["name"]}
        changed = [entry["rows"] for entry in group["home"]["files"] if entry["name"] in new]
        touched += group["home"]["record_bytes"] * sum(changed)
    return {"bytes": sum(file.stat().st_size for file in files), "touched_bytes": touched}


def continued(run: Path, files: list[Path]) -> Iterator[dict[str, Any]]:
    """A row for each day."""
    began, before = time.process_time(), run / "checkpoints"
    for period in continue_run(run, list(map(str, files)), SilentProgress()):
        whole, spent = period.scores["all"], time.process_time() - began
        print(f"day {period.number}: AUC {whole['auc']:.5f}, {spent:.0f} s", file=sys.stderr, flush=True)
        yield {
            "auc": whole["auc"],
            "calibration": whole["calibration"],
            "samples": whole["samples"],
            "seconds": spent,
            "rows": {name: found.rows for name, found in period.lookups.items()},
            "evicted": {name: found.evicted for name, found in period.lookups.items()},
            **written(run, period, before),
        }
        began, before = time.process_time(), periods.of_number(run, period.number)


def idle(whole: Recipe, logs: Path, files: list[Path], folder: Path) -> dict[str, Any]:
    """All days with the rows of all articles, and with those of articles that are clicked."""
    item = whole.data.source.item  # type: ignore[union-attr]
    folder.mkdir()
    found = {}
    for name, limits in (("all", {}), ("clicked", {"evict": {item: {"idle": IDLE}}})):
        way = Days(whole, logs, folder / name, **limits)
        way.take("base", 0, tested=False)
        found[name] = list(continued(way.folder / "base-run", files))
    shutil.rmtree(folder)
    deltas = [other["auc"] - one["auc"] for one, other in zip(*found.values(), strict=True)]
    gone = sum(day["evicted"][item] for day in found["clicked"])
    rows = {name: days[-1]["rows"][item] for name, days in found.items()}
    return {"auc_delta_idle": mean(deltas[4:]), "rows_idle": (rows["clicked"] - gone) / rows["all"], "days": found}


def peers(whole: Recipe, logs: Path, files: list[Path], folder: Path, seeds: int, quick: bool) -> dict[str, Any]:
    """What is done by hand on the same days: of each peer that is there the days of each seed; else why it is not."""
    folder.mkdir()
    first = [pl.read_parquet(path) for path in sorted((logs / "00").glob("*.parquet"))]
    frames = [pl.concat(first), *map(pl.read_parquet, files)]
    way = Days(whole, logs, folder / "by-hand")
    schema = way.recipe("schema", 0, tested=False).data.source.schema  # type: ignore[union-attr]
    threads = torch.get_num_threads()

    def torchrec(seed: int) -> by_hand.Rows:
        made = Days(replace(whole, train=replace(whole.train, seed=seed)), logs, folder / f"torchrec-{seed}")
        side = by_hand.TorchRecDays(made.recipe("day-00", 0, tested=False), made.following)
        return {day: side.day(file, frame) for day, (file, frame) in enumerate(zip(files, frames[1:], strict=True), 1)}

    asked = {
        "lightgbm": lambda seed: by_hand.lightgbm(frames, schema, seed=seed, threads=threads, quick=quick),
        "torchrec": torchrec,
        "river": lambda seed: by_hand.river(frames, schema),
    }
    found: dict[str, Any] = {}
    for name, take in asked.items():
        try:
            # River draws nothing.
            found[name] = [take(seed) for seed in range(1 if name == "river" else seeds)]
        except PeerMissing as error:
            found[name] = str(error)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return found


def against(found: dict[str, Any], mine: list[dict[int, dict[str, Any]]]) -> dict[str, float]:
    """Of each peer its mean AUC over the days that all of them score, and `mine` less it: days of each seed."""
    there = {name: seeds for name, seeds in found.items() if not isinstance(seeds, str)}
    if not there:
        return {}
    days = set.intersection(*(set(seeds[0]) for seeds in (*there.values(), mine)))
    whole = {name: [mean(seed[day]["auc"] for day in days) for seed in seeds] for name, seeds in there.items()}
    ours = [mean(seed[day]["auc"] for day in days) for seed in mine]
    seconds = {
        name: mean(sum(seed[day]["seconds"] for day in days) for seed in seeds)
        for name, seeds in (*there.items(), ("ours", mine))
    }
    return {
        "auc_ours_by_peers": mean(ours),
        **{f"auc_{name}": mean(each) for name, each in whole.items()},
        **{f"auc_delta_{name}": mean(ours) - mean(each) for name, each in whole.items()},
        **{f"seconds_over_{name}": seconds["ours"] / seconds[name] for name in there},
    }


@torch_settings()
def run(quick: bool, seeds: int = SEEDS) -> dict[str, Any]:
    """The first days of the log; `quick` takes fewer, and one seed."""
    days, seeds = (QUICK_DAYS, 1) if quick else (DAYS, seeds)
    whole = shipped("globo", "auto")
    assert isinstance(whole.data.source, ClicksConfig)
    rows: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    hours: list[dict[str, Any]] = []
    seconds: list[float] = []
    column = whole.data.source.time
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        # Hours are of the day behind the last, and the hour that goes to who serves of the one behind that.
        longest = days + 2 if quick else IDLE_DAYS
        make_logs(cut(whole.data.source, root, longest), root / "logs")
        every = logs_of(root / "logs", longest, root / "files")
        files = every[: days - 1]
        print("logs are made", file=sys.stderr, flush=True)
        for seed in range(seeds):
            made = replace(whole, train=replace(whole.train, seed=seed))
            if not quick:
                lost.append(idle(made, root / "logs", every, root / f"idle-{seed}"))
            place, forgetful = root / f"seed-{seed}", root / f"forgetful-{seed}"
            way, found = Days(made, root / "logs", place), []
            for each in (way, Days(made, root / "logs", forgetful, candidates=0)):
                each.take("base", 0, tested=False)
                found.append(list(continued(each.folder / "base-run", files)))
            for day, (mine, by_day) in enumerate(zip(*found, strict=True), start=1):
                began = time.process_time()
                anew = way.take(f"anew-{day:02d}", day - 1)
                # The first day's model is the same; its test is all that differs.
                other = {"auc": anew["auc"], "seconds": time.process_time() - began}
                rows.append({"seed": seed, "day": day, "continued": mine, "counts_of_a_day": by_day, "anew": other})
            hours.append(hourly(place / "base-run", every[days - 1], root / "hours", column, 3 if quick else 24))
            print(f"hours: {hours[-1]}", file=sys.stderr, flush=True)
            if not seed:
                seconds.append(to_scorer(place / "base-run", every[days], root / "hour", column))
            shutil.rmtree(place)
            shutil.rmtree(forgetful)
        hand = peers(whole, root / "logs", files if quick else every, root / "peers", seeds, quick)
        (root / "log").mkdir()
        into = into_a_log(root / "log", 10**6 if quick else 10**8)
    later = [row for row in rows if row["day"] > 1]
    mine = [{row["day"]: row["continued"] for row in rows}] if quick else [
        dict(enumerate(each["days"]["all"], 1)) for each in lost
    ]  # fmt: skip

    def total(way: str, name: str, day: int = 0) -> float:
        return sum(row[way][name] for row in later if day in (0, row["day"]))

    def by(way: str, name: str) -> float:
        return mean(each[way][name] for each in hours)

    deltas = {
        day: [r["continued"]["auc"] - r["anew"]["auc"] for r in later if r["day"] == day] for day in range(2, days)
    }
    pace = {day: total("continued", "seconds", day) / total("continued", "samples", day) for day in deltas}
    return {
        "config": {
            "recipe": "globo",
            "days": days,
            "batch_size": BATCH,
            "passes": 1,
            "seeds": seeds,
            "users": f"1 in {USERS}",
            "absent": {name: why for name, why in hand.items() if isinstance(why, str)},
        },
        "metrics": {
            "auc_continued": total("continued", "auc") / len(later),
            "auc_anew": total("anew", "auc") / len(later),
            "auc_delta_daily": mean(mean(each) for each in deltas.values()),
            "auc_delta_last_day": mean(deltas[days - 1]),
            "auc_delta_carried": (total("continued", "auc") - total("counts_of_a_day", "auc")) / len(later),
            "auc_delta_hourly": by("by_hour", "auc") - by("by_day", "auc"),
            "auc_delta_hourly_within": by("by_hour", "auc_within_hours") - by("by_day", "auc_within_hours"),
            "seconds_an_hour": mean(each["seconds"] / each["hours"] for each in hours),
            "seconds_over_anew": total("continued", "seconds") / total("anew", "seconds"),
            **{name: mean(each[name] for each in lost) for name in ("auc_delta_idle", "rows_idle") if lost},
            "seconds_to_scorer": seconds[0],
            **({} if quick else {"seconds_into_1e8": into}),
            "bytes_ratio": total("continued", "bytes") / total("continued", "touched_bytes"),
            "slowdown": pace[days - 1] / pace[2],
            **against(hand, mine),
        },
        "samples": {"rows": rows, "idle": [each["days"] for each in lost], "hours": hours, "peers": hand},
    }
