"""Daily training on a news portal's log: one continued run compared with a model retrained on all
days so far.

The Globo.com click log is converted once to samples, as by the `clicks` source: one Parquet file a
day, with histories as lists, of one user in 20. Both sides start from the same run on the first
day. Each day is scored before it is trained on: by the run that `stratarec continue` updates, and
by a run that is prepared and trained from scratch on all days so far, in one pass. Seconds are
processor time of all threads, including preparing and scoring.

- `auc_delta_carried`: AUC of the continued run less that of a run which forgets the counts of
  values without a row after each day (`data.vocabulary.candidates: 0`).
- `auc_delta_idle`: mean over the days from the fifth on, in a run of eight days: AUC with eviction
  of articles that nobody clicked for three days (`data.vocabulary.evict`) less AUC without.
  `rows_idle` is the number of article rows at the end with eviction, without evicted ones, over the
  number without eviction.
- `auc_delta_hourly`: on the day after the last, AUC of a model that is scored and then trained hour
  by hour, less that of the previous day's model; `auc_delta_hourly_within` is the same for the mean
  of the AUCs within each hour.
- `seconds_to_scorer`: from the start of the command on an hour of the next day, in its own process,
  to the answer of a `Scorer` that has applied the published delta. `seconds_into_1e8`: seconds to
  write and checkpoint 10,000 rows in a log of 10^8 rows that was restored from a checkpoint
  (`continual_hours`).
- `auc_delta_lightgbm`, `auc_delta_torchrec`, `auc_delta_river`: AUC of the run of eight days less
  that of a peer (`continual_peers`), over the days that all of them score; `seconds_over_*`
  compares processor time.
- `bytes_ratio`: table bytes that a period writes, over the bytes of the records that it trains.
  `slowdown`: processor seconds per sample on the last day over those on the second period, as the
  first one includes start-up.
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
from benchmarks.continual_days import BATCH, USERS, Days, merge_days, write_daily_clicks, write_samples
from benchmarks.continual_hours import compare_hourly, seconds_into_log, seconds_to_scorer
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
# Articles without a click for IDLE are evicted, the first ones at the end of the fourth day.
IDLE_DAYS, IDLE = 8, "3d"


def written_bytes(run: Path, period: Period, before: Path) -> dict[str, int]:
    """Return the table bytes that a period wrote, and the bytes of the records of the rows that it
    trained.
    """
    path = periods.only_checkpoint(periods.of_number(run, period.number))
    known = {file.stat().st_ino for file in before.rglob("rows-*")}
    files = [file for file in (path / "tables").rglob("rows-*") if file.stat().st_ino not in known]
    touched = 0
    for group in checkpoint.read_state(path)["tables"]["groups"]:
        new = {file.name for file in files if file.parent.parent.name == group["name"]}
        changed = [entry["rows"] for entry in group["home"]["files"] if entry["name"] in new]
        touched += group["home"]["record_bytes"] * sum(changed)
    return {"bytes": sum(file.stat().st_size for file in files), "touched_bytes": touched}


def continue_days(run: Path, files: list[Path]) -> Iterator[dict[str, Any]]:
    """Continue a run with each file, and yield the results of each day."""
    began, before = time.process_time(), run / "checkpoints"
    for period, _ in continue_run(run, list(map(str, files)), SilentProgress()):
        scores, spent = period.scores["all"], time.process_time() - began
        print(f"day {period.number}: AUC {scores['auc']:.5f}, {spent:.0f} s", file=sys.stderr, flush=True)
        yield {
            "auc": scores["auc"],
            "calibration": scores["calibration"],
            "samples": scores["samples"],
            "seconds": spent,
            "rows": {name: vocabulary.rows for name, vocabulary in period.lookups.items()},
            "evicted": {name: vocabulary.evicted for name, vocabulary in period.lookups.items()},
            **written_bytes(run, period, before),
        }
        began, before = time.process_time(), periods.of_number(run, period.number)


def compare_eviction(whole: Recipe, logs: Path, files: list[Path], folder: Path) -> dict[str, Any]:
    """Compare runs over all days without and with eviction of idle articles."""
    item = whole.data.source.item  # type: ignore[union-attr]
    folder.mkdir()
    days_of = {}
    for name, limits in (("all", {}), ("clicked", {"evict": {item: {"idle": IDLE}}})):
        runs = Days(whole, logs, folder / name, **limits)
        runs.train("base", 0, tested=False)
        days_of[name] = list(continue_days(runs.folder / "base-run", files))
    shutil.rmtree(folder)
    deltas = [other["auc"] - one["auc"] for one, other in zip(*days_of.values(), strict=True)]
    evicted = sum(day["evicted"][item] for day in days_of["clicked"])
    rows = {name: days[-1]["rows"][item] for name, days in days_of.items()}
    return {
        "auc_delta_idle": mean(deltas[4:]),
        "rows_idle": (rows["clicked"] - evicted) / rows["all"],
        "days": days_of,
    }


def measure_peers(
    whole: Recipe, logs: Path, files: list[Path], folder: Path, seeds: int, quick: bool
) -> dict[str, Any]:
    """Measure each installed peer on the same days.

    Returns
    -------
    dict
        Results of each day for each seed of a peer, or the reason why the peer is missing.
    """
    folder.mkdir()
    first = [pl.read_parquet(path) for path in sorted((logs / "00").glob("*.parquet"))]
    frames = [pl.concat(first), *map(pl.read_parquet, files)]
    runs = Days(whole, logs, folder / "by-hand")
    schema = runs.recipe("schema", 0, tested=False).data.source.schema  # type: ignore[union-attr]
    threads = torch.get_num_threads()

    def torchrec(seed: int) -> by_hand.Rows:
        daily = Days(
            replace(whole, train=replace(whole.train, seed=seed)), logs, folder / f"torchrec-{seed}"
        )
        side = by_hand.TorchRecDays(daily.recipe("day-00", 0, tested=False), daily.following)
        return {
            day: side.day(file, frame)
            for day, (file, frame) in enumerate(zip(files, frames[1:], strict=True), 1)
        }

    measure = {
        "lightgbm": lambda seed: by_hand.lightgbm(frames, schema, seed=seed, threads=threads, quick=quick),
        "torchrec": torchrec,
        "river": lambda seed: by_hand.river(frames, schema),
    }
    results: dict[str, Any] = {}
    for name, method in measure.items():
        try:
            # River uses no random numbers, so one seed is enough.
            results[name] = [method(seed) for seed in range(1 if name == "river" else seeds)]
        except PeerMissing as error:
            results[name] = str(error)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return results


def compare_with_peers(results: dict[str, Any], mine: list[dict[int, dict[str, Any]]]) -> dict[str, float]:
    """Compare `mine` with each peer by mean AUC and seconds over the days that all of them
    score.
    """
    measured = {name: seeds for name, seeds in results.items() if not isinstance(seeds, str)}
    if not measured:
        return {}
    days = set.intersection(*(set(seeds[0]) for seeds in (*measured.values(), mine)))
    whole = {
        name: [mean(seed[day]["auc"] for day in days) for seed in seeds] for name, seeds in measured.items()
    }
    ours = [mean(seed[day]["auc"] for day in days) for seed in mine]
    seconds = {
        name: mean(sum(seed[day]["seconds"] for day in days) for seed in seeds)
        for name, seeds in (*measured.items(), ("ours", mine))
    }
    return {
        "auc_ours_by_peers": mean(ours),
        **{f"auc_{name}": mean(each) for name, each in whole.items()},
        **{f"auc_delta_{name}": mean(ours) - mean(each) for name, each in whole.items()},
        **{f"seconds_over_{name}": seconds["ours"] / seconds[name] for name in measured},
    }


@torch_settings()
def run(quick: bool, seeds: int = SEEDS) -> dict[str, Any]:
    """Measure the first days of the log; `quick` takes fewer days and one seed."""
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
        # Hourly training uses the day after the last; the hour for the scorer is from the day after
        # that.
        longest = days + 2 if quick else IDLE_DAYS
        write_samples(write_daily_clicks(whole.data.source, root, longest), root / "logs")
        every = merge_days(root / "logs", longest, root / "files")
        files = every[: days - 1]
        print("logs are written", file=sys.stderr, flush=True)
        for seed in range(seeds):
            seeded = replace(whole, train=replace(whole.train, seed=seed))
            if not quick:
                lost.append(compare_eviction(seeded, root / "logs", every, root / f"idle-{seed}"))
            place, forgetful = root / f"seed-{seed}", root / f"forgetful-{seed}"
            runs, results = Days(seeded, root / "logs", place), []
            for each in (runs, Days(seeded, root / "logs", forgetful, candidates=0)):
                each.train("base", 0, tested=False)
                results.append(list(continue_days(each.folder / "base-run", files)))
            for day, (mine, by_day) in enumerate(zip(*results, strict=True), start=1):
                began = time.process_time()
                retrained = runs.train(f"retrained-{day:02d}", day - 1)
                # On day 1 both sides have been trained on the same data; the metrics use the later
                # days.
                other = {"auc": retrained["auc"], "seconds": time.process_time() - began}
                rows.append(
                    {"seed": seed, "day": day, "continued": mine, "counts_of_a_day": by_day, "anew": other}
                )
            hours.append(
                compare_hourly(
                    place / "base-run", every[days - 1], root / "hours", column, 3 if quick else 24
                )
            )
            print(f"hours: {hours[-1]}", file=sys.stderr, flush=True)
            if not seed:
                seconds.append(seconds_to_scorer(place / "base-run", every[days], root / "hour", column))
            shutil.rmtree(place)
            shutil.rmtree(forgetful)
        hand = measure_peers(whole, root / "logs", files if quick else every, root / "peers", seeds, quick)
        (root / "log").mkdir()
        into = seconds_into_log(root / "log", 10**6 if quick else 10**8)
    later = [row for row in rows if row["day"] > 1]
    mine = (
        [{row["day"]: row["continued"] for row in rows}]
        if quick
        else [dict(enumerate(each["days"]["all"], 1)) for each in lost]
    )

    def total(side: str, name: str, day: int = 0) -> float:
        return sum(row[side][name] for row in later if day in (0, row["day"]))

    def by(side: str, name: str) -> float:
        return mean(each[side][name] for each in hours)

    deltas = {
        day: [r["continued"]["auc"] - r["anew"]["auc"] for r in later if r["day"] == day]
        for day in range(2, days)
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
            **compare_with_peers(hand, mine),
        },
        "samples": {"rows": rows, "idle": [each["days"] for each in lost], "hours": hours, "peers": hand},
    }
