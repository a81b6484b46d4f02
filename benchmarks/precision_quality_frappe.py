"""Test AUC of low-precision tables compared with float32 on `frappe_x1`, by the protocol of
`quality`.

Rows use full Adam with L2, and models keep their dropout. Batches have 1,024 samples instead of the
published 4,096, and no lookahead: a cache must hold the rows of a batch, and larger batches would
need a cache for the whole table. The items, 76 of 100 rows, are then stored in the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.precision_quality import SHARES
from benchmarks.quality import PUBLISHED, SEEDS, WORK, Setting, one, recipe, report_run
from stratarec.errors import ConfigError


def runs(name: str, draws: Sequence[int], setting: Setting) -> list[dict[str, Any]]:
    """Train a model with float32 rows and with each codec; return a row for each run."""
    rows = []
    for seed, codec in product(draws, ("fp32", *SHARES)):
        result = one(recipe(name, seed, setting, codec), WORK / setting.name(f"{name}-{codec}", seed))
        if codec in SHARES and not result["rows_behind_caches"]:
            raise ConfigError(
                f"{name} in {codec}: every table fits its cache, so all rows would be float32"
            )
        rows.append(report_run(f"{name} {codec}", seed, result))
    return rows


def run(quick: bool, models: Sequence[str] = ("finalmlp",), seeds: int = 3) -> dict[str, Any]:
    """Train three seeds; `quick` has one seed of two epochs."""
    if other := [name for name in models if name not in PUBLISHED]:
        raise ConfigError(f"--models: unknown model {other[0]!r}; choose from {', '.join(PUBLISHED)}")
    draws, setting = SEEDS[: 1 if quick else seeds], Setting(epochs=2 if quick else 100)
    rows = [row for name in models for row in runs(name, draws, setting)]
    metrics = {}
    for name, codec in product(models, SHARES):
        low, full = (
            mean(row["auc"] for row in rows if row["model"] == f"{name} {kind}") for kind in (codec, "fp32")
        )
        metrics[f"auc_delta_{codec}_{name}"] = low - full
    config = {"shares": SHARES, "state": "bf16", "seeds": list(draws), "epochs": setting.epochs}
    return {"config": config, "metrics": metrics, "samples": {"rows": rows}}
