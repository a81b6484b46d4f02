"""Test AUC of low-precision tables compared with float32 on the Globo click log: paired seeds, both
roundings.

The log has 34 thousand distinct values in total. Small batches without lookahead need the smallest
cache.
"""

from __future__ import annotations

from typing import Any

from benchmarks.precision_quality import RECIPES, as_result, quality
from benchmarks.sessions import prepared, recipe

STEPS, QUICK_STEPS = 4000, 50


def run(quick: bool) -> dict[str, Any]:
    """Train three seeds each; `quick` has one seed of few steps."""
    seeds = (1,) if quick else (1, 2, 3)
    changes = [
        "train.batch_size=1024",
        "memory.lookahead=0",
        f"train.max_steps={QUICK_STEPS if quick else STEPS}",
        f"train.dense.schedule.total_steps={STEPS}",
        f"train.embedding.schedule.total_steps={STEPS}",
    ]
    prepared("globo", "auto")
    rows = quality("globo", recipe("globo", "auto").data, RECIPES / "globo.yaml", changes, seeds)
    return as_result(rows, seeds, globo=changes)
