"""Continued runs in short periods: AUC of hourly training, seconds to an updated scorer, and writes
to a large log.
"""

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

from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.serving.scorer import Scorer
from stratarec.training.continual.continual_run import continue_run
from stratarec.training.evaluate import ScoredSamples
from stratarec.training.export.publish import publish
from stratarec.training.raw_logs import RawLogs
from stratarec.training.run.open_run import open_run

HOUR_MS = 3_600_000


def compare_hourly(run: Path, day: Path, folder: Path, time_column: str, most: int = 24) -> dict[str, Any]:
    """Score a day with the run of the previous day, and with one that learns each hour before the
    next is scored.

    The run is trained on up to `most` hours. Returns the AUC of all samples, the mean AUC within an
    hour, and the processor seconds of training.
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
    result: dict[str, Any] = {"hours": len(hours), "seconds": spent}
    for name, parts in (("by_day", by_day), ("by_hour", by_hour)):
        label, logit = (np.concatenate(column) for column in zip(*parts, strict=True))
        within = [evaluate_logits(*part)["auc"] for part in parts]
        result[name] = {
            "auc": evaluate_logits(label, logit)["auc"],
            "auc_within_hours": float(np.mean(within)),
        }
    return result


def _scored(run: Path, files: list[Path]) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return labels and logits of each file, scored by the current state of the run."""
    pairs = []
    with open_run(run) as trained:
        for file in files:
            logs = RawLogs(trained, [str(file)], labelled=True, events=trained.dataset.events())
            samples = ScoredSamples.joined(part.samples for part in logs.scored(SilentProgress()))
            pairs.append((samples.label, samples.logit))
    return pairs


def seconds_to_scorer(run: Path, day: Path, folder: Path, time_column: str) -> float:
    """Return the seconds from the start of training on a new hour until a scorer answers with the
    updated model.
    """
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


def seconds_into_log(folder: Path, rows: int) -> float:
    """Return the seconds to write and checkpoint 10,000 rows in an SSD store of `rows` rows."""
    width, step = 20, 1 << 20
    store = SsdRecords(folder / "first", rows=rows, record_bytes=width)
    for first in range(0, rows, step):
        numbers = np.arange(first, min(first + step, rows), dtype=np.int64)
        store.write(numbers, np.zeros((len(numbers), width), dtype=np.uint8))
    for name in ("before", "after"):
        (folder / name).mkdir()
    manifest = store.checkpoint(folder / "before", None)
    store.close()
    store = SsdRecords(folder / "second", rows=rows, record_bytes=width)
    store.restore(folder / "before", manifest)
    numbers = np.unique(np.random.default_rng(0).integers(0, rows, 10_000))
    began = time.perf_counter()
    store.write(numbers, np.ones((len(numbers), width), dtype=np.uint8))
    store.checkpoint(folder / "after", folder / "before")
    spent = time.perf_counter() - began
    store.close()
    return spent
