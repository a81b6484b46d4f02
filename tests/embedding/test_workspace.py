"""Compare the engine's count of a step's workspace with the memory of the process and with the
plan.
"""

from __future__ import annotations

import json

import pytest
import torch
from forked import python

from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.planning.bytes import output_bytes, workspace_bytes

BATCH = 390_000
MEASURE = f"""
import json, sys, torch
from pathlib import Path
from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
from stratarec.batch.jagged import KeyedJagged

def memory(name):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith(name))

def step(ids):
    module(KeyedJagged(keys=("x", "y"), values=ids, offsets=None, batch_size=len(ids) // 2)).pooled.sum().backward()

torch.set_num_threads(1)
table = EmbeddingBagConfig(name="t", num_embeddings={2 * BATCH}, embedding_dim=16, feature_names=("x", "y"))
module = TieredEmbeddingBagCollection([table])
step(torch.arange(4, dtype=torch.int32))
ids = torch.randperm({2 * BATCH}, dtype=torch.int32)
before, small = memory("VmRSS:"), module.engine.bytes_by_part()
step(ids)
print(json.dumps([memory("VmHWM:") - before, small, module.engine.bytes_by_part()]))
"""


@pytest.mark.slow
def test_the_workspace_matches_the_growth_of_the_process_and_the_plan() -> None:
    done = python(MEASURE)
    assert done.returncode == 0, done.stderr
    growth, small, parts = json.loads(done.stdout)
    # Capacities are rounded up, and untouched pages are not resident.
    counted = sum(parts[name] - small[name] for name in ("workspace", "outputs"))
    assert 0.85 * counted < growth < 1.05 * counted
    # The plan allows for batches larger than the mean.
    assert workspace_bytes([2 * BATCH / 1.25], 16, 1) == parts["workspace"] > 40 << 20
    assert output_bytes(32 * BATCH) == parts["outputs"] > 90 << 20


def test_table_groups_share_one_workspace_for_int32_and_int64_ids() -> None:
    """Resident tables use int64 row ids and cached tables use int32 slots."""

    def train(names: str) -> tuple[dict[str, torch.Tensor], int]:
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=3000,
                embedding_dim=4 << "abc".index(name),
                feature_names=(name, name * 2),
            )
            for name in names
        ]
        tiers = TierConfig(tables={name: TableTier(cache_rows=2048) for name in names if name == "b"})
        module, draws = TieredEmbeddingBagCollection(tables, tiers=tiers), torch.Generator().manual_seed(3)
        for size in (50, 400, 300):
            ids = {name: torch.randint(3000, (2 * size,), generator=draws) for name in "abc"}
            keys = tuple(key for name in names for key in (name, name * 2))
            values = torch.cat([ids[name] for name in names])
            module(
                KeyedJagged(keys=keys, values=values, offsets=None, batch_size=size)
            ).pooled.square().sum().backward()
        return {
            name: module.table(name)["weight"].clone() for name in names
        }, module.engine.level0.scratch.nbytes

    together, shared = train("abc")
    alone = {name: train(name) for name in "abc"}
    assert all(torch.equal(together[name], rows[name]) for name, (rows, _) in alone.items())
    assert shared == max(size for _, size in alone.values())
