"""Whole runs with rows in GPU memory: kernels in Triton's interpreter, on tensors of the CPU.

The tests of `training/test_gpu_runs.py` call these functions in child processes. The GPU is an H100
as in its data sheet, whose memory is that of the CPU (`as_gpu`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import slot_memories
import torch
from training import test_continual

from errors import refuses
from recipes import assert_same_model, interrupt, last, least_gpu_memory, prepared, tiny
from stratarec.cli import main
from stratarec.cli.checks.gpu import Sizes, _trained_rows
from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding import slots
from stratarec.errors import ConfigError, Interrupted, TrainingError
from stratarec.io.tensors import read_tensors
from stratarec.kernels.runtime.accelerator import CPU
from stratarec.planning.machine import DramTier, Tiers, card_rates
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training import build, trainer
from stratarec.training.build import new_plan
from stratarec.training.evaluate import score_split
from stratarec.training.run import build_run, periods
from stratarec.training.run.open_run import open_run
from stratarec.training.run.run_directory import read_plan, read_recipe
from stratarec.training.steps import graph_step
from stratarec.training.trainer import Trainer

TIERS = Tiers(dram=DramTier(row_bytes_per_second=1e10, bytes=1 << 34), threads=2)
HBM = card_rates("h100").tier(TIERS.engine)
STEPS = 3


@contextmanager
def as_gpu(kind: str = "device") -> Iterator[None]:
    """Train rows as in the memory of an H100, in slots of a kind of `slot_memories`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, build_run):
            patch.setattr(module, "on_gpu", lambda make_recipe, device: make_recipe.memory.hbm != 0)
        patch.setattr(trainer, "check_rows_device", lambda *given: None)
        patch.setattr(build, "measured_rates", lambda device: card_rates("h100"))
        patch.setattr(
            build, "measure_tiers", lambda memory, *, rates, again: replace(TIERS, hbm=rates and HBM)
        )
        patch.setitem(slots.MEMORIES, "cpu", slot_memories.KINDS[kind])
        yield


def make_recipe(home: Path, name: str, **sections: Any) -> Recipe:
    content = tiny(home, run=str(home / name), batch_size=16, max_steps=STEPS, eval_every=2)
    content["data"]["source"]["samples"] = 3000
    content["data"]["split"] |= {"valid": 0.03, "test": 0.03}  # the interpreter is slow
    content["model"] |= {"embedding_dim": 8, "bottom_mlp": [8]}
    return Recipe.from_dict({**content, **sections})


def tight(recipe: Recipe) -> Recipe:
    return least_gpu_memory(recipe, prepared(recipe.data), CPU)


class Said(SilentProgress):
    """Collects what a run says."""

    texts: ClassVar[list[str]] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


class Full:
    """A graph for which the GPU has too little memory."""

    def __init__(self, *given: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")


@contextmanager
def without_memory_for_graphs() -> Iterator[None]:
    """Make steps try to record a graph, as on a GPU, and fail."""

    def build(step: graph_step.GraphStep, *given: Any) -> None:
        plain(step, *given)
        step._captures = True

    plain = graph_step.GraphStep.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_step, "_Graph", Full)
        patch.setattr(graph_step.GraphStep, "__init__", build)
        yield


def trained(recipe: Recipe, at: int = 0, *, resume: bool = False) -> Path:
    """Train a run, to step `at` or to its end; return its folder."""
    run = Trainer(recipe, prepared(recipe.data), Said())
    if at:
        interrupt(run, at, number=signal.SIGTERM if resume else signal.SIGINT)
    with suppress(Interrupted):
        run.train(resume=resume)
    return Path(recipe.run)


def assert_same(one: Path, other: Path) -> None:
    """Check that all rows and weights of two runs are equal, wherever their rows are stored."""
    with open_run(one) as left, open_run(other) as right:
        for name in left.dataset.vocabularies:
            for part, values in left.model.embeddings.table(name).items():
                assert torch.equal(values, right.model.embeddings.table(name)[part]), (name, part)
        for name, weight in left.model.network.state_dict().items():
            assert torch.equal(weight, right.model.network.state_dict()[name]), name


