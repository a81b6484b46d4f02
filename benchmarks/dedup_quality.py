"""Test AUC of training on deduplicated batches, shuffled in runs, compared with samples shuffled
one by one.

Each run is one pass over the log with the Globo recipe; seeds are paired. Nothing is timed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.sessions import pair, recipe, with_run
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dedup_groups import GroupMode
from stratarec.training.trainer import Trainer


def test_auc(dataset: Dataset, seed: int, steps: int) -> float:
    """Return the AUC on the last day after one pass, or after `steps` steps if not 0."""
    groups: GroupMode = "auto" if dataset.deduplicated else "none"
    fixed = [
        f"train.seed={seed}",
        f"train.max_steps={steps}",
        "train.eval_every=0",
        "train.checkpoint.every_minutes=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        seeded = with_run(recipe("globo", groups, *fixed), Path(folder) / "run")
        auc: float = Trainer(seeded, dataset).train()["test"]["auc"]
    print(f"{groups}, seed {seed}: AUC {auc:.5f}", file=sys.stderr, flush=True)
    return auc


def run(quick: bool) -> dict[str, Any]:
    """Train with six seeds; `quick` has one seed of 20 steps."""
    seeds, steps = ((1,), 20) if quick else (tuple(range(1, 7)), 0)
    grouped, plain = pair("globo")
    rows = [
        {
            "seed": seed,
            "auc_deduplicated": test_auc(grouped, seed, steps),
            "auc_shuffled": test_auc(plain, seed, steps),
        }
        for seed in seeds
    ]
    deltas = [row["auc_deduplicated"] - row["auc_shuffled"] for row in rows]
    return {
        "config": {"recipe": "globo", "history_length": 50, "negatives": 4},
        "metrics": {"auc_delta_dedup": mean(deltas), "auc_delta_dedup_first_three_seeds": mean(deltas[:3])},
        "samples": {"rows": rows},
    }
