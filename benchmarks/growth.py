"""How cost grows: seconds and bytes per unit as a log, its tables, its features or its batches
grow.

Each cell runs in its own process, which makes its peak memory comparable. All data are generated.
Seconds are processor time of all threads, which other work on the machine changes less than the
clock; only `workers` uses the clock.

- `log`: `prepare` of clicks of Globo's shape, per click. Globo has 2.6 million clicks on 46,000
  articles in 16 days; longer logs have more days and users.
- `workers`: `prepare` of such clicks in Parquet files, plain (sizes -1 and -2: on 1 and 2 cores)
  and by `--ray` with workers of one core each. `ray_overhead_N` is Ray's seconds over those of
  plain `prepare` on as many cores, less 1.
- `tables`: training of ten hashed features with R rows in total, in an SSD store. The samples and
  the rows they touch stay the same, so growth is the cost of rows that are never touched. `step_ms`
  is measured in the second epoch.
- `features`: training of F features, a quarter of them numbers, per feature.
- `batch`: training of a DLRM on a log of Criteo's shape, per sample.

`growth_*` is the largest cost over the smallest cost at a smaller size; at most 1.15 counts as
flat. The cost of a unit falls when more units share a start or a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.kept import FOLDER, kept
from benchmarks.registry import import_peer
from benchmarks.sessions import ROOT
from stratarec.data.prepare.prepare import prepare
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, read_content, with_values
from stratarec.training.torch_setup import peak_rss_bytes
from stratarec.training.trainer import Trainer

Row = dict[str, Any]
CLICKS, DAY_MS, DAYS, EPOCHS = 2_606_437, 86_400_000, 16, 2
SIZES: dict[str, Sequence[float]] = {
    "log": (1 / 4, 1, 4), "workers": (-1, -2, 1, 2, 3), "tables": (10**6, 10**7, 10**8, 10**9),
    "features": (20, 200, 2_000), "batch": (64, 512, 4_096, 65_536),
}  # fmt: skip
QUICK: dict[str, Sequence[float]] = {
    "log": (0.002, 0.004), "workers": (-1, 1), "tables": (10**6, 10**7), "features": (8, 16), "batch": (64, 128),
}  # fmt: skip
LIMIT = 1.15
COSTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "log": (("us_per_row", "bytes_per_row", "peak_mib"), False),
    "tables": (("prepare_seconds", "start_seconds", "step_ms", "save_seconds"), False),
    "features": (("prepare_seconds", "start_seconds", "step_ms", "report_seconds"), True),
    "batch": (("step_ms",), True),
}
"""Part -> names of its costs, and whether they are divided by the size."""
TITLES = {
    "log": "rows of the log (1: Globo's)",
    "tables": "rows of the tables",
    "features": "features, per feature",
    "batch": "samples in a batch, per sample",
}


def write_clicks(path: Path, times: float, first: int = 0) -> None:
    """Write `times` the clicks of Globo's log in order of time: articles are new each day, and
    popular for about a day.

    Clicks of `first` N start ``16 * N`` days later than those of `first` 0 and belong to other
    users.
    """
    draw, count, days = np.random.default_rng(1 + first), int(CLICKS * times), DAYS * times
    sessions, users = max(int(count / 2.86), 1), max(int(count / 8.6), 1)
    session = np.repeat(np.arange(sessions), draw.geometric(1 / 2.86, sessions))[:count]
    start = np.sort(draw.uniform(0, days * DAY_MS, sessions))[session]
    at = (start + draw.exponential(180_000, len(session))).astype(np.int64)
    age = np.floor(draw.exponential(0.8, len(session)) + at / DAY_MS).astype(np.int64) % DAYS
    article = age * 2_900 + (2_900 * draw.random(len(session)) ** 3).astype(np.int64)
    few = {"environment": 3, "deviceGroup": 5, "os": 8, "country": 11, "region": 28, "referrer_type": 7}
    pl.DataFrame(
        {
            "user_id": draw.integers(0, users, sessions)[session] + first * users,
            "session_id": session + first * sessions,
            "click_timestamp": at + 1_506_826_800_000 + first * DAYS * DAY_MS,
            "click_article_id": article,
            "click": article * 7 % 5 == draw.integers(0, 5, len(session)),
            **{
                f"click_{name}": (n * draw.random(len(session)) ** 4).astype(np.int64)
                for name, n in few.items()
            },
        }
    ).sort("click_timestamp").write_parquet(path)


def log(times: float, work: Path, quick: bool) -> Row:
    """Prepare a log of `times` the clicks of Globo with the recipe `globo`."""
    parts = [
        (work / f"log-{first:02d}.parquet", min(times, 1), first) for first in range(max(int(times), 1))
    ]
    with get_context("spawn").Pool(1) as other:  # keeps its memory out of the peak of `prepare`
        other.starmap(write_clicks, parts)
    content = read_content(ROOT / "src" / "stratarec" / "recipes" / "globo.yaml")
    fields: Row = {"data.source.paths": [str(work / "log-*.parquet")], "data.path": str(work / "data")}
    if quick:
        fields |= {f"data.{name}": "5m" for name in ("split.valid", "split.test", "source.negative_window")}
    began = time.process_time()
    prepare(Recipe.from_dict(with_values(content, fields)).data)
    seconds, rows = time.process_time() - began, int(CLICKS * min(times, 1)) * len(parts)
    size = sum(path.stat().st_size for path in (work / "data").rglob("*") if path.is_file())
    return {"us_per_row": 1e6 * seconds / rows, "bytes_per_row": size / rows}


def workers(count: float, work: Path, quick: bool) -> Row:
    """Prepare eight Parquet files with `count` workers of Ray; -N is plain `prepare` on N cores."""
    for number in range(8):
        write_clicks(work / f"{number}.parquet", 0.002 if quick else 0.25, number)
    names = ["article_id", "environment", "deviceGroup", "os", "country", "region", "referrer_type"]
    history = {"name": "history", "kind": "history", "of": "click_article_id", "max_length": 50}
    schema = {
        "label": "click", "sparse": [*({"name": f"click_{name}"} for name in names), history], "user": "user_id",
        "session": "session_id", "time": "click_timestamp", "time_unit": "ms",
    }  # fmt: skip
    source = {"kind": "parquet", "paths": [str(work / "*.parquet")], "schema": schema}
    recipe = {"name": "w", "data": {"path": str(work / "data"), "source": source}, "model": {"kind": "fm"}}
    (work / "w.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "stratarec", "prepare", "-q", str(work / "w.json")]
    cores = set(sorted(os.sched_getaffinity(0))[: int(abs(count))])
    os.sched_setaffinity(0, cores)  # child processes inherit the affinity
    with _cluster(int(count)) if count > 0 else nullcontext({}) as environment:
        began = time.perf_counter()
        ray = ["--ray", "auto"] if count > 0 else []
        subprocess.run(
            [*command, *ray], check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
        )
        return {"seconds": time.perf_counter() - began, "cores": len(cores)}


@contextmanager
def _cluster(count: int) -> Iterator[dict[str, str]]:
    """Start a Ray cluster of one machine and yield the environment variables of its clients."""
    script = (
        "import sys; from ray.cluster_utils import Cluster; head = Cluster(initialize_head=True, "
        "head_node_args="
        f"dict(num_cpus={count}, include_dashboard=False)); print(head.address, flush=True); "
        "sys.stdin.read(); head.shutdown()"
    )
    with tempfile.TemporaryDirectory(prefix="sr-", dir="/tmp") as folder:  # paths of sockets must be short
        variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **variables},
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            yield {**variables, "RAY_ADDRESS": holder.stdout.readline().strip()}
            holder.stdin.close()


class Clock(SilentProgress):
    """Processor time at which tasks start and end."""

    def __init__(self) -> None:
        self.began = dict[str, float]()
        self.ended = dict[str, float]()
        self.steps = list[float]()

    def start(self, task: str, total: int, unit: str, done: int = 0, *, at_most: bool = False) -> None:
        self.task, self.began[task] = task, time.process_time()

    def advance(self, amount: int, note: str = "") -> None:
        if self.task == "train":
            self.steps.append(time.process_time())

    def finish(self) -> None:
        self.ended[self.task] = time.process_time()


def trained(work: Path, source: Row, model: Row, train: Row, more: Row | None = None) -> Row:
    """Prepare and train; return the seconds of each part. `step_ms` is measured over the second
    half of the steps.
    """
    always = {"run": str(work / "run"), "curves": [], "threads": 1, "epochs": EPOCHS}
    data = {"path": str(work / "data"), "source": source}
    content = {
        "name": "g",
        "data": data,
        "model": model,
        "train": {**always, "checkpoint": {"every_minutes": 0}},
    }
    recipe = Recipe.from_dict(
        with_values(content, {f"train.{key}": value for key, value in train.items()} | (more or {}))
    )
    began = time.process_time()
    dataset = prepare(recipe.data)
    start, clock = time.process_time(), Clock()
    Trainer(recipe, dataset, clock).train()
    end, half = time.process_time(), clock.steps[len(clock.steps) // 2 :]
    return {
        "prepare_seconds": start - began,
        "start_seconds": clock.began["train"] - start,
        "step_ms": 1e3 * (half[-1] - half[0]) / (len(half) - 1),
        "save_seconds": clock.began["evaluate test"] - clock.ended["train"],
        "report_seconds": end - clock.ended["evaluate test"],
    }


def _columns(work: Path, features: int, dense: int, samples: int, values: int) -> Row:
    """Write a log of uniform values and return its source; the first `dense` features are
    numbers.
    """
    draw = np.random.default_rng(2)
    path = work / "log.parquet"
    names = [f"f{number}" for number in range(features)]
    columns = {name: draw.integers(0, values, samples) for name in names}
    pl.DataFrame({"label": draw.integers(0, 2, samples), **columns}).write_parquet(path)
    named = [{"name": name} for name in names]
    schema = {"label": "label", "dense": named[:dense], "sparse": named[dense:]}
    return {"kind": "parquet", "paths": [str(path)], "schema": schema}


def tables(rows: float, work: Path, quick: bool) -> Row:
    """Train ten hashed features of `rows` rows in total, whose home is an SSD store."""
    source = _columns(work, 10, 0, 4_000 if quick else 100_000, 50_000)
    more = {
        "data.vocabulary.kind": "hash", "data.vocabulary.buckets": int(rows) // 10, "memory.precision": "int4",
        "memory.block.path": str(work / "rows"), "memory.cache.fraction": 1e5 / rows,
        # Enough for the locations of all rows and 100,000 slots, but too little for homes in DRAM.
        "memory.dram": int(4.5 * rows) + (16 << 20),
    }  # fmt: skip
    return trained(
        work, source, {"kind": "fm", "embedding_dim": 16}, {"batch_size": 512, "report": False}, more
    )


def features(count: float, work: Path, quick: bool) -> Row:
    """Train a model whose network grows linearly with its features."""
    source = _columns(work, int(count), int(count) // 4, 2_000 if quick else 10_000, 100)
    return trained(
        work, source, {"kind": "deepfm", "embedding_dim": 8, "deep_mlp": [64]}, {"batch_size": 512}
    )


def batch(size: float, work: Path, quick: bool) -> Row:
    """Train a DLRM in batches of `size`."""
    source = {
        "kind": "synthetic",
        "samples": 20_000 if quick else 250_000,
        "scale": 0.1,
        "session_length": 1.0,
    }
    model = {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [128], "top_mlp": [128, 64]}
    steps = 20 if quick else int(min(1_000, max(16, 1_000_000 // size)))
    return trained(
        work, source, model, {"batch_size": int(size), "max_steps": steps, "epochs": 8, "report": False}
    )


PARTS: dict[str, Callable[[float, Path, bool], Row]] = {
    "log": log,
    "workers": workers,
    "tables": tables,
    "features": features,
    "batch": batch,
}


def run(quick: bool) -> dict[str, Any]:
    """Measure all cells; results of earlier runs are reused."""
    import_peer("ray")
    sizes = QUICK if quick else SIZES
    rows = [{"part": part, **cell(part, size, quick)} for part in PARTS for size in sizes[part]]
    growth = {
        f"growth_{part}_{name}": grown(line)
        for part in COSTS
        for name, line in costs_of(rows, part).items()
    }
    seconds = {row["size"]: row["seconds"] for row in rows if row["part"] == "workers"}
    ray = [size for size in seconds if size > 0]
    overhead = {f"ray_overhead_{size:g}": seconds[size] / seconds[max(-size, -2)] - 1 for size in ray}
    limits = {**dict.fromkeys(growth, LIMIT), **dict.fromkeys(overhead, LIMIT - 1)}
    return {
        "config": {"sizes": sizes, "epochs": EPOCHS, "limits": limits, "data": "generated"},
        "metrics": growth | overhead,
        "samples": {"rows": rows},
    }


def costs_of(rows: Sequence[Row], part: str) -> dict[str, list[float]]:
    """Return each cost of a part by ascending size, divided by the size if the size counts
    units.
    """
    names, divided = COSTS[part]
    return {
        name: [row[name] / (row["size"] if divided else 1) for row in rows if row["part"] == part]
        for name in names
    }


def grown(costs: Sequence[float]) -> float:
    """Return the largest cost over the least one at a smaller size."""
    return max(later / min(costs[:place]) for place, later in enumerate(costs) if place)


def panels_of(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, list[tuple[float, float, float]]]]]]:
    """Return the panels of the figure: a curve for each cost, relative to the cost at the smallest
    size.
    """
    sizes = {part: [row["size"] for row in rows if row["part"] == part] for part in COSTS}
    return [
        (
            TITLES[part],
            [
                (
                    name.replace("_", " "),
                    [(size, cost / costs[0], 0.0) for size, cost in zip(sizes[part], costs, strict=True)],
                )
                for name, costs in costs_of(rows, part).items()
            ],
        )
        for part in COSTS
    ]


def cell(part: str, size: float, quick: bool) -> Row:
    """Measure a cell in its own process."""
    about = {"part": part, "size": size, "quick": quick}

    def measure() -> Row:
        command = [sys.executable, "-m", "benchmarks.growth", json.dumps(about)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    (FOLDER / "growth").mkdir(parents=True, exist_ok=True)
    row = kept(FOLDER / "growth" / f"{part}-{size:g}{'-quick' if quick else ''}.json", about, measure)
    print(" ".join(f"{name}={value:.4g}" for name, value in row.items()), part, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=FOLDER / "growth") as folder:
        row = PARTS[given["part"]](given["size"], Path(folder), given["quick"])
    print(json.dumps({"size": given["size"], **row, "peak_mib": peak_rss_bytes() / 2**20}))
