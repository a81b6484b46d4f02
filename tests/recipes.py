"""A tiny recipe that tests prepare and train, and helpers to inspect its runs."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from errors import refuses
from stratarec.data.dataset.compatibility import settings
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.embedding.checkpoint import saved_rows
from stratarec.errors import ConfigError
from stratarec.io.tensors import read_tensors
from stratarec.planning import machine
from stratarec.planning.plan import Plan
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe, leaves, with_values
from stratarec.serving.scorer import Scorer
from stratarec.training import checkpoint
from stratarec.training.build import new_plan
from stratarec.training.export.export import export
from stratarec.training.predict import predict
from stratarec.training.raw_logs import RawLogs
from stratarec.training.resolve import choose_defaults, describe_defaults
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

KILLS = int(os.environ.get("STRATAREC_KILLS", "1"))
"""Number of kills in tests that kill a run."""

DISK_BYTES = 4 << 20
"""Size of the disk of the fixture `small_disk`."""


def fill_disk(path: Path, free: int) -> None:
    """Fill a small disk with one file until `free` bytes are left."""
    used = sum(file.stat().st_blocks * 512 for file in path.parent.rglob("*"))
    with path.open("wb") as file:
        file.write(bytes(DISK_BYTES - used - free))


def tiny(root: Path, **train: Any) -> dict[str, Any]:
    """Return a recipe of a few thousand samples under `root`; `train` changes its training section.

    The recipe has no report, because drawing one takes as long as the training.
    """
    return {
        "name": "tiny",
        "data": {
            "path": str(root / "data"),
            "source": {"kind": "synthetic", "samples": 6000, "scale": 0.0005, "seed": 3},
            "split": {"by": "fraction", "valid": 0.1, "test": 0.2},
            "shard_samples": 2000,
        },
        "model": {"kind": "dlrm", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
        "train": {
            "run": str(root / "run"),
            "batch_size": 128,
            "epochs": 2,
            "eval_every": 20,
            "log_every": 5,
            "report": False,
            "shuffle_row_groups": 2,
            "checkpoint": {"every_steps": 7, "keep": 2},
            **train,
        },
    }


def measure_briefly(patch: pytest.MonkeyPatch) -> None:
    """Measure memories on fewer and smaller tables and files, in a fraction of the time."""
    shapes = ((2, 4, 16, 4), (2, 4, 64, 4), (6, 4, 16, 4), (6, 8, 64, 2), (2, 8, 64, 12))
    sizes = {"_SECONDS": 0.02, "_FILE_BYTES": 8 << 20, "_DRAM_BYTES": 16 << 20, "_TABLE_BYTES": 1 << 18}
    for name, value in {**sizes, "SHAPES": shapes, "_WARM_SAMPLES": 256}.items():
        patch.setattr(machine, name, value)


def log_config(
    root: Path, schema: Schema, frame: pl.DataFrame | None = None, **changes: Any
) -> PrepareConfig:
    """Return a config for the Parquet files in `root`, without held-out splits; `frame` is written
    there first.
    """
    if frame is not None:
        frame.write_parquet(root / "log.parquet")
    source = ParquetConfig(paths=(str(root / "*.parquet"),), schema=schema)
    usual = {"source": source, "path": str(root / "data"), "split": SplitConfig(valid=0.0, test=0.0)}
    return PrepareConfig(**{**usual, **changes})


def prepared(config: PrepareConfig) -> Dataset:
    """Return a prepared synthetic log. It is prepared once per process, and copied for each
    caller.
    """
    path = Path(config.path)
    assert config.source.kind == "synthetic"
    if path.exists():
        return prepare(config)
    shutil.copytree(_prepared(json.dumps(settings(config)), path.name, config), path)
    return Dataset.open(path)


def least_gpu_memory(recipe: Recipe, dataset: Dataset, device: torch.device) -> Recipe:
    """Return a recipe with as little GPU memory for rows as its tables need."""
    with refuses(ConfigError, "memory.hbm") as caught:
        new_plan(recipe.with_fields({"memory.hbm": 1, "hot.budget": None}), dataset, device=device)
    least = re.search(r"memory.hbm to at least (\d+)", str(caught.value))
    assert least is not None
    return recipe.with_fields({"memory.hbm": int(least[1]) + int(recipe.hot.budget or 0)})


_MADE: dict[tuple[str, str], Path] = {}


def _prepared(kind: str, name: str, config: PrepareConfig) -> Path:
    if (kind, name) not in _MADE:
        path = _folder() / str(len(_MADE)) / name
        path.parent.mkdir()
        prepare(replace(config, path=str(path)))
        _MADE[kind, name] = path
    return _MADE[kind, name]


@cache
def _folder() -> Path:
    result = Path(tempfile.mkdtemp(prefix="stratarec-tests-"))
    atexit.register(shutil.rmtree, result, ignore_errors=True)
    return result


def last(target: Path) -> Path:
    return checkpoint.list_checkpoints(target / "checkpoints")[-1]


def assert_same_model(one: Path, other: Path) -> None:
    for name in ("network.safetensors", "optimizer.safetensors"):
        left, right = read_tensors(one / name), read_tensors(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    tables, others = table_values(one), table_values(other)
    assert tables.keys() == others.keys()
    for name, values in tables.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def table_values(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights and state of every row of a checkpoint; NaN for rows that were never
    written.
    """
    results = {}
    for manifest in checkpoint.read_state(path)["tables"]["groups"]:
        total = sum(rows for _, rows, *_ in manifest["tables"])
        for rows, found_rows in saved_rows(path / "tables" / manifest["name"], manifest):
            for part in ("weights", "row_state", "full_state", "clock"):
                values = getattr(found_rows, part)
                if len(values):
                    name = f"{manifest['name']}.{part}"
                    share = len(values) // len(rows)
                    target = results.setdefault(name, np.full((total, share), np.nan, np.float32))
                    target[rows] = values.reshape(-1, share)
    return results


