"""Test runs under torchrun: they train, and if a rank is killed the others stop at once or the run
resumes automatically.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.ranks import Ranks
from distributed.test_runs import TIERED, assert_near, make_config, model, train

from recipes import KILLS, prepared
from stratarec.recipe import Recipe
from stratarec.training import checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set."""
    root = tmp_path_factory.mktemp("torchrun")
    prepared(Recipe.from_dict(make_config(root)).data)
    return root


def write_recipe(home: Path, path: Path, **train: Any) -> Path:
    """Write a recipe file whose run directory is next to it."""
    options = {"max_steps": 80, "epochs": 5, "checkpoint": {"every_steps": 15, "keep": 2}, **train}
    # `train` would choose these options itself. The runs to compare with set them explicitly.
    chosen = {"eval_every": 0, "average": {"decay": 0}, "early_stopping": {"patience": 0}}
    config = make_config(home, run=str(path.with_suffix("")), **{**chosen, **options})
    config["memory"] = TIERED
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def start_torchrun(
    recipe: Path, *options: str, ranks: int = 2, overwrite: bool = False
) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options,
        "-m", "stratarec", "train", str(recipe), "-q", *(["--overwrite"] if overwrite else []),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=recipe.parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rank_processes(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"stratarec" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    while not checkpoint.list_checkpoints(run / "checkpoints"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_matches_an_uninterrupted_run_bit_for_bit(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    uninterrupted = tmp_path / "whole"
    ranks.run(2, train, Recipe.load(write_recipe(home, uninterrupted.with_suffix(".yaml"))))
    draws = random.Random(4)
    for kill in range(max(KILLS // 3, 1)):
        recipe = write_recipe(home, tmp_path / f"killed-{kill}.yaml")
        run = recipe.with_suffix("")
        # This earlier run is to be overwritten. A restart must neither resume from it nor overwrite
        # the new run again.
        shutil.copytree(uninterrupted, run)
        before = set(checkpoint.list_checkpoints(run / "checkpoints"))
        with start_torchrun(recipe, "--max-restarts", "3", overwrite=True) as process:
            while set(checkpoint.list_checkpoints(run / "checkpoints")) >= before:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            wait_for_checkpoint(run, process)
            time.sleep(draws.random() / 2)  # the kill can hit any operation from here on
            pids = rank_processes(process)
            victim = draws.randrange(2)
            if pids:
                assert len(pids) == 2
                os.kill(pids[victim], signal.SIGKILL)
            out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert out.count("rank 1 ") == 1, "one rank prints for all"
        assert "of its time waiting" in out
        assert f"stratarec: rank {victim} ended" in err or not pids, err
        assert_near(model(run), model(uninterrupted), 0)
        assert not list((run / "checkpoints").glob(".*")), "something is left behind"
