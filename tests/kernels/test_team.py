"""Teams of threads: that the installed Numba can run them, and what becomes of kernels where one cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stratarec.kernels.runtime import helpers, openmp, outline, team

# What another version of Numba may be like, done to the installed one before the project is loaded.
OTHERS = {
    "a method that is gone": "del Dispatcher.get_compile_result",
    "a method of another signature": "Dispatcher.get_compile_result = lambda self, signature, target: None",
    "a method with another result": "Dispatcher.get_compile_result = lambda self, signature: (self, signature)",
    "an option that is gone": "del next(kind for kind in CPUTargetOptions.__mro__ if '_nrt' in vars(kind))._nrt",
}
SCRIPT = """
import hashlib, json, sys, warnings
from numba.core.cpu import CPUTargetOptions
from numba.core.dispatcher import Dispatcher
import torch
exec(sys.argv[1])
torch.set_num_threads(2)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from stratarec.kernels.runtime import team

outputs = []
if steps := int(sys.argv[2]):
    from stratarec.embedding import EmbeddingBagConfig, TieredEmbeddingBagCollection
    from stratarec.batch.jagged import JaggedTensor, KeyedJagged

    table = EmbeddingBagConfig(name="a", num_embeddings=5000, embedding_dim=16, feature_names=("f",))
    tables = TieredEmbeddingBagCollection([table], seed=3)
    draws = torch.Generator().manual_seed(1)
for _ in range(steps):
    bag = JaggedTensor(values=torch.randint(5000, (6000,), generator=draws), offsets=torch.arange(0, 6001, 3))
    pooled = tables(KeyedJagged.from_features({"f": bag})).pooled
    pooled.square().sum().backward()
    outputs.append(pooled.detach().numpy().tobytes())
found = {"defect": team.DEFECT, "warnings": [str(each.message) for each in caught]}
print(json.dumps(found | {"bits": hashlib.sha256(b"".join(outputs)).hexdigest()}))
"""


def train(steps: int, change: str = "pass", cache: Path | None = None) -> dict[str, Any]:
    """Train a table on two threads in a process of its own, after `change` was done to Numba."""
    kernels = {"NUMBA_CACHE_DIR": str(cache)} if cache else {}
    command = [sys.executable, "-c", SCRIPT, change, str(steps)]
    done = subprocess.run(command, env=os.environ | kernels, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_member_of_a_team_runs_once_and_takes_a_number_of_its_own() -> None:
    assert team.DEFECT == ""
    assert team.run_team is outline.run_team
    assert outline.members(team.team_of(1)) == [1]
    if sys.platform == "linux":
        assert openmp.launcher(), "torch for Linux brings GNU's OpenMP"
        borrowed = team.Team(openmp.launcher(), 2, helpers.HELPERS.board)
        assert sorted(outline.members(borrowed)) == [1, 2]


@pytest.mark.slow
def test_one_thread_does_what_a_team_does(tmp_path: Path) -> None:
    """Under a Numba that cannot run teams; kernels are compiled again, because cached ones are for a team."""
    alone, together = train(3, OTHERS["a method that is gone"], tmp_path), train(3)
    assert alone["defect"]
    assert together["defect"] == ""
    assert alone["bits"] == together["bits"]