def train(
    recipe: Recipe, *, resume: bool = False, plan: Plan | None = None, progress: Progress | None = None
) -> Trainer:
    """Train a recipe on its data set to the end."""
    trainer = Trainer(recipe, Dataset.open(recipe.data.path), progress, plan=plan)
    trainer.train(resume=resume)
    return trainer


def agreeing_scores(
    run: str | Path, log: Path, root: Path, *, rtol: float = 1e-4
) -> tuple[Scorer, np.ndarray[Any, Any]]:
    """Export a run, score a Parquet log with the export, and return the scorer and the scores.

    The scores must agree within `rtol` with those of the run on the raw log, and with its
    predictions of the test split.
    """
    with open_run(run) as trained:
        predict(trained, "test", root / "test.parquet", SilentProgress())
        fresh = RawLogs(trained, [str(log)])
        raw = np.concatenate([part.logits for part in fresh.scored(SilentProgress())])
        export(trained, root / "export")
    scorer = Scorer.open(root / "export")
    scores = scorer.score(pl.read_parquet(log))
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-raw.astype(np.float64))), rtol=rtol)
    known = pl.read_parquet(root / "test.parquet")
    np.testing.assert_allclose(known["score"], scores[known["row"].to_numpy() - 1], rtol=1e-4)
    return scorer, scores


def interrupt(trainer: Trainer, at: int, times: int = 1, number: int = signal.SIGINT) -> None:
    """Send a signal (by default SIGINT, Ctrl-C) after step `at`. A device may not have trained that
    step yet.
    """

    @contextmanager
    def stepped(_: int) -> Iterator[None]:
        yield
        if trainer.state.step == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    trainer.hooks.append(stepped)


def sized(
    content: dict[str, Any], dataset: Dataset, earlier: Recipe | None = None
) -> tuple[dict[str, Any], str]:
    """Return a recipe's content with defaults for the size of the data, and the line that names
    these defaults.
    """
    recipe = Recipe.from_dict(content)
    values = choose_defaults(recipe, leaves(content), dataset, earlier)
    content = with_values(content, values)
    assert recipe.with_fields(values) == Recipe.from_dict(content)
    return content, " ".join(" ".join(describe_defaults(values, dataset)).split())


def start(path: str | Path, *options: str) -> subprocess.Popen[bytes]:
    """Start `stratarec train --resume` of a recipe in a child process."""
    command = [sys.executable, "-m", "stratarec", "train", "-q", "--resume", str(path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
