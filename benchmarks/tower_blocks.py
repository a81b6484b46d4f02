"""Whether the learned towers are the planted blocks of made-up logs, and what that is worth in AUC.

Logs of 200,000 samples and 26 features, whose clicks depend on products inside four blocks, differ by their seed. On
the first log, DLRMs with a tower for each block at compression 4 are tested: with learned towers, and with random ones
within the same bounds. Nothing is timed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.tower_quality import OF_RATIOS, PLANTED_BLOCKS, auc, changed, planted, say
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.prepare import prepare
from stratarec.planning.towers import TowerPlan, assign, tightest
from stratarec.recipe import Recipe
from stratarec.training.tower_partition import TowerRequest, bounds_of, items_of, make_towers

SAMPLES, LOGS, DRAWS = 200_000, 10, 3


def learned_towers(base: Recipe, dataset: Dataset) -> TowerPlan:
    """As `plan --towers` makes them."""
    return make_towers(changed(base, dataset, "dlrm", 0), dataset, TowerRequest(towers=PLANTED_BLOCKS))


def random_towers(base: Recipe, dataset: Dataset, seed: int) -> tuple[tuple[str, ...], ...]:
    """Dealt by chance within the same bounds; what these do not allow costs one an item, so that it is seldom."""
    recipe = changed(base, dataset, "dlrm", seed)
    items, bounds = items_of(recipe, dataset), bounds_of(recipe, TowerRequest(towers=PLANTED_BLOCKS))
    costs = np.ones((len(items), PLANTED_BLOCKS))
    costs[np.random.default_rng(seed).permutation(len(items)), np.arange(len(items)) % PLANTED_BLOCKS] = 0
    labels = tightest(items, bounds, lambda limits: assign(costs, limits))
    return tuple(
        tuple(name for item, label in zip(items, labels, strict=True) if label == tower for name in item.features)
        for tower in range(PLANTED_BLOCKS)
    )


def one_log(folder: Path, seed: int, draws: int) -> dict[str, Any]:
    """Plan the towers of one log; with `draws`, also train with them and with as many random ones."""
    base = planted(folder / f"log{seed}", SAMPLES, seed)
    dataset = prepare(base.data)
    plan = learned_towers(base, dataset)
    blocks = {frozenset(f"C{feature + 1}" for feature in block) for block in base.data.source.feature_blocks()}  # type: ignore[union-attr]
    row: dict[str, Any] = {
        "seed": seed, "blocks_found": sum(frozenset(tower) in blocks for tower in plan.plan) / len(blocks),
        "structure": plan.structure, "agreement": plan.agreement, "measured_samples": plan.samples, "plan": plan.plan,
        "learned": [], "random": [],
    }  # fmt: skip
    for draw in range(draws):
        for key, towers in (("learned", plan.plan), ("random", random_towers(base, dataset, draw))):
            row[key].append(auc(changed(base, dataset, "dlrm", draw, towers, OF_RATIOS), dataset))
    say(f"log {seed}: {row}")
    return row


def run(quick: bool) -> dict[str, Any]:
    """Ten logs and three draws; `quick` has one of each."""
    with tempfile.TemporaryDirectory() as folder:
        draws = 1 if quick else DRAWS
        rows = [one_log(Path(folder), seed, draws if seed == 1 else 0) for seed in range(1, 2 if quick else LOGS + 1)]
    gains = [learned - random for learned, random in zip(rows[0]["learned"], rows[0]["random"], strict=True)]
    return {
        "config": {
            "samples": SAMPLES, "planted_blocks": PLANTED_BLOCKS, "compression": OF_RATIOS, "draws": draws,
            "targets": {"planted_blocks_found": 0.9, "auc_learned_minus_random": 0.002},
        },
        "metrics": {
            "planted_blocks_found": mean(row["blocks_found"] for row in rows),
            "logs_with_all_blocks": mean(float(row["blocks_found"] == 1) for row in rows),
            "auc_learned_minus_random": mean(gains),
            "auc_learned_minus_random_error": stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0,
        },
        "samples": {"rows": rows},
    }  # fmt: skip
