"""Predictions of `stratarec plan` compared with measured training, for twelve recipes.

The recipes differ in models, batches, widths, budgets, homes, codecs and repeating sessions; the
planner measures its constants on none of these shapes. Each recipe is planned, then trained by
`Trainer` as by `stratarec train`. The results list predicted and measured seconds of a step and of
its parts, bytes of each memory, and cache misses. Where the plan predicts an upper bound, fewer
bytes are no error.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.models.base import build_tables
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import measure_tiers
from stratarec.planning.placement import make_hot_plan
from stratarec.recipe import Recipe
from stratarec.reporting.step_time import MeasuredStep
from stratarec.training.forecast import forecast_step
from stratarec.training.trainer import Trainer

TIME, BYTES = 0.15, 0.05


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Data, model, batch size, steps and memory of one recipe."""

    data: str
    model: Mapping[str, Any]
    batch: int
    steps: int
    memory: Mapping[str, Any] = field(default_factory=dict)
    dram: float = 0.0
    """Budget as a share of the tables' float32 bytes; 0 for no budget."""
    block: bool = False


_DLRM = {"kind": "dlrm", "bottom_mlp": [512, 256], "top_mlp": [512, 256]}
CELLS = {
    "dlrm, all in DRAM": Cell(data="log", model={**_DLRM, "embedding_dim": 16}, batch=256, steps=600),
    "dcnv2, large batch": Cell(data="log", model={"kind": "dcnv2", "embedding_dim": 16}, batch=8192, steps=100),
    "deepfm, int8": Cell(
        data="log", model={"kind": "deepfm", "embedding_dim": 10}, batch=1024, steps=400,
        memory={"precision": "int8", "cache": {"fraction": 0.1}},
    ),
    "dlrm, a quarter": Cell(data="log", model={**_DLRM, "embedding_dim": 64}, batch=2048, steps=200, dram=1 / 4),
    "dlrm, log": Cell(
        data="log", model={**_DLRM, "embedding_dim": 64}, batch=512, steps=600, dram=1 / 8, block=True,
        memory={"precision": "int8", "state": "bf16"},
    ),
    "dcnv2, log": Cell(
        data="log", model={"kind": "dcnv2", "embedding_dim": 32}, batch=4096, steps=150, dram=1 / 3, block=True
    ),
    "fm, fp16": Cell(
        data="log", model={"kind": "fm", "embedding_dim": 16}, batch=8192, steps=100,
        memory={"precision": "fp16", "cache": {"fraction": 0.2}},
    ),
    "finalmlp, int4": Cell(
        data="log", model={"kind": "finalmlp", "embedding_dim": 16}, batch=512, steps=400,
        memory={"precision": "int4", "cache": {"fraction": 0.05}},
    ),
    "dlrm, log, no lookahead": Cell(
        data="log", model={**_DLRM, "embedding_dim": 128}, batch=1024, steps=200, dram=1 / 6, block=True,
        memory={"precision": "fp16", "lookahead": 0},
    ),
    "sessions, all in DRAM": Cell(
        data="sessions", model={"kind": "dcnv2", "embedding_dim": 16}, batch=1024, steps=300
    ),
    "sessions, int8": Cell(
        data="sessions", model={**_DLRM, "embedding_dim": 32}, batch=4096, steps=150,
        memory={"precision": "int8", "cache": {"fraction": 0.1}},
    ),
    "wide and deep, two ahead": Cell(
        data="log", model={"kind": "wide_deep", "embedding_dim": 24}, batch=256, steps=400, dram=1 / 2, block=True,
        memory={"precision": "fp32", "lookahead": 2},
    ),
}  # fmt: skip
_SESSIONS = {"log": 1.0, "sessions": 12.0}


def data(folder: Path, name: str, samples: int, cap: int) -> PrepareConfig:
    """Return the configuration of a log of Criteo's shape, with single samples or repeating
    sessions.
    """
    source = SyntheticConfig(
        samples=samples, scale=1.0, max_rows=cap, session_length=_SESSIONS[name], seed=7
    )
    return PrepareConfig(
        source=source,
        path=str(folder / name),
        vocabulary=VocabularyConfig(min_count=1, tail_buckets=16),
        split=SplitConfig(by="fraction", valid=0.0, test=0.0),
    )


def recipe_of(name: str, config: PrepareConfig, folder: Path) -> Recipe:
    """Return the recipe of a cell."""
    cell, dataset = CELLS[name], Dataset.open(config.path)
    memory = dict(cell.memory)
    if cell.dram:
        width = int(cell.model["embedding_dim"])
        memory["dram"] = int(sum(dataset.table_rows().values()) * 4 * (width + 1) * cell.dram)
    if cell.block:
        memory["block"] = {"path": str(folder / "rows")}
    content = {
        "name": "cell", "data": {"path": config.path, "source": {"kind": "synthetic"}},
        "model": dict(cell.model), "memory": memory,
        "train": {
            "batch_size": cell.batch, "max_steps": cell.steps, "epochs": 100, "report": False,
            "run": str(folder / "run"), "checkpoint": {"every_minutes": 0}, "threads": 2,
        },
    }  # fmt: skip
    return replace(Recipe.from_dict(content, name), data=config)


