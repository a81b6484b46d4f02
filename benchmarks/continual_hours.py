"""Seconds of a run that goes on: from an hour's file to who serves, hour by hour, and into a log of many rows."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.embedding.stores.log import LogRecords
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.serving.scorer import Scorer
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.evaluate import ScoredSamples
from stratarec.training.export.publish import publish
from stratarec.training.raw_logs import RawLogs
from stratarec.training.run.open_run import open_run

HOUR_MS = 3_600_000


def hourly(run: Path, day: Path, folder: Path, time_column: str, most: int = 24) -> dict[str, Any]:
    """A day's samples scored by the run as the day before left it, and by one that learns each hour before the next;
    of `most` hours.

    The AUC of all samples, the mean of those within each hour, and the processor's seconds of the hours' periods.
    """
    folder.mkdir()
    frame = pl.read_parquet(day).with_columns((pl.col(time_column) // HOUR_MS).alias("hour"))
    hours = []
    for (hour,), part in sorted(frame.group_by("hour", maintain_order=True), key=lambda each: each[0]):
        hours.append(folder / f"{hour}.parquet")
        part.drop("hour").write_parquet(hours[-1])
    hours = hours[:most]
    by_day = _scored(run, hours)
    by_hour, spent = [], 0.0
    for hour in hours:
        by_hour += _scored(run, [hour])
        began = time.process_time()
        list(continue_run(run, [str(hour)], SilentProgress()))
        spent += time.process_time() - began
    shutil.rmtree(folder)
    found: dict[str, Any] = {"hours": len(hours), "seconds": spent}
    for name, parts in (("by_day", by_day), ("by_hour", by_hour)):
        label, logit = (np.concatenate(column) for column in zip(*parts, strict=True))
        within = [evaluate_logits(*part)["auc"] for part in parts]
        found[name] = {"auc": evaluate_logits(label, logit)["auc"], "auc_within_hours": float(np.mean(within))}
    return found


def _scored(run: Path, files: list[Path]) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Labels and logits of each log by the run as it is."""
    found = []
    with open_run(run) as trained:
        for file in files:
            logs = RawLogs(trained, [str(file)], labelled=True, events=trained.dataset.events())
            whole = ScoredSamples.joined(part.samples for part in logs.scored(SilentProgress()))
            found.append((whole.label, whole.logit))
    return found


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
