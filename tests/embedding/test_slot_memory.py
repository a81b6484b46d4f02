"""Test that rows of level 0 are accessed only through `SlotMemory`, and that nothing depends on
more than its interface guarantees.
"""

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

# Accesses that bypass the interface; each replaces a method.
BYPASSES = {
    "a table reads a row": (
        "import stratarec.embedding.tables.cached as cached\n"
        "plain = cached.CachedTables._distinct\n"
        "def peek(self, *given):\n    self.memory._rows.weights[0]\n    return plain(self, *given)\n"
        "cached.CachedTables._distinct = peek\n"
    ),
    "a kernel gets the slots": (
        "from stratarec.kernels import pooling\n"
        "import stratarec.embedding.tables.base as base\n"
        "def peek(self, it, out):\n    return pooling.pool(self.memory._rows.weights, it.layout, it.bags, "
        "out)\nbase.TableGroup.pool = peek\n"
    ),
}


def run(code: str) -> Any:
    return forked.python(f"import sys; sys.path[:] = {sys.path!r}\nimport slot_memories\n{code}")


def run_json(code: str) -> Any:
    done = run(code)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("workloads", [1, pytest.param(len(WORK), marks=pytest.mark.slow)])
def test_guarded_slots_match_plain_slots_bit_for_bit(workloads: int) -> None:
    hashes = run_json(f"slot_memories.compare({workloads})")
    assert all(each == hashes["plain"] for each in hashes.values()), hashes
    assert len(set(hashes["plain"])) == workloads


@pytest.mark.parametrize("fault", BYPASSES)
def test_an_access_that_bypasses_the_interface_crashes_with_its_stack(fault: str) -> None:
    work = "slot_memories.work('guarded', **slot_memories.WORK[0])"
    done = run(f"import faulthandler; faulthandler.enable()\n{BYPASSES[fault]}{work}")
    assert done.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV), done.stderr[-3000:]
    assert "Segmentation fault" in done.stderr
    assert "in peek" in done.stderr


@pytest.mark.parametrize("names", [WAITING[:1], pytest.param(WAITING, marks=pytest.mark.slow)])
def test_every_omitted_wait_for_a_step_is_detected(names: tuple[str, ...]) -> None:
    assert run_json(f"slot_memories.find({names!r})") == list(names)


def test_ids_changed_after_validation_reach_no_kernel() -> None:
    module = TieredEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("x",))]
    )
    ids = torch.tensor([3, 8])
    handle = module.stage(KeyedJagged(keys=("x",), values=ids, offsets=None, batch_size=2))
    ids[1] = 9
    with refuses(TrainingError, "number 1"):
        module(handle)


def test_a_device_without_slot_memory_is_refused() -> None:
    with refuses(ConfigError, "memory"):
        Level0(torch.device("meta"))


def test_an_unavailable_device_is_refused() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("x",))
    with refuses(ConfigError, "device gpu:zero"):
        TieredEmbeddingBagCollection([table], device="gpu:zero")
