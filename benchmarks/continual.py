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

`seconds_to_scorer` is from the command on an hour of the next day, in a process of its own, to the answer of a `Scorer`
that took the delta it published; `seconds_into_1e8` what 10,000 rows and a checkpoint of them take in a log of 10^8
rows that was restored from a checkpoint.

`bytes_ratio` is what a period wrote of tables over the records of the rows that it trained, `slowdown` the processor's
seconds a sample of the last day over those of the first that is not the first of the process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import polars as pl

from benchmarks.sessions import recipe as shipped
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.clicks import ClicksConfig, ClicksSource
from stratarec.data.splits import SplitConfig
from stratarec.data.user_history import Events
from stratarec.embedding.stores.log import LogRecords
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.export.publish import publish
from stratarec.training.run import periods
from stratarec.training.run.periods import Period
from stratarec.training.torch_settings import torch_settings
from stratarec.training.trainer import Trainer

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
DAYS, QUICK_DAYS, SEEDS = 4, 3, 3
# What idle articles are told by: the first lose their rows at the end of the fourth.
IDLE_DAYS, IDLE = 8, "3d"
BATCH = 1024
# One user in so many.
_USERS = 20
# Of users, in per mille: the validation split, which nothing is chosen by.
_HELD = 10
_SPLITS = ("train", "valid", "test")
_ENDINGS = {split: f"-{split}" for split in _SPLITS}


