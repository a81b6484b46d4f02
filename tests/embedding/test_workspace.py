"""What a step takes beside its rows, counted against the process."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.planning.bytes import output_bytes, workspace_bytes

MEASURE = """
import json
import torch
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.batch.jagged import KeyedJagged

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

torch.set_num_threads(1)
module = TieredEmbeddingBagCollection(
    [EmbeddingBagConfig(name="t", num_embeddings=2 * BATCH, embedding_dim=16, feature_names=("x", "y"))]
)
def step(ids):
    module(KeyedJagged(keys=("x", "y"), values=ids, offsets=None, batch_size=len(ids) // 2)).pooled.sum().backward()

step(torch.arange(4, dtype=torch.int32))
ids = torch.randperm(2 * BATCH, dtype=torch.int32)
def counted():
    parts = module.engine.bytes_by_part()
    return parts["workspace"] + parts["outputs"]

before, small = memory("VmRSS:"), counted()
step(ids)
print(json.dumps([memory("VmHWM:") - before, counted() - small, module.engine.bytes_by_part()]))
"""
BATCH = 390_000


@pytest.mark.slow
def test_the_workspace_of_a_step_is_what_the_process_grows_by() -> None:
    code = MEASURE.replace("BATCH", str(BATCH))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, counted, parts = json.loads(done.stdout)
    # Capacities are rounded up, and pages that nothing was written to are not there.
    assert 0.85 * counted < grown < 1.05 * counted
    # The plan's figure has room for batches larger than the mean.
    assert workspace_bytes([2 * BATCH / 1.25], 16, 1) == parts["workspace"] > 40 << 20
    assert output_bytes(32 * BATCH) == parts["outputs"] > 90 << 20


def test_groups_of_tables_share_one_workspace_whatever_the_type_of_their_ids() -> None:
    """Groups are updated one after another; ids of one are rows, int64 here, those of the other slots, int32."""

    def collection(names: str) -> TieredEmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=3000, embedding_dim=4 << place, feature_names=(f"{name}1", f"{name}2")
            )
            for place, name in enumerate("abc")
            if name in names
        ]
        tiers = TierConfig(tables={name: TableTier(cache_rows=2048) for name in names if name == "b"})
        return TieredEmbeddingBagCollection(tables, tiers=tiers)

    def train(names: str) -> tuple[dict[str, torch.Tensor], int]:
        module, draws = collection(names), np.random.default_rng(3)
        for size in (50, 400, 300):
            ids = {name: torch.from_numpy(draws.integers(0, 3000, 2 * size)) for name in "abc"}
            features = KeyedJagged(
                keys=tuple(f"{name}{place}" for name in names for place in "12"),
                values=torch.cat([ids[name] for name in names]),
                offsets=None,
                batch_size=size,
            )
            module(features).pooled.square().sum().backward()
        kept = {name: module.table(name)["weight"].clone() for name in names}
        return kept, module.engine.level0.scratch.nbytes

    together, shared = train("abc")
    alone = {name: train(name) for name in "abc"}
    for name, (rows, _) in alone.items():
        assert torch.equal(together[name], rows[name])
    assert shared == max(size for _, size in alone.values())
