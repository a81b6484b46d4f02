"""Test a step on a device as one function: bits, bad losses, and whether a CUDA graph can repeat
it.

The graphs themselves need a GPU (`test_gpu.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import device_jobs
import forked
import pytest

from errors import missing
from stratarec.training.steps.graph_step import can_be_captured
from stratarec.training.steps.state import TrainingState
from stratarec.training.steps.step import Losses, StepResult

if sys.platform != "linux":
    pytest.skip("there is no Triton for this system", allow_module_level=True)

CAPTURED = {"dlrm", "dcnv2", "deepfm", "din"}


def run_jobs(*calls: str) -> list[Any]:
    """Run jobs in one child process and return the JSON that each prints."""
    lines = "\n".join(f"jobs.{call}" for call in calls)
    done = forked.python(f"import sys; sys.path[:] = {sys.path!r}\nimport graph_jobs as jobs\n{lines}")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_step_matches_the_cpu_and_a_graph_can_repeat_it(tmp_path: Path) -> None:
    names = (
        "adam",
        "caches over int8",
        "clipped, averaged, weighted",
        "target attention",
        "transformer",
        "segments",
    )
    faults = ("", "a number of the host", "the host waits", "another buffer for each batch")
    repeated = ("caches over int8", "target attention")
    wrong, (plain, *faulty), histories, transformer, (first, error, same), graphs, bad_input = run_jobs(
        f"compare({names!r}, 3)",
        f"captured('adam', {faults!r})",
        "captured('target attention', ('', 'lists of the host'))",
        "captured('transformer', ('',))",
        "bad_loss()",
        f"repeated({repeated!r})",
        f"bad_input({str(tmp_path)!r})",
    )
    # Batches of 12 samples and of 7; the first batch of a form has no graph.
    for bits, count, (said,) in graphs:
        assert (bits, count) == ([True, True], 2)
        assert "too little memory for a graph" in said
    assert wrong == []
    (outside, full, interrupted, blocked), unchanged, *more_sizes_than_graphs = bad_input
    assert not missing("feature 'a' id 10000 outside 89", outside)
    assert full == "StorageError: the disk is full"
    assert interrupted.startswith("KeyboardInterrupt")
    assert not missing("TrainingError incomplete checkpoint", blocked)
    assert unchanged
    same_losses, graphs_of_sizes, (refused,) = more_sizes_than_graphs
    assert (same_losses, graphs_of_sizes) == (True, 1)
    assert refused.endswith("one by one: operation not permitted when stream is capturing")
    for operations, launches, differing, waiting in (plain, histories[0], transformer[0]):
        assert operations > 80
        assert launches >= 2
        assert differing == waiting == 0
    faulty += histories[1:]
    assert len(faulty) == len(faults)
    assert all(differing or waiting for _, _, differing, waiting in faulty)
    assert 0 < first < 2
    assert "nan at step 1;" in error
    assert same


@pytest.mark.slow
def test_steps_of_every_kind_match_the_cpu() -> None:
    names = (
        "sgd",
        "hot rows",
        "rows clipped",
        "adagrad",
        "all rows change",
        "transformer, own histories",
        "rows of histories clipped",
    )
    results = run_jobs(
        f"compare({names!r}, 6)",
        *(
            f"captured({name!r}, ('',))"
            for name in (
                "sgd",
                "hot rows",
                "caches over int8",
                "clipped, averaged, weighted",
                "transformer, own histories",
            )
        ),
    )
    assert results[0] == []
    assert all(differing == waiting == 0 for ((_, _, differing, waiting),) in results[1:])


@pytest.mark.parametrize("name", [*device_jobs.KINDS, "towers", "dropout and normalization"])
def test_only_networks_with_the_same_kernels_each_step_are_captured(name: str) -> None:
    model, _ = device_jobs.built(device_jobs.CASES[name])
    assert can_be_captured(model.network) == (name in CAPTURED)
    model.embeddings.close()


def test_losses_of_a_device_are_read_one_step_later() -> None:
    read = list[int]()

    def result(step: int) -> StepResult:
        return StepResult(lambda: read.append(step) or float(step), 10)

    state = TrainingState()
    losses = Losses(state)
    for step in range(3):
        losses.count(result(step))
        assert state.step == step + 1
        assert read == list(range(step))
    losses.read()
    assert read == [0, 1, 2]
    other = TrainingState()
    known = Losses(other)
    for step in range(3):
        known.count(StepResult(float(step), 10))
        assert other.step == step + 1
    assert (other.smoothed_loss, other.trained_samples) == (state.smoothed_loss, state.trained_samples)
