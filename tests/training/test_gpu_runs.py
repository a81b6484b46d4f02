"""Test that runs with rows in GPU memory match runs in DRAM bit for bit, resume and open on either,
and refuse invalid recipes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch

from errors import refuses
from recipes import prepared, tiny
from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.runtime.accelerator import CPU, Driver, device_errors, require_capability
from stratarec.planning.machine import card_rates
from stratarec.recipe import Recipe
from stratarec.training import gpu_memory
from stratarec.training.gpu_memory import rows_memory, step_bytes
from stratarec.training.trainer import Trainer


def run(job: str, root: Path) -> str:
    """Run a job in a child process, and return the last line that it prints."""
    cache = {"XDG_CACHE_HOME": str(root / "cache")}
    # This must come first, because Triton's interpreter is selected when Triton is imported.
    code = f"import sys; sys.path[:] = {sys.path!r}\nimport triton_interpreter, gpu_runs\ngpu_runs.{job}({str(root)!r})"
    done = forked.python(code, environment=cache)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.rpartition("\n")[0].rpartition("\n")[2]


def test_a_run_trains_resumes_and_opens_with_rows_on_either_device(tmp_path: Path) -> None:
    scored, (on_cpu, on_gpu) = json.loads(run("either_device", tmp_path))
    assert scored > 100
    assert "at step 2;" in on_cpu
    assert on_gpu == on_cpu


@pytest.mark.slow
def test_a_run_continues_and_is_exported_with_the_bits_of_dram(tmp_path: Path) -> None:
    run("continued", tmp_path)


@pytest.mark.slow
def test_hot_batches_over_int8_homes_match_dram_bit_for_bit(tmp_path: Path) -> None:
    run("hot_and_rounded", tmp_path)


@pytest.mark.slow
def test_doctor_reads_the_same_rows(tmp_path: Path) -> None:
    run("doctor", tmp_path)


def test_the_memory_of_a_step_grows_with_batch_and_network(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(tiny(tmp_path))
    dataset = prepared(recipe.data)
    sizes = [
        step_bytes(recipe.with_fields(fields), dataset)
        for fields in ({}, {"train.batch_size": 1 << 16}, {"model.top_mlp": [512, 256]})
    ]
    assert sizes[0] < sizes[1]
    assert sizes[0] < sizes[2]
    # A sample has at least 26 vectors of 4 floats, their gradients, and 16 hidden floats.
    # Evaluations score 8,192 samples.
    assert sizes[1] - sizes[0] > ((1 << 16) - 8192) * 4 * (2 * 26 * 4 + 16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"memory.hbm": "79.9GB"}, "memory.hbm 79900000000 74.5 train.batch_size 128"),
        ({"train.batch_size": 100_000_000}, "train.batch_size 100,000,000 74.5"),
    ],
)
def test_an_error_for_too_little_gpu_memory_says_what_fits(
    fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    recipe = Recipe.from_dict(tiny(tmp_path)).with_fields(fields)
    with refuses(ConfigError, words):
        rows_memory(recipe, prepared(recipe.data), card_rates("h100"))


def test_memory_that_another_process_uses_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.from_dict(tiny(tmp_path))
    dataset, rates = prepared(recipe.data), replace(card_rates("h100"), device="cuda:1")
    monkeypatch.setattr(gpu_memory, "device_memory", lambda device: (20 << 30, 80 << 30))
    needed = step_bytes(recipe, dataset)
    assert rows_memory(recipe, dataset, rates).hbm == (20 << 30) - needed
    with refuses(ConfigError, "memory.hbm cuda:1 20.0 60.0 80.0 use"):
        rows_memory(recipe.with_fields({"memory.hbm": "30GiB"}), dataset, rates)
    monkeypatch.setattr(gpu_memory, "device_memory", lambda device: (needed, 80 << 30))
    with refuses(ConfigError, "cuda:1 80.0 programs train.batch_size train.device"):
        rows_memory(recipe, dataset, rates)


def test_a_budget_of_gpu_memory_needs_a_gpu(tmp_path: Path) -> None:
    recipe = Recipe.from_dict({**tiny(tmp_path), "memory": {"hbm": "1GiB"}})
    with refuses(ConfigError, "memory.hbm train.device cpu cuda"):
        Trainer(recipe, prepared(recipe.data))


def test_an_old_gpu_is_refused() -> None:
    require_capability(torch.device("cuda"), (8, 0))
    with refuses(ConfigError, "cuda:1 7.5 8.0 memory.hbm"):
        require_capability(torch.device("cuda:1"), (7, 5))


def test_each_use_of_a_stream_has_its_own_context() -> None:
    """One object keeps the previous stream of one thread only."""
    driver, stream = Driver(torch.device("cuda")), torch.Stream(3, 1, 1)
    contexts = [driver.on(stream) for _ in range(2)]
    assert contexts == [stream, stream]
    assert len({*map(id, contexts), id(stream)}) == 3


def test_refused_pinned_memory_is_replaced() -> None:
    driver = Driver(torch.device("cuda"))  # a CPU build of torch refuses it
    assert driver.pinned(4096).numel() == 4096
    assert "4,096" in driver.refusal
    assert "ulimit -l" in driver.refusal


def test_a_failed_launch_keeps_the_last_checkpoint() -> None:
    with refuses(TrainingError, "cpu checkpoint --resume"), device_errors(CPU, 8, lambda: 0):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