def either_device(root: str) -> None:
    """Check that training on the CPU, on the GPU, and on both alternately is bitwise equal; open
    the runs on both.
    """
    home = Path(root)
    expected = trained(make_recipe(home, "cpu"))
    with as_gpu():
        recipe = tight(make_recipe(home, "gpu", memory={"precision": "fp32"}))
        plan = new_plan(recipe, prepared(recipe.data))
        assert plan is not None
        assert plan.level0 == "hbm"
        assert {placed.tier for placed in plan.tables} == {"level0", "dram"}
        with without_memory_for_graphs():
            assert_same(expected, trained(recipe))
        (refusal,) = (text for text in Said.texts if "too little memory for a graph" in text)
        assert "memory.hbm" in refusal
        # All of its memory but what the network and a batch need.
        whole = new_plan(make_recipe(home, "gpu"), prepared(recipe.data))
        assert whole is not None
        assert whole.budgets["hbm"] > 70e9  # type: ignore[operator]
    trained(make_recipe(home, "both"), 1)
    with as_gpu():
        trained(replace(recipe, train=replace(recipe.train, run=str(home / "both"))), 2, resume=True)
    assert_same(expected, trained(make_recipe(home, "both"), resume=True))
    scores = []
    for name, kind in (("cpu", "plain"), ("gpu", "plain"), ("gpu", "device")):
        with as_gpu(kind), open_run(home / name) as opened:
            scores.append(
                score_split(
                    opened.model, opened.dataset, "test", precision="float32", progress=SilentProgress()
                ).logit
            )
    for logit in scores[1:]:
        np.testing.assert_array_equal(scores[0], logit)
    with refuses(ConfigError, "plan train.device cpu memory.hbm"):
        Trainer(make_recipe(home, "refused"), prepared(recipe.data), plan=plan)
    print(json.dumps([len(scores[0]), _not_finite(home)]))


def _not_finite(home: Path) -> list[str]:
    """Return the errors of a run on the CPU and of one on the GPU whose loss is not finite in its
    third step.

    The last checkpoint is that of the second step.
    """
    errors = []
    for kind in ("plain", "device"):
        recipe = make_recipe(home, f"{kind}-nan").with_fields(
            {"train.checkpoint.every_steps": 2, "train.max_steps": 9}
        )
        with as_gpu(kind):
            trainer = Trainer(recipe, prepared(recipe.data), Said())
            trainer.hooks.append(partial(_damage, trainer))
            with pytest.raises(TrainingError) as caught:
                trainer.train()
        errors.append(str(caught.value))
        assert last(Path(recipe.run)).name.endswith("2")
    return errors


@contextmanager
def _damage(trainer: Trainer, step: int) -> Iterator[None]:
    """Make the weights of the network so large that the loss of the third step is not finite."""
    if step == 2:
        for weight in trainer.parts.model.network.parameters():
            weight.detach().fill_(1e30)
    yield


def doctor(root: str) -> None:
    """Check that the rows by which a doctor compares a GPU with the CPU are equal."""
    for kind in ("rowwise_adagrad", "adam"):
        rows = []
        for memory in ("plain", "device"):
            with as_gpu(memory):
                rows.append(list(_trained_rows(kind, CPU, Sizes(batch=32))))
        for expected, other in zip(*rows, strict=True):
            assert torch.equal(expected, other)


def hot_and_rounded(root: str) -> None:
    """Check that hot batches with int8 homes train bitwise equal to the same plan in DRAM."""
    home, runs = Path(root), {}
    memory, hot = {"precision": "int8"}, {"budget": "8KiB", "batches": "proportional"}
    for kind in ("plain", "device"):
        with as_gpu(kind):
            recipe = tight(make_recipe(home, kind, memory=memory, hot=hot))
            plan = new_plan(recipe, prepared(recipe.data))
            assert plan is not None
            assert any(placed.hot_rows and placed.codec.kind == "int8" for placed in plan.tables)
            runs[kind] = trained(recipe)
    assert_same_model(*map(last, runs.values()))
    print(json.dumps(True))


def continued(root: str) -> None:
    """Check that a run that is trained, continued and exported with rows on the GPU is equal to one
    in DRAM.
    """
    runs = []
    for kind in ("plain", "device"):
        home = Path(root, kind)
        home.mkdir()
        with as_gpu(kind):
            run = test_continual.begin(home, train={"report": kind == "device"})
            plan = read_plan(run, read_recipe(run), Dataset.open(home / "data"))
            assert plan is not None
            assert plan.level0 == "hbm"
            for command in (
                ["continue", "-q", str(run), str(home / "day-1.parquet")],
                ["export", "-q", str(run)],
            ):
                assert main(command) == 0
        runs.append(run)
    assert "GPU memory" in (runs[1] / "report.html").read_text()
    assert_same_model(*map(last, runs))
    test_continual.assert_same_period(*(periods.of_number(run, 1) for run in runs))
    for name in ("tables.safetensors", "network.safetensors"):
        one, other = (read_tensors(run / "export" / name) for run in runs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    print(json.dumps(True))