def cell(name: str, config: PrepareConfig, folder: Path, shorter: int) -> dict[str, Any]:
    """Plan a recipe, train it, and return the prediction with the measurement."""
    recipe, dataset = recipe_of(name, config, folder), Dataset.open(config.path)
    recipe = replace(recipe, train=replace(recipe.train, max_steps=max(CELLS[name].steps // shorter, 20)))
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    batch = recipe.train.batch_size
    plan = make_hot_plan(
        tables, dataset, recipe.train.embedding, recipe.memory, recipe.hot, batch_size=batch
    )
    planned = forecast_step(recipe, dataset, plan)
    trainer = Trainer(recipe, dataset, plan=plan)
    result = trainer.train()
    # The machine's speed changes by a fifth within minutes, so average the plans before and after
    # training.
    later = forecast_step(recipe, dataset, plan)
    planned_step, drift = (planned.total + later.total) / 2, later.network / planned.network
    took = MeasuredStep.of(asdict(trainer.state))
    assert took is not None
    parts = {part.name: part.seconds for part in (*took.parts, *took.ahead)}
    compute = parts["looking up rows"] + parts["updating rows"]
    caches = {each["table"]: each for each in result["caches"]}
    cached = [placed for placed in plan.tables if placed.table in caches]
    planned_hits = _hits([(placed.distinct, placed.misses) for placed in cached])
    measured_hits = _hits(
        [(caches[placed.table]["distinct"], caches[placed.table]["missed"]) for placed in cached]
    )
    row = {
        "cell": name, "batch": batch, "steps": recipe.train.max_steps, "cached": len(cached),
        "step_ms": 1e3 * took.seconds, "planned_step_ms": 1e3 * planned_step,
        "tables_ms": 1e3 * compute, "planned_tables_ms": 1e3 * planned.tables.compute,
        "bring_in_ms": 1e3 * parts["fetching rows into level 0"],
        "planned_bring_in_ms": 1e3 * (planned.tables.staging + planned.tables.device),
        "network_ms": 1e3 * (parts["network, forward"] + parts["network, backward"] + parts["updating the "
                                                                                            "network"]),
        "planned_network_ms": 1e3 * planned.network,
        "wait_ms": 1e3 * took.wait.seconds,
        "reading_ms": 1e3 * parts["reading batches"], "drift": drift,
        "hit_rate": measured_hits, "planned_hit_rate": planned_hits,
        "time_error": planned_step / took.seconds - 1,
        "bytes_error": max(map(_bytes_error, result["memory"]), default=0.0),
    }  # fmt: skip
    fields = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
    )
    print(" ".join(fields), file=sys.stderr, flush=True)
    return row


def _hits(tables: Sequence[tuple[float, float]]) -> float:
    """Return the hit rate of all tables together, from pairs of distinct and missed rows."""
    distinct, missed = np.sum(tables, axis=0) if tables else (0.0, 0.0)
    return float(1 - missed / distinct) if distinct else 1.0


def _bytes_error(memory: Mapping[str, Any]) -> float:
    """Return the relative error of the predicted bytes of a memory; fewer bytes than an upper bound
    are no error.

    A log contains no row that was never written, and a few hundred steps write few rows, so all
    bytes predicted for a device are an upper bound.
    """
    least = 0 if memory["memory"] == "block" else memory["predicted"] - memory["reserve"]
    nearest = min(max(memory["used"], least), memory["predicted"])
    return float(abs(memory["used"] - nearest) / max(nearest, 1))


def run(quick: bool) -> dict[str, Any]:
    """Measure all twelve recipes; `quick` trains a tenth of the steps on a fifth of the log."""
    samples, cap, shorter = (200_000, 40_000, 10) if quick else (1_000_000, 200_000, 1)
    measure_tiers(MemoryConfig(), again=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        logs = {name: data(Path(folder), name, samples, cap) for name in _SESSIONS}
        for config in logs.values():
            prepare(config)
        for number, (name, each) in enumerate(CELLS.items()):
            rows.append(cell(name, logs[each.data], Path(folder) / f"cell-{number}", shorter))
    times, sizes = [abs(row["time_error"]) for row in rows], [row["bytes_error"] for row in rows]
    hits = [abs(row["hit_rate"] - row["planned_hit_rate"]) for row in rows if row["cached"]]
    return {
        "config": {"samples": samples, "most_rows": cap, "cells": len(rows)},
        "metrics": {
            "share_time_within_15": sum(each <= TIME for each in times) / len(rows),
            "share_bytes_within_5": sum(each <= BYTES for each in sizes) / len(rows),
            "time_error_worst": max(times),
            "time_error_median": median(times),
            "bytes_error_worst": max(sizes),
            "hit_rate_error_worst": max(hits),
        },
        "samples": {"rows": rows},
    }
