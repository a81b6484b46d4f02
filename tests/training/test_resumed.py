"""Test that a run that was stopped or killed, and resumed, matches an uninterrupted run bit for
bit.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training.test_tiered_runs import EVERY_ROW, INT8, cached, content, on_ssd

from recipes import KILLS, assert_same_model, last, prepared, start, tiny, train
from stratarec.cli import main
from stratarec.hot.hot_loader import HotLoader
from stratarec.io.tensors import read_tensors
from stratarec.recipe import Recipe
from stratarec.training import checkpoint
from stratarec.training.trainer import Trainer


def is_cached(trainer: Trainer) -> None:
    assert cached(trainer) > 0


def has_statistics(trainer: Trainer) -> None:
    network = read_tensors(last(trainer.run) / "network.safetensors")
    assert (network["score.top.1.running_mean"] != 0).any()


def has_hot_batches(trainer: Trainer) -> None:
    apart = trainer.recipe.hot.batches != "none"
    assert isinstance(trainer.parts.loader, HotLoader) == apart


@dataclass(frozen=True)
class Case:
    """Configuration of a run, and where it stops."""

    train: dict[str, Any]
    steps: int = 40
    """Number of steps of the run, 0 for all of its epochs."""
    stopped: int = 23
    """Number of steps of the first part."""
    epoch: int = 0
    """Epoch in which the second part begins."""
    again: bool = True
    """Whether the second part starts from the earlier of two checkpoints, so that some steps are
    trained twice.
    """
    uninterrupted_fields: dict[str, Any] = field(default_factory=dict)
    """Other fields of the uninterrupted run, which change no bit."""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other sections of the recipe than ``train``."""
    check: Callable[[Trainer], None] | None = None
    """Check that the run used the tested feature."""


ADAM_OF_ALL_ROWS = {"kind": "adam", "rows": "all", "weight_decay": 0.01}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"dense": {"kind": "adamw", "weight_decay": 0.1}, "embedding": ADAM_OF_ALL_ROWS},
    "adagrad-bf16": {
        "dense": {"kind": "adagrad"},
        "precision": "bf16",
        "embedding": {"kind": "rowwise_adam"},
    },
    "sgd": {
        "dense": {"kind": "sgd", "schedule": {"kind": "cosine", "total_steps": 90}},
        "embedding": ADAM_OF_ALL_ROWS,
    },
}
AVERAGED = {
    "average": {"decay": 0.9},
    "dense": {"learning_rate": 0.05},
    "checkpoint": {"every_steps": 7, "keep": 99},
}
CASES = {
    **{name: Case(options) for name, options in OPTIMIZERS.items()},
    # The masks and statistics of a step do not depend on earlier stops, evaluations and
    # checkpoints.
    "dropout, statistics, average": Case(
        {**AVERAGED, "epochs": 1},
        steps=0,
        stopped=13,
        again=False,
        uninterrupted_fields={"eval_every": 9},
        sections={"model": {"dropout": 0.3, "batch_norm": True}},
        check=has_statistics,
    ),
    **{
        kind: Case({"embedding": rows}, sections={"memory": {**INT8, "precision": kind}}, check=is_cached)
        for kind, rows in (("int8", EVERY_ROW), ("int4", {}))
    },
    **{
        f"hot batches {batches}": Case(
            {"eval_every": 0},
            steps=90,
            stopped=80,
            epoch=1,
            again=False,
            uninterrupted_fields={"report": True},
            sections={"memory": INT8, "hot": {"budget": "256KiB", "batches": batches}},
            check=has_hot_batches,
        )
        for batches in ("proportional", "none")
    },
}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data set whose batches use a small part of the tables."""
    root = tmp_path_factory.mktemp("larger")
    prepared(Recipe.from_dict(content(root)).data)
    return root


LATER = ("int4", "hot batches none")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LATER else ()) for name in CASES]
)
def test_a_stopped_run_resumes_bitwise(home: Path, larger: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]

    def make_recipe(run: str, **more: Any) -> Recipe:
        options = {"run": str(tmp_path / run), "max_steps": case.steps, **case.train, **more}
        result = content(larger, **options) if "memory" in case.sections else tiny(home, **options)
        for section, fields in case.sections.items():
            result[section] = result.get(section, {}) | fields
        return Recipe.from_dict(result)

    uninterrupted = train(make_recipe("whole", **case.uninterrupted_fields))
    if case.check is not None:
        case.check(uninterrupted)
    train(make_recipe("parts", max_steps=case.stopped))
    if case.again:
        for path in kept(tmp_path / "parts")[1:]:
            shutil.rmtree(path)
    position = checkpoint.read_state(last(tmp_path / "parts"))["training"]
    assert position["epoch"] == case.epoch
    assert position["batch"] > 0
    torch.rand(100)
    resumed = train(make_recipe("parts"), resume=True)
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert list(map(tuple, resumed.state.losses)) == uninterrupted.state.losses


def kept(run: Path) -> list[Path]:
    return checkpoint.list_checkpoints(run / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [False, True], ids=["memory", "log"])
def test_kill_9_at_random_times_changes_no_bit(
    home: Path, larger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiers: bool
) -> None:
    steps = {"epochs": 4 + 3 * KILLS, "checkpoint": {"every_steps": 9, "keep": 2}, "eval_every": 2000}

    def make_recipe(run: str) -> Recipe:
        options = {"run": str(tmp_path / run), **steps}
        block = {"path": str(tmp_path / f"rows-{run}"), "budget": "64MiB"}
        return Recipe.from_dict(
            {**content(larger, **options), "memory": {**INT8, "block": block}}
            if tiers
            else tiny(home, **options)
        )

    plan = on_ssd(make_recipe("whole"), "int8") if tiers else None
    uninterrupted = train(make_recipe("whole"), plan=plan)
    assert bool(cached(uninterrupted)) == tiers
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(make_recipe("killed").to_dict()))
    command = [str(tmp_path / "r.yaml")]
    if plan is not None:
        plan.save(tmp_path / "plan.json")
        command += ["--plan", str(tmp_path / "plan.json")]
    draws = random.Random(5)
    for _ in range(KILLS):
        known = kept(tmp_path / "killed")[-1:]
        process = start(*command)
        while process.poll() is None and kept(tmp_path / "killed")[-1:] <= known:
            time.sleep(0.002)
        # From here on a checkpoint is written every few hundredths of a second, so the kill hits a
        # step or a write.
        time.sleep(draws.uniform(0, 0.1))
        assert process.poll() is None, f"the run ended before it could be killed: {process.communicate()}"
        process.kill()
        process.communicate()
    assert main(["train", "-q", "--resume", *command]) == 0
    assert_same_model(last(tmp_path / "whole"), last(tmp_path / "killed"))
    assert not list((tmp_path / "killed" / "checkpoints").glob(".step-*.tmp"))
    tested, evaluated = [], []
    for name in ("whole", "killed"):
        tested.append(json.loads((tmp_path / name / "result.json").read_text())["test"])
        capsys.readouterr()
        assert main(["evaluate", "-q", str(tmp_path / name)]) == 0
        evaluated.append(capsys.readouterr().out)
    assert tested[0] == tested[1]
    assert evaluated[0] == evaluated[1]
