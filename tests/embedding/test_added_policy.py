"""Test an eviction policy of another package: it is compiled into the cache, predicted by the
planner, and trains.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from added import train_with
from errors import refuses
from stratarec.embedding import engine
from stratarec.errors import ConfigError
from stratarec.kernels.policies import POLICIES, Policy

REGISTERS = """
from stratarec.kernels.policies import POLICIES, Policy

def score(row, stamp):
    return stamp

POLICIES.register("mru", Policy(about="the row that was used last", score=score, keeps="first"))
"""
CHECKS = """
from stratarec.kernels.cache import cpu
from stratarec.recipe import _adapter

assert not cpu.stage.stats.cache_path
other = recipe.with_overrides(["memory.cache.policy=lru", "train.run=" + sys.argv[1] + "/lru"])
results = result, Trainer(other, prepared(other.data), SilentProgress()).train()
print(json.dumps([[sum(each["missed"] for each in one["caches"]), one["test"]["log_loss"]] for one in results]))
assert "mru" in json.dumps(_adapter().json_schema())
"""
CHANGES = {
    "data.source.scale": 0.05,
    "data.vocabulary": {"min_count": 1, "tail_buckets": 4},
    "model.embedding_dim": 16,
    "train.batch_size": 32,
    "train.max_steps": 60,
    "memory": {
        "precision": "int8",
        "lookahead": 0,
        "cache": {"policy": "mru", "fraction": 0.05, "ways": 8},
    },
}


@pytest.mark.slow
def test_a_policy_of_a_package_is_compiled_and_evicts_by_its_score(tmp_path: Path) -> None:
    lines = train_with(REGISTERS, tmp_path, json.dumps(CHANGES), CHECKS).splitlines()
    (missed, loss), (lru_missed, lru_loss) = json.loads(lines[-1])
    assert abs(missed - lru_missed) > 0.05 * lru_missed > 0
    assert loss == pytest.approx(lru_loss, abs=0.02)


def test_a_policy_is_refused_once_kernels_contain_the_others() -> None:
    assert engine
    with refuses(ConfigError, "late eviction policy kernels"):
        POLICIES.register("late", Policy(about="", score=None, keeps="recent"))
