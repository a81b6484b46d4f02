"""Test AUC of low-precision tables against float32 on `frappe_x1`, by the protocol of `quality` but for its batches.

Full Adam with L2 on all rows, and dropout where the model has it. A cache has to hold a batch's rows, and those of the
published 4,096 samples leave it no table that is larger: batches have 1,024, staged when they come. Then the items, 76
of 100 rows, are at home in the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.precision_quality import SHARES
from benchmarks.quality import PUBLISHED, SEEDS, WORK, Setting, one, recipe, told
from stratarec.errors import ConfigError


def runs(name: str, draws: Sequence[int], setting: Setting) -> list[dict[str, Any]]:
    """Runs of a model of float32 rows and of each codec, a line each."""
    rows = []
    for seed, codec in product(draws, ("fp32", *SHARES)):
        found = one(recipe(name, seed, setting, codec), WORK / setting.name(f"{name}-{codec}", seed))
        if codec in SHARES and not found["rows_behind_caches"]:
            raise ConfigError(f"{name} in {codec}: no table has a cache smaller than itself, so that all is float32")
        rows.append(told(f"{name} {codec}", seed, found))
    return rows


def run(quick: bool, models: Sequence[str] = ("finalmlp",), seeds: int = 3) -> dict[str, Any]:
    """Three seeds; `quick` has one, of two epochs."""
    if other := [name for name in models if name not in PUBLISHED]:
        raise ConfigError(f"no published figures of {other[0]!r}; there are {', '.join(PUBLISHED)}")
    draws, setting = SEEDS[: 1 if quick else seeds], Setting(epochs=2 if quick else 100)
    rows = [row for name in models for row in runs(name, draws, setting)]
    metrics = {}
    for name, codec in product(models, SHARES):
        low, full = (mean(row["auc"] for row in rows if row["model"] == f"{name} {kind}") for kind in (codec, "fp32"))
        metrics[f"auc_delta_{codec}_{name}"] = low - full
    config = {"shares": SHARES, "state": "bf16", "seeds": list(draws), "epochs": setting.epochs}
    return {"config": config, "metrics": metrics, "samples": {"rows": rows}}
