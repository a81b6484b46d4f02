"""Test the network on a real GPU, which shows what a lazy device cannot. Without a GPU these tests
are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import device_jobs
import numpy as np
import pytest
import torch

from recipes import interrupt, last, least_gpu_memory, prepared, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import Interrupted, TrainingError
from stratarec.io.tensors import read_tensors
from stratarec.kernels.runtime.accelerator import device_errors, open_device, transfers_of
from stratarec.planning.machine import card_rates
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.build import new_plan
from stratarec.training.evaluate import score_split
from stratarec.training.run.open_run import open_run
from stratarec.training.steps import graph_step
from stratarec.training.torch_setup import record
from stratarec.training.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the available device. Segments of samples are used however few ids they
    save.
    """
    monkeypatch.setattr(device_jobs.request_module, "_LEAST_SAVED", float("-inf"))
    result = torch.accelerator.current_accelerator(check_available=True)
    if result is None:
        count = sum(item.get_closest_marker("gpu") is not None for item in request.session.items)
        pytest.skip(f"no GPU: {count} tests never ran")
    return result.type


@contextmanager
def synchronization_forbidden(device: str) -> Iterator[None]:
    """Make operations that block the host an error, as far as torch detects them."""
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        # torch warns once per process that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", ["DRAM", "GPU memory"])
@pytest.mark.parametrize("name", device_jobs.CASES)
def test_losses_match_the_cpu_and_a_second_run(name: str, rows: str, gpu: str) -> None:
    case = device_jobs.CASES[name]
    expected, one, other = (
        device_jobs.losses(case, device, 20, device if rows == "GPU memory" else "cpu")
        for device in ("cpu", gpu, gpu)
    )
    assert one == other
    # Two steps show forward and backward; later ones amplify rounding: probably where a gradient is
    # zero but for rounding, an adaptive optimizer makes whole steps of it.
    assert one[:2] == pytest.approx(expected[:2], abs=1e-5)
    assert sum(abs(left - right) for left, right in zip(expected, one, strict=True)) / len(one) < 5e-3


@pytest.mark.parametrize("rows", ["DRAM", "GPU memory"])
@pytest.mark.parametrize("name", device_jobs.CASES)
def test_a_graph_matches_single_kernels_bit_for_bit(
    name: str, rows: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, place = device_jobs.CASES[name], gpu if rows == "GPU memory" else "cpu"
    result = device_jobs.losses(case, gpu, 20, place)
    monkeypatch.setattr(graph_step, "can_be_captured", lambda network: False)
    assert result == device_jobs.losses(case, gpu, 20, place)


@pytest.mark.parametrize("name", device_jobs.CASES)
def test_a_step_waits_only_for_its_results(name: str, gpu: str) -> None:
    # Building a model copies its weights, and the second step captures a graph. Both block the
    # host.
    pipeline = device_jobs.pipeline_of(device_jobs.CASES[name], gpu)
    for step in range(2):
        pipeline.train(step, device_jobs.batch_of(device_jobs.CASES[name], step))
    transfers_of(open_device(gpu)).wait()
    with synchronization_forbidden(gpu):
        for step in range(2, 5):
            pipeline.train(step, device_jobs.batch_of(device_jobs.CASES[name], step))


def test_doctor_verifies_the_device(gpu: str, tmp_path: Path) -> None:
    cache = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "stratarec", "doctor", "--gpu", gpu]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_resumes_on_the_other_device(
    gpu: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The hardware figures of a card are enough to plan rows in its memory.
    figures = {name: value for name, value in asdict(card_rates("h100")).items() if type(value) is float}
    record(open_device(gpu), figures)

    def trained(name: str, device: str, at: int = 0, *, resume: bool = False) -> Path:
        recipe = Recipe.from_dict(tiny(home, run=str(tmp_path / name), device=device, max_steps=12))
        trainer = Trainer(recipe, Dataset.open(recipe.data.path))
        if at:
            interrupt(trainer, at)
        with suppress(Interrupted):
            trainer.train(resume=resume)
        return tmp_path / name

    expected = read_tensors(last(trained("cpu", "cpu")) / "network.safetensors")
    trained("both", gpu, 4)
    trained("both", "cpu", 8, resume=True)
    tensors = read_tensors(last(trained("both", gpu, resume=True)) / "network.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(tensors[name], weight, rtol=1e-4, atol=1e-4)


FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "over DRAM": {"memory": {"precision": "fp32"}},
    "hot batches over int8": {
        "memory": {"precision": "int8"},
        "hot": {"budget": "8KiB", "batches": "proportional"},
    },
    "over a log": {"memory": {"precision": "int4", "dram": "1MiB", "block": {"path": "log"}}},
    "over a mapped file": {"memory": {"precision": "fp16", "dram": "1MiB", "mapped": {"path": "mapped"}}},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_rows_in_gpu_memory(
    form: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    device = open_device(gpu)
    record(
        device, {name: value for name, value in asdict(card_rates("h100")).items() if type(value) is float}
    )

    def recipe(name: str, on: str) -> Recipe:
        content = tiny(tmp_path, run=str(tmp_path / name), device=on, max_steps=30, eval_every=10)
        content["model"] |= {"embedding_dim": 16}
        return Recipe.from_dict({**content, **(FORMS[form] if on != "cpu" else {})})

    def trained(recipe: Recipe, *, stop: int = 0, resume: bool = False) -> Path:
        trainer = Trainer(recipe, Dataset.open(recipe.data.path))
        if stop:
            interrupt(trainer, stop)
        with suppress(Interrupted):
            trainer.train(resume=resume)
        return Path(recipe.run)

    made, plain = recipe("gpu", gpu), recipe("cpu", "cpu")
    dataset = prepared(made.data)
    if form != "whole":
        made = least_gpu_memory(made, dataset, device)
    plan = new_plan(made, dataset, device=device)
    assert plan is not None
    assert plan.level0 == "hbm"
    assert any(placed.tier != "level0" for placed in plan.tables) == (form != "whole")
    both = replace(made, train=replace(made.train, run=str(tmp_path / "both")))
    runs = [trained(plain), trained(made)]
    trained(both, stop=12)
    runs.append(trained(both, resume=True))
    logits = []
    for run, opened_on in product(runs, ("cpu", gpu)):
        with open_run(run, device=opened_on) as opened:
            logits.append(
                score_split(
                    opened.model, opened.dataset, "test", precision="float32", progress=SilentProgress()
                ).logit
            )
    # An interrupted run has the same bits. Codecs round rows, but the run in DRAM does not.
    np.testing.assert_array_equal(logits[2], logits[4])
    np.testing.assert_array_equal(logits[3], logits[5])
    for one, other in (logits[:2], logits[2:4]):
        np.testing.assert_allclose(one, other, atol=1e-4)
    rounded = any(placed.codec.kind != "fp32" for placed in plan.tables)
    assert np.abs(logits[0] - logits[2]).mean() < (0.3 if rounded else 0.01)


def test_too_large_a_batch_is_one_line(gpu: str) -> None:
    expected = r"too little memory for batches of 8 samples; batches of 4 fit: set train.batch_size to 4"
    with pytest.raises(TrainingError, match=expected), device_errors(torch.device(gpu), 8, lambda: 4):
        torch.empty(1 << 50, device=gpu)


def test_the_notebook_with_a_custom_model_runs(gpu: str) -> None:
    cells = json.loads((Path(__file__).parents[2] / "examples" / "own_model.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), names)
    assert names["device"] == gpu
    assert "hbm" in names["model"].embeddings.engine.bytes_by_memory()
