"""Runs under torchrun: they train, and when a rank is killed the others stop at once, or resume by themselves."""

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
from distributed.test_runs import TIERED, assert_near, content, model, train

from recipes import KILLS, prepared
from stratarec.recipe import Recipe
from stratarec.training import checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared data set."""
    root = tmp_path_factory.mktemp("torchrun")
    prepared(Recipe.from_dict(content(root)).data)
    return root


def written(home: Path, path: Path, **train: Any) -> Path:
    """The file of a recipe whose run is next to it."""
    options = {"max_steps": 80, "epochs": 5, "checkpoint": {"every_steps": 15, "keep": 2}, **train}
    # What `train` would choose is told, as it is by hand in what these runs are held against.
    chosen = {"eval_every": 0, "average": {"decay": 0}, "early_stopping": {"patience": 0}}
    made = content(home, run=str(path.with_suffix("")), **{**chosen, **options})
    made["memory"] = TIERED
    path.write_text(yaml.safe_dump(made))
    return path


@contextmanager
def started(recipe: Path, *options: str, ranks: int = 2, overwrite: bool = False) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options,
        "-m", "stratarec", "train", str(recipe), "-q", *(["--overwrite"] if overwrite else []),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=recipe.parent
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes that torchrun started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if b"stratarec" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    while not checkpoint.list_checkpoints(run / "checkpoints"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_ends_with_the_bits_of_one_that_was_not_killed(
    ranks: Ranks, home: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    ranks.run(2, train, Recipe.load(written(home, whole.with_suffix(".yaml"))))
    draws = random.Random(4)
    for kill in range(max(KILLS // 3, 1)):
        recipe = written(home, tmp_path / f"killed-{kill}.yaml")
        run = recipe.with_suffix("")
        # Something to overwrite, which a restart must neither go on from nor overwrite again.
        shutil.copytree(whole, run)
        before = set(checkpoint.list_checkpoints(run / "checkpoints"))
        with started(recipe, "--max-restarts", "3", overwrite=True) as process:
            while set(checkpoint.list_checkpoints(run / "checkpoints")) >= before:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            wait_for_checkpoint(run, process)
            time.sleep(draws.random() / 2)  # from here on anything: steps, exchanges, checkpoints, evaluations
            pids = ranks_of(process)
            victim = draws.randrange(2)
            if pids:
                assert len(pids) == 2
                os.kill(pids[victim], signal.SIGKILL)
            out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert out.count("rank 1 ") == 1, "one rank prints for all"
        assert "of its time waiting" in out
        assert f"stratarec: rank {victim} ended" in err or not pids, err
        assert_near(model(run), model(whole), 0)
        assert not list((run / "checkpoints").glob(".*")), "something is left behind"
