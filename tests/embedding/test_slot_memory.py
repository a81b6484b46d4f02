"""The seam of level 0: rows are reached through `SlotMemory` alone, and nothing needs more of it than it says."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import forked
import pytest
import torch
from slot_memories import WAITING, WORK

from errors import refuses
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.slots import Level0
from stratarec.errors import ConfigError, TrainingError

# What somebody might write who has the slots' arrays: each stands in the place of a method.
PAST_THE_SEAM = {
    "a table reads a row": (
        "import stratarec.embedding.tables.cached as cached\n"
        "plain = cached.CachedTables._distinct\n"
        "def peek(self, *given):\n    self.memory._rows.weights[0]\n    return plain(self, *given)\n"
        "cached.CachedTables._distinct = peek\n"
    ),
    "a kernel gets the slots": (
        "from stratarec.kernels import pooling\n"
        "import stratarec.embedding.tables.base as base\n"
        "def peek(self, it, out):\n    return pooling.pool(self.memory._rows.weights, it.layout, it.bags, out)\n"
        "base.TableGroup.pool = peek\n"
    ),
}


def run(code: str) -> Any:
    return forked.python(f"import sys; sys.path[:] = {sys.path!r}\nimport slot_memories\n{code}")


def found(code: str) -> Any:
    done = run(code)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("workloads", [1, pytest.param(len(WORK), marks=pytest.mark.slow)])
def test_slots_that_check_the_seam_give_the_bits_of_plain_ones(workloads: int) -> None:
    hashes = found(f"slot_memories.compare({workloads})")
    assert all(each == hashes["plain"] for each in hashes.values()), hashes
    assert len(set(hashes["plain"])) == workloads


@pytest.mark.parametrize("fault", PAST_THE_SEAM)
def test_an_access_past_the_seam_ends_with_its_stack(fault: str) -> None:
    work = "slot_memories.work('guarded', **slot_memories.WORK[0])"
    done = run(f"import faulthandler; faulthandler.enable()\n{PAST_THE_SEAM[fault]}{work}")
    assert done.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV), done.stderr[-3000:]
    assert "Segmentation fault" in done.stderr
    assert "in peek" in done.stderr


@pytest.mark.parametrize("names", [WAITING[:1], pytest.param(WAITING, marks=pytest.mark.slow)])
def test_each_wait_for_a_step_that_is_left_out_shows(names: tuple[str, ...]) -> None:
    assert found(f"slot_memories.find({names!r})") == list(names)


def test_ids_that_change_after_they_were_checked_are_read_by_no_kernel() -> None:
    module = TieredEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("x",))]
    )
    ids = torch.tensor([3, 8])
    prepared = module.prepare(KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=2))
    ids[1] = 9
    with refuses(TrainingError, "number 1"):
        module(prepared)


def test_rows_of_a_device_that_nobody_wrote_slots_for_are_refused() -> None:
    with refuses(ConfigError, "memory"):
        Level0(torch.device("meta"))


def test_a_device_that_is_not_available_is_refused() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("x",))
    with refuses(ConfigError, "device gpu:zero"):
        TieredEmbeddingBagCollection([table], device="gpu:zero")
