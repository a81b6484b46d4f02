"""Whole runs of several ranks under torchrun: difference of their models from those of one process,
and kills.

Every cell trains 100 steps on the global batch of one process and compares the network and every
row with its optimizer state. Then ranks are killed with SIGKILL at random moments of runs that
torchrun restarts. Nothing is timed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.embedding.config import CodecConfig
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.build import new_plan
from stratarec.training.run.open_run import open_run

Model = dict[str, NDArray[Any]]
COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone")
STEPS = 100
TIMEOUT = 20.0
# Longest start beyond the timeout on a busy machine: two waits of torchrun, and compilation.
SLACK = 120.0


class Failed(AssertionError):
    """A check of this benchmark failed."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Settings of one run."""

    data: str
    """``plain`` or ``deduplicated``."""
    home: str
    """``memory``, ``dram`` or ``log``."""
    precision: str
    sharding: str = "auto"
    ranks: int = 1

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    def recipe(self, root: Path, **train: Any) -> dict[str, Any]:
        """Return the content of the recipe; `train` changes its training section."""
        memory: dict[str, Any] = {}
        if self.home != "memory":
            memory = {"precision": "int8", "lookahead": 2, "cache": {"fraction": 0.2, "ways": 8}}
        if self.home == "log":
            memory["block"] = {"path": str(root / "rows" / self.name), "budget": "256MiB"}
        return {
            "name": "ranks",
            "data": {
                "path": str(root / self.data),
                "source": {"kind": "synthetic", "samples": 40_000, "scale": 0.01, "seed": 3},
                "split": {"by": "fraction", "valid": 0.1, "test": 0.1},
                "groups": "auto" if self.data == "deduplicated" else "none",
                "vocabulary": {"min_count": 1, "tail_buckets": 4},
            },
            "memory": memory,
            "model": {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [32], "top_mlp": [32]},
            "distributed": {"sharding": self.sharding, "timeout": TIMEOUT},
            "train": {
                "run": str(root / "runs" / self.name),
                "batch_size": 256,
                "epochs": 5,
                "max_steps": STEPS,
                "eval_every": 40,
                "portions": 4,
                "checkpoint": {"every_steps": 20, "keep": 2},
                "early_stopping": {"patience": 0},
                "average": {"decay": 0},
                **train,
            },
        }

    def plan(self, root: Path) -> Path | None:
        """Write a plan with this home and precision and return its file, or None for `memory`.

        The planner itself would keep so few rows in memory.
        """
        if self.home == "memory":
            return None
        recipe = Recipe.from_dict(self.recipe(root))
        plan = new_plan(recipe, Dataset.open(recipe.data.path), self.ranks)
        assert plan is not None
        codec = CodecConfig(kind="int8" if self.precision == "int8" else "fp32")
        tier: Any = "log" if self.home == "log" else "dram"
        moved = (
            table if table.tier == "level0" else replace(table, tier=tier, codec=codec)
            for table in plan.tables
        )
        path = root / "recipes" / f"{self.name}.json"
        replace(plan, tables=tuple(moved)).save(path)
        return path

    def train(self, root: Path, **train: Any) -> Path:
        """Train the run to its end and return its directory."""
        content = self.recipe(root, **train)
        with start_training(content, root, self.ranks, plan=self.plan(root)) as process:
            _, error = process.communicate(timeout=600)
            _require(process.returncode == 0, f"{self.name}: {error[-2000:]}")
        return Path(content["train"]["run"])


