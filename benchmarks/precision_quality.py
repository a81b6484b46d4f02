"""Test AUC of low-precision tables compared with float32: whole runs, paired seeds, both roundings.

This benchmark uses the synthetic Criteo shape, `precision_quality_globo` a click log. Nothing is
timed, so other work on the machine does not matter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import stratarec
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

SHARES = {"int8": 0.05, "int4": 0.01}
RECIPES = Path(stratarec.__file__).parent / "recipes"


def quality(
    name: str, data: PrepareConfig, recipe: Path, changes: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the test AUC of float32, and of both codecs with both roundings, one row each."""
    fixed = [*changes, "train.eval_every=0", "train.checkpoint.every_minutes=0"]
    kinds: list[tuple[str, str, list[str]]] = [("fp32", "", [])]
    for kind, share in SHARES.items():
        for rounding in ("stochastic", "nearest"):
            memory = [
                f"memory.precision={kind}",
                f"memory.rounding={rounding}",
                f"memory.cache.fraction={share}",
                "memory.state=bf16",
            ]
            kinds.append((kind, rounding, memory))
    rows = []
    for kind, rounding, memory in kinds:
        aucs, losses, cached = [], [], 0.0
        for seed in seeds:
            with tempfile.TemporaryDirectory() as run:
                loaded = Recipe.load(
                    recipe, [*fixed, *memory, f"train.seed={seed}", f"train.run={run}/run"]
                )
                trainer = Trainer(replace(loaded, data=data), Dataset.open(data.path))
                result = trainer.train()
            aucs.append(result["test"]["auc"])
            losses.append(result["test"]["log_loss"])
            cached = _cached_share(trainer.parts.plan)
        rows.append(
            {
                "data": name,
                "kind": kind,
                "rounding": rounding,
                "auc": mean(aucs),
                "log_loss": mean(losses),
                "auc_by_seed": aucs,
                "cache_share": cached,
            }
        )
        print(f"{name} {kind} {rounding}: AUC {mean(aucs):.5f}", file=sys.stderr, flush=True)
    for row in rows:
        row["auc_delta"] = row["auc"] - rows[0]["auc"]
    return rows


def _cached_share(plan: Plan | None) -> float:
    """Return the number of slots over the number of rows, for tables that are not stored whole in
    level 0.
    """
    if plan is None:
        return 1.0
    tiered = [placed for placed in plan.tables if placed.tier != "level0"]
    return sum(placed.cache_rows for placed in tiered) / max(sum(placed.rows for placed in tiered), 1)


def criteo_shape(folder: Path, samples: int, cap: int) -> PrepareConfig:
    """Prepare a log of the Criteo shape."""
    source = SyntheticConfig(
        samples=samples, scale=1.0, max_rows=cap, session_length=1.0, missing=0.0, seed=7
    )
    vocabulary = VocabularyConfig(min_count=1, tail_buckets=16)
    split = SplitConfig(by="fraction", valid=0.0, test=0.2)
    config = PrepareConfig(source=source, path=str(folder), vocabulary=vocabulary, split=split)
    prepare(config)
    return config


def metric_name(row: dict[str, Any]) -> str:
    """Return the name of a row's metric; stochastic rounding, the default, is omitted."""
    rounding = "" if row["rounding"] == "stochastic" else f"_{row['rounding']}"
    return f"auc_delta_{row['kind']}{rounding}_{row['data']}"


def run(quick: bool) -> dict[str, Any]:
    """Train three seeds each; `quick` has one seed of few samples."""
    seeds = (1,) if quick else (1, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        shape = (200_000, 100_000) if quick else (2_500_000, 1_000_000)
        rows = quality(
            "synthetic", criteo_shape(Path(folder) / "data", *shape), RECIPES / "demo.yaml", [], seeds
        )
    return as_result(rows, seeds)


def as_result(rows: list[dict[str, Any]], seeds: Sequence[int], **config: Any) -> dict[str, Any]:
    """Return the content of a result file from the rows of `quality`."""
    return {
        "config": {"shares": SHARES, "state": "bf16", "parameters": "fp16", "seeds": seeds, **config},
        "metrics": {metric_name(row): row["auc_delta"] for row in rows if row["rounding"]},
        "samples": {"rows": rows},
    }