def cut(config: ClicksConfig, folder: Path, days: int) -> ClicksConfig:
    """The click log as a file a day; neighbouring days have names of different splits."""
    clicks = pl.read_parquet(config.paths[0]).filter(pl.col(config.user).hash(seed=0) % _USERS == 0)
    clicks = clicks.with_columns((pl.col(config.time) // DAY_MS).alias("day"))
    first = int(clicks["day"].min())  # type: ignore[arg-type]
    paths = []
    for day in range(days):
        paths.append(str(folder / f"{day:02d}{_ENDINGS[_SPLITS[day % 3]]}.parquet"))
        clicks.filter(pl.col("day") == first + day).drop("day").write_parquet(paths[-1])
    return ClicksConfig(**{**vars(config), "paths": tuple(paths)})


def make_logs(config: ClicksConfig, folder: Path) -> None:
    """Samples of all days, with histories, as ``<folder>/<day>/*.parquet``, and those of some users apart."""
    split = SplitConfig(by="file", valid=("*-valid.parquet",), test=("*-test.parquet",))
    source, spool = ClicksSource(config, "error", split), folder / "spool"
    chunks = []
    spool.mkdir(parents=True)
    for chunk in source.chunks(spool):
        chunks.append(spool / f"chunk-{chunk.index:05d}.parquet")
        chunk.frame.with_columns(pl.Series("day", chunk.file)).write_parquet(chunks[-1])
    events = Events(map(pl.read_parquet, chunks), source.schema)
    for number, path in enumerate(chunks):
        frame = pl.read_parquet(path)
        frame = frame.with_columns(events.histories(frame).values()).filter(pl.col("label").is_not_null())
        held = pl.col(config.user).hash(seed=0) % 1000 < _HELD
        for (day, apart), part in frame.with_columns(held.alias("held")).group_by("day", "held"):
            place = folder / f"{day:02d}{'-held' if apart else ''}"
            place.mkdir(exist_ok=True)
            part.drop("day", "held").write_parquet(place / f"{number:05d}.parquet")
    shutil.rmtree(spool)


class Days:
    """Data sets and runs of one way of keeping up with a log.

    Parameters
    ----------
    whole : Recipe
        The shipped one.
    logs, folder : Path
        What `make_logs` wrote; where data sets and runs go.
    limits : dict
        Of vocabularies, beside those of the recipe.
    """

    def __init__(self, whole: Recipe, logs: Path, folder: Path, **limits: Any) -> None:
        self._content, self._logs, self.folder = whole.to_dict(), logs, folder
        self._limits = limits
        folder.mkdir()
        source = whole.data.source
        assert isinstance(source, ClicksConfig)
        features = ClicksSource(source, "error", whole.data.split).schema
        self._schema = {
            "label": "label",
            "dense": [{"name": feature.name} for feature in features.dense],
            "sparse": [
                {"name": f.name, "vocabulary": f.vocabulary}
                | ({"kind": "multi", "max_length": f.max_length} if f.kind == "history" else {})
                for f in features.sparse
            ],
            "time": source.time,
            "time_unit": source.time_unit,
            "session": source.session,
            "user": source.user,
        }

    def recipe(self, name: str, day: int, *, tested: bool = True) -> Recipe:
        """Trained on the days up to `day`, and `tested` on the one that follows."""
        folders = [*(f"{number:02d}" for number in range(day + 1 + tested)), f"{day:02d}-held"]
        data = {
            "path": str(self.folder / f"{name}-data"),
            "source": {
                "kind": "parquet",
                "paths": [str(self._logs / folder / "*.parquet") for folder in folders],
                "schema": self._schema,
            },
            "split": {"by": "file", "valid": ["*-held/*"], "test": [f"*/{day + 1:02d}/*"] if tested else []},
            "vocabulary": {**self._content["data"]["vocabulary"], **self._limits},
            "keep_rows": False,
        }
        train = {**self._content["train"], "run": str(self.folder / f"{name}-run"), "batch_size": BATCH}
        return Recipe.from_dict({**self._content, "name": name, "data": data, "train": train})

    def take(self, name: str, day: int, *, tested: bool = True) -> dict[str, Any]:
        """Prepare and train; the metrics of the day that follows where it is `tested`."""
        made = self.recipe(name, day, tested=tested)
        dataset = prepare(made.data)
        result = Trainer(_one_pass(made, dataset), dataset).train()
        found: dict[str, Any] = result.get("test", {})
        if tested:
            print(f"{name}: AUC {found['auc']:.5f}", file=sys.stderr, flush=True)
        return found


def _one_pass(made: Recipe, dataset: Dataset) -> Recipe:
    """Schedules as long as one pass over the training samples is."""
    content, steps = made.to_dict(), -(-dataset.samples("train") // BATCH)
    for part in ("dense", "embedding"):
        content["train"][part]["schedule"]["total_steps"] = steps
    return Recipe.from_dict(content)


def logs_of(logs: Path, days: int, folder: Path) -> list[Path]:
    """A file of each day but the first."""
    folder.mkdir()
    for day in range(1, days):
        parts = [pl.read_parquet(path) for path in sorted((logs / f"{day:02d}").glob("*.parquet"))]
        pl.concat(parts).write_parquet(folder / f"day-{day:02d}.parquet")
    return sorted(folder.iterdir())


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
    return {
        "auc_delta_idle": mean(deltas[4:]),
        "rows_idle": (rows["clicked"] - gone) / rows["all"],
        "days": found,
    }


def to_scorer(run: Path, day: Path, folder: Path, time_column: str) -> float:
    """Seconds until who serves answers with an hour that has just come."""
    folder.mkdir()
    frame = pl.read_parquet(day)
    first = int(frame[time_column].min())  # type: ignore[arg-type]
    frame.filter(pl.col(time_column) < first + HOUR_MS).write_parquet(folder / "hour.parquet")
    publish(run, folder / "serve")
    (full,) = (folder / "serve").iterdir()
    scorer, rows = Scorer.open(full), frame[:100]
    scorer.score(rows)
    command = [sys.executable, "-m", "stratarec", "continue", "-q", str(run), str(folder / "hour.parquet")]
    began = time.perf_counter()
    subprocess.run([*command, "--publish", str(folder / "serve")], check=True, stdout=subprocess.DEVNULL)
    (later,) = set((folder / "serve").iterdir()) - {full}
    if later.suffix == ".delta":
        scorer.update(later)
    else:
        scorer = Scorer.open(later)
    scorer.score(rows)
    return time.perf_counter() - began


def into_a_log(folder: Path, rows: int) -> float:
    """Seconds that 10,000 rows take into a log of so many, and a checkpoint of them."""
    width, step = 20, 1 << 20
    store = LogRecords(folder / "first", rows=rows, record_bytes=width)
    for first in range(0, rows, step):
        numbers = np.arange(first, min(first + step, rows), dtype=np.int64)
        store.write(numbers, np.zeros((len(numbers), width), dtype=np.uint8))
    for name in ("before", "after"):
        (folder / name).mkdir()
    manifest = store.checkpoint(folder / "before", None)
    store.close()
    store = LogRecords(folder / "second", rows=rows, record_bytes=width)
    store.restore(folder / "before", manifest)
    numbers = np.unique(np.random.default_rng(0).integers(0, rows, 10_000))
    began = time.perf_counter()
    store.write(numbers, np.ones((len(numbers), width), dtype=np.uint8))
    store.checkpoint(folder / "after", folder / "before")
    spent = time.perf_counter() - began
    store.close()
    return spent


@torch_settings()
def run(quick: bool, seeds: int = SEEDS) -> dict[str, Any]:
    """The first days of the log; `quick` takes fewer, and one seed."""
    days, seeds = (QUICK_DAYS, 1) if quick else (DAYS, seeds)
    whole = shipped("globo", "auto")
    assert isinstance(whole.data.source, ClicksConfig)
    rows: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        longest = days if quick else IDLE_DAYS
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
            if not quick and not seed:
                column = whole.data.source.time
                seconds.append(to_scorer(place / "base-run", every[days - 1], root / "hour", column))
            shutil.rmtree(place)
            shutil.rmtree(forgetful)
        (root / "log").mkdir()
        into = into_a_log(root / "log", 10**6 if quick else 10**8)
    later = [row for row in rows if row["day"] > 1]

    def total(way: str, name: str, day: int = 0) -> float:
        return sum(row[way][name] for row in later if day in (0, row["day"]))

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
            "users": f"1 in {_USERS}",
        },
        "metrics": {
            "auc_continued": total("continued", "auc") / len(later),
            "auc_anew": total("anew", "auc") / len(later),
            "auc_delta_daily": mean(mean(each) for each in deltas.values()),
            "auc_delta_last_day": mean(deltas[days - 1]),
            "auc_delta_carried": (total("continued", "auc") - total("counts_of_a_day", "auc")) / len(later),
            "seconds_over_anew": total("continued", "seconds") / total("anew", "seconds"),
            **{name: mean(each[name] for each in lost) for name in ("auc_delta_idle", "rows_idle") if lost},
            **({"seconds_to_scorer": seconds[0]} if seconds else {}),
            **({} if quick else {"seconds_into_1e8": into}),
            "bytes_ratio": total("continued", "bytes") / total("continued", "touched_bytes"),
            "slowdown": pace[days - 1] / pace[2],
        },
        "samples": {"rows": rows, "idle": [each["days"] for each in lost]},
    }