@contextmanager
def start_training(
    content: dict[str, Any], root: Path, ranks: int, *options: str, plan: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run `stratarec train` with `ranks` ranks in a child process."""
    path = root / "recipes" / f"{Path(content['train']['run']).name}.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [*COMMAND, "--nproc-per-node", str(ranks), *options] if ranks > 1 else [sys.executable]
    command += ["-m", "stratarec", "train", str(path), "-q", *(["--plan", str(plan)] if plan else [])]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def model(run: Path) -> Model:
    """Return the network and every row of every table with its optimizer state, read by one
    process.
    """
    with open_run(run) as trained:
        embeddings = trained.model.embeddings
        rows = {
            f"{table.name}.{part}": values.numpy().copy()
            for table in embeddings.tables
            for part, values in embeddings.rows(table.name, 0, table.num_embeddings).items()
        }
        dense = trained.model.network.state_dict()
        return {**rows, **{name: value.numpy().copy() for name, value in dense.items()}}


def largest_difference(actual: Model, expected: Model) -> float:
    """Return the largest difference relative to the largest number of its tensor; 0 if all bits are
    equal.
    """
    return max(float(distances.max()) for distances in _relative_differences(actual, expected))


def mean_difference(actual: Model, expected: Model) -> float:
    """Return the mean difference relative to the largest number of a tensor, of the tensor where it
    is largest.
    """
    return max(float(distances.mean()) for distances in _relative_differences(actual, expected))


def _relative_differences(actual: Model, expected: Model) -> Iterator[NDArray[Any]]:
    _require(actual.keys() == expected.keys(), "the models differ in their tensors")
    return (
        np.abs(actual[name] - values) / max(np.abs(values).max(), 1e-30)
        for name, values in expected.items()
    )


def cells(quick: bool) -> Iterator[tuple[Cell, list[Cell]]]:
    """Yield runs of one process, each with the runs of several ranks to compare with it."""
    homes = (("memory", "fp32"), ("dram", "int8"), ("log", "fp32"), ("log", "int8"))
    for data, (home, precision) in itertools.product(("plain", "deduplicated"), homes[: 2 if quick else 4]):
        one = Cell(data=data, home=home, precision=precision)
        layouts = (("row", 2),) if quick else (("row", 2), ("table", 4))
        yield (
            one,
            [
                Cell(data=data, home=home, precision=precision, sharding=sharding, ranks=ranks)
                for sharding, ranks in layouts
            ],
        )


def compare_ranks(root: Path, quick: bool) -> list[dict[str, Any]]:
    """Compare ranks with one process, and two runs of the same ranks with each other."""
    rows = []
    for one, others in cells(quick):
        expected = model(one.train(root))
        for cell in others:
            run = cell.train(root)
            actual = model(run)
            rows.append(
                {
                    **vars(cell),
                    "farthest": largest_difference(actual, expected),
                    "mean": mean_difference(actual, expected),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
            if (cell.ranks, cell.sharding) == (2, "row"):
                shutil.rmtree(run)
                _require(
                    largest_difference(model(cell.train(root)), actual) == 0,
                    f"{cell.name}: the second run is not bitwise equal",
                )
    return rows


def kill_ranks(root: Path, count: int) -> list[dict[str, Any]]:
    """Kill a random rank at a random moment, `count` times; torchrun restarts the ranks."""
    draws, results = random.Random(7), []
    for ranks, home in ((2, "log"), (4, "dram")):
        cell = Cell(data="deduplicated", home=home, precision="int8", sharding="row", ranks=ranks)
        options = {"eval_every": 15, "checkpoint": {"every_steps": 10, "keep": 2}}
        whole = root / "runs" / f"whole-{ranks}"
        expected = model(cell.train(root, **options, run=str(whole)))
        for number in range(count // 2):
            run = root / "runs" / f"killed-{ranks}-{number}"
            results.append({"ranks": ranks, "home": home, **_killed(cell, root, run, options, draws)})
            print(results[-1], file=sys.stderr, flush=True)
            _require(
                largest_difference(model(run), expected) == 0,
                f"{run}: not bitwise equal to a run without a kill",
            )
            left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
            _require(not left, f"{run}: temporary checkpoints {left} remain")
    return results


def _killed(
    cell: Cell, root: Path, run: Path, options: dict[str, Any], draws: random.Random
) -> dict[str, Any]:
    """Run once with one kill and return the seconds from the kill to the end."""
    content = cell.recipe(root, **options, run=str(run))
    with start_training(content, root, cell.ranks, "--max-restarts", "3", plan=cell.plan(root)) as process:
        while not ranks_of(process.pid):
            time.sleep(0.05)
        while not checkpoint.list_checkpoints(run / "checkpoints") and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draws.random() * 4)
        steps = checkpoint.list_checkpoints(run / "checkpoints")
        pids = ranks_of(process.pid)
        if pids:
            os.kill(draws.choice(pids), signal.SIGKILL)
        began = time.monotonic()
        _, error = process.communicate(timeout=TIMEOUT + SLACK)
        _require(process.returncode == 0, f"{run}: {error[-2000:]}")
    return {
        "killed": bool(pids),
        "checkpoint_before": steps[-1].name if steps else "",
        "seconds_to_the_end": round(time.monotonic() - began, 1),
    }


def ranks_of(pid: int) -> list[int]:
    """Return the processes of the ranks that torchrun runs."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(each) for each in pids if b"stratarec" in Path(f"/proc/{each}/cmdline").read_bytes()]
    except OSError:
        return []


def _require(fine: bool, message: str) -> None:
    if not fine:
        raise Failed(message)


def run(quick: bool) -> dict[str, Any]:
    """Run 16 cells and 20 kills; `quick` has 4 and 2."""
    count = 2 if quick else 20
    with tempfile.TemporaryDirectory(prefix="ranks-", dir="/var/tmp") as folder:
        root = Path(folder)
        (root / "recipes").mkdir()
        for data in ("plain", "deduplicated"):
            content = Cell(data=data, home="memory", precision="fp32").recipe(root)
            prepare(Recipe.from_dict(content).data)
        rows = compare_ranks(root, quick)
        killed = kill_ranks(root, count)
    return {
        "config": {"steps": STEPS, "batch_size": 256, "portions": 4, "timeout_seconds": TIMEOUT},
        "metrics": {
            "cells": len(rows),
            "farthest_float32": max(row["farthest"] for row in rows if row["precision"] == "fp32"),
            "farthest_int8": max(row["farthest"] for row in rows if row["precision"] == "int8"),
            "mean_int8": max(row["mean"] for row in rows if row["precision"] == "int8"),
            "kills": sum(row["killed"] for row in killed),
            "seconds_after_a_kill": max(row["seconds_to_the_end"] for row in killed),
        },
        "samples": {"rows": rows, "kills": killed},
    }
