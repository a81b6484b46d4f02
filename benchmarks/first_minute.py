"""The first minute of a new user: seconds of `init`, `prepare`, `train` and `predict` on a click
log of 50,000 rows.

Each command runs in its own process, as from a shell. The first time, Numba's cache on disk is
empty, as after the package was installed, so kernels are compiled. The second time, all commands
run again in another directory, with the kernels of the first time. Files are in the page cache both
times. The package is compiled to bytecode, as after `pip install`, even if the environment disables
writing bytecode. `processor` is the time of all threads, which other work on the machine changes
less than the clock.

Gate: the scores of `predict` are one finite probability for each row, and order clicks better than
chance.
"""

from __future__ import annotations

import compileall
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

import stratarec
from stratarec.errors import TrainingError
from stratarec.models.metrics import evaluate_logits

ROWS, QUICK_ROWS, RUNS = 50_000, 5_000, 2
COMMANDS = {
    "init": ["init", "clicks.csv"],
    "prepare": ["prepare", "clicks.yaml"],
    "train": ["train", "clicks.yaml"],
    "predict": ["predict", "runs/clicks", "clicks.csv", "-o", "scores.csv"],
}
LIMITS = {
    "init_first": 1.5, "prepare_first": 2.5, "train_first": 18.0, "predict_first": 2.5,
    "init_second": 1.5, "prepare_second": 2.5, "train_second": 9.0, "predict_second": 2.5,
}  # fmt: skip
"""Upper limits in seconds."""
_LEAST_AUC = 0.6


def write_log(path: Path, rows: int) -> None:
    """Write two weeks of impressions: time, seven columns of users and items, the place on the
    page, and the click.
    """
    draw = np.random.default_rng(1)

    def popular(values: int, power: float) -> NDArray[np.int64]:
        shares = np.arange(1, values + 1) ** -power
        return draw.choice(values, rows, p=shares / shares.sum())

    user, item, site = popular(8000, 0.7), popular(3000, 1.0), popular(200, 1.0)
    device, place = draw.choice(4, rows, p=[0.55, 0.3, 0.1, 0.05]), draw.integers(1, 9, rows)
    taste = (draw.normal(0, 0.6, (8000, 3))[user] * draw.normal(0, 1, (3000, 3))[item]).sum(axis=1)
    logit = draw.normal(0, 0.7, 8000)[user] + draw.normal(0, 0.8, 3000)[item] + taste - 0.12 * place - 1.6
    seconds = np.sort(draw.integers(0, 14 * 86_400, rows)) + 1_709_251_200
    pl.DataFrame(
        {
            "time": pl.from_epoch(seconds, "s").dt.to_string("%Y-%m-%d %H:%M:%S"),
            "user_id": "u" + pl.Series(user).cast(pl.String),
            "item_id": item + 100_000,
            "category": "cat_" + pl.Series(item * 7919 % 25).cast(pl.String),
            "device": np.array(["mobile", "desktop", "tablet", "tv"])[device],
            "site": "site" + pl.Series(site).cast(pl.String) + ".com",
            "position": place,
            "price": np.exp(draw.normal(3, 0.8, 3000)).round(2)[item],
            "age": draw.integers(16, 75, 8000)[user],
            "click": (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64),
        }
    ).write_csv(path)


def commands(folder: Path, rows: int, cache: Path) -> dict[str, float]:
    """Run all commands in an empty `folder`; return the clock and processor seconds of each."""
    write_log(folder / "clicks.csv", rows)
    seconds = {}
    for name, words in COMMANDS.items():
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "stratarec", *words],
            cwd=folder,
            env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds[name], after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[f"{name}_processor"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode:
            raise TrainingError(f"{name} ended with {done.returncode}: {done.stderr[-1000:]}")
    return seconds


def gate(folder: Path, rows: int) -> float:
    """Check the scores and return their AUC over the whole log."""
    label = pl.read_csv(folder / "clicks.csv")["click"].to_numpy().astype(np.float32)
    scores = pl.read_csv(folder / "scores.csv").to_series(-1).to_numpy()
    if len(scores) != rows or not ((scores > 0) & (scores < 1)).all():
        raise TrainingError(
            f"predict wrote {len(scores)} scores for {rows} rows, or scores that are no probabilities"
        )
    auc = evaluate_logits(label, np.log(scores / (1 - scores)).astype(np.float32)).values["auc"]
    if auc < _LEAST_AUC:
        raise TrainingError(f"the AUC of the scores is {auc:.4f}, expected at least {_LEAST_AUC}")
    return auc


def run(quick: bool) -> dict[str, Any]:
    """Run all commands twice in each of several fresh directories."""
    rows, samples = QUICK_ROWS if quick else ROWS, []
    compileall.compile_dir(stratarec.__path__[0], quiet=2)
    for number in range(1 if quick else RUNS):
        with tempfile.TemporaryDirectory() as work:
            for attempt in ("first", "second"):
                folder = Path(work, attempt)
                folder.mkdir()
                seconds = commands(folder, rows, Path(work, "kernels"))
                samples.append({"run": number, "time": attempt, "auc": gate(folder, rows), **seconds})
    return {
        "config": {"rows": rows, "columns": 10, "runs": len(samples) // 2, "limits": LIMITS},
        "metrics": {
            f"{name}_{attempt}{suffix}": median(
                each[name + suffix] for each in samples if each["time"] == attempt
            )
            for suffix in ("", "_processor")
            for attempt in ("first", "second")
            for name in COMMANDS
        },
        "samples": {"rows": samples},
    }
