"""Hot rows and hot batches in one process: hot shares by budget, and the speed of tables larger
than DRAM.

Shares: rows are chosen for 2, 6.8 and 12.4 % of all bytes (D = 16, row-wise Adagrad). The benchmark
reports the share of lookups that use them, and the share of inputs that need only them, estimated
and counted, also for rows chosen by lookups per byte. With ``--data`` it measures a prepared data
set, and how many of 100 intervals contain the count.

Speed: as in `tiers`, the same tables in an SSD store within 1/8 and 1/37 of their float32 bytes: as
planned, and with a part of the same budget for hot rows, with and without hot batches. Steps are
averaged over stretches that contain hot and mixed batches in proportion.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.precision_quality import criteo_shape
from benchmarks.sessions import ROOT, row_bytes_of
from benchmarks.tiers import BATCH, QUICK_BATCH, WIDTH, check_budget, fill, float32_bytes
from benchmarks.train import BOTTOM, EPS, RATE, TOP, Side, take_turns
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.embedding import RowOptimizerConfig
from stratarec.hot.calibrator import CURVE, calibrate
from stratarec.hot.config import HotConfig
from stratarec.hot.hot_loader import HotLoader, classify
from stratarec.hot.selection import parts_of
from stratarec.models import CTRModel, DLRMConfig, build_model
from stratarec.models.base import build_tables
from stratarec.planning.config import BlockConfig, MemoryConfig
from stratarec.planning.placement import hot_rows, make_hot_plan
from stratarec.planning.plan import tier_config

SHARES_WIDTH = 16
# Batch size for small tables: a batch must use a small part of the rows.
SMALL_BATCH = 1024
OPTIMIZER = RowOptimizerConfig(learning_rate=RATE, eps=EPS)
# Cells: float32 bytes over the DRAM budget, lookahead, share of the budget for hot rows.
CELLS = ((8, 2, 0.5), (37, 1, 0.2))


def shares(dataset: Dataset) -> list[dict[str, Any]]:
    """Return a row for each budget, with estimated and counted shares of hot inputs."""
    row_bytes = row_bytes_of(dataset, SHARES_WIDTH, OPTIMIZER)
    parts = parts_of(dataset, row_bytes)
    total, samples = sum(part.nbytes for part in parts), dataset.samples("train")
    rows = []
    for share in CURVE:
        start = time.perf_counter()
        profile, seconds = calibrate(dataset, row_bytes, int(share * total)), time.perf_counter() - start
        point, counts = profile.chosen, classify(dataset, parts, profile.hot(parts), "train")
        counted = sum(map(sum, counts.values())) / samples
        rows.append(
            {
                "data": dataset.name,
                "bytes_share": share,
                "accesses": point.accesses,
                "inputs": counted,
                "inputs_estimated": point.inputs.share,
                "inside_interval": point.inputs.low <= counted <= point.inputs.high,
                "inputs_by_count_estimated": point.counted.share,
                "method": profile.method,
                "calibration_seconds": seconds,
            }
        )
    return rows


def interval_coverage(dataset: Dataset, share: float, trials: int) -> dict[str, int]:
    """Count how many intervals of hot inputs, each from another sample of inputs, contain the
    counted share.
    """
    row_bytes = row_bytes_of(dataset, SHARES_WIDTH, OPTIMIZER)
    parts = parts_of(dataset, row_bytes)
    budget, samples = int(share * sum(part.nbytes for part in parts)), dataset.samples("train")
    inside = 0
    for seed in range(trials):
        profile = calibrate(dataset, row_bytes, budget, seed=seed)
        counted = sum(map(sum, classify(dataset, parts, profile.hot(parts), "train").values())) / samples
        inside += profile.chosen.inputs.low <= counted <= profile.chosen.inputs.high
    return {"trials": trials, "inside": inside}


def side(dataset: Dataset, times: int, lookahead: int, hot: HotConfig, *, path: Path, batch: int) -> Side:
    """Build the model within a `times`-th of the float32 bytes."""
    config = DLRMConfig(embedding_dim=WIDTH, bottom_mlp=BOTTOM, top_mlp=TOP, pooling="sum")
    tables = build_tables(config, dataset.schema, dataset.table_rows())
    memory = MemoryConfig(
        dram=int(float32_bytes(dataset) / times) if times > 1 else None,
        block=BlockConfig(path=str(path)) if times > 1 else None,
        precision="int8" if times > 1 else "fp32",
        state="bf16",
        lookahead=lookahead,
    )
    loading, tiers = LoaderConfig(batch_size=batch), None
    loader = Loader(dataset, "train", loading)
    if times > 1:
        plan = make_hot_plan(tables, dataset, OPTIMIZER, memory, hot, batch_size=batch)
        tiers = tier_config(plan, memory, f"{times}-{hot.budget}-{hot.batches}")
        if hot.separate_batches:
            selection = hot_rows(plan, dataset)
            counts = classify(dataset, *selection, "train")
            loader = HotLoader(dataset, "train", loading, *selection, counts)
    model = build_model(config, dataset.schema, dataset.table_rows(), optimizer=OPTIMIZER, tiers=tiers)
    dense = torch.optim.Adagrad(model.network.parameters(), lr=0.01, fused=True)
    return Side(model, dense, loader, "float32", lookahead if tiers else 0)


def speeds(dataset: Dataset, folder: Path, batch: int, rounds: int, stretch: int) -> list[dict[str, Any]]:
    """Time all placements of the tables in alternation and return a row for each."""
    build = partial(side, path=folder, batch=batch)
    makers: dict[str, Any] = {"dram": partial(build, dataset, 1, 0, HotConfig())}
    for times, lookahead, share in CELLS:
        budget = int(share * float32_bytes(dataset) / times)
        for name, hot in (
            ("planned", HotConfig()),
            ("hot_rows", HotConfig(budget=budget, batches="none")),
            ("hot_batches", HotConfig(budget=budget, batches="proportional")),
        ):
            makers[f"{times}x_{name}"] = partial(build, dataset, times, lookahead, hot)
    pair: Mapping[str, Side] = {name: make() for name, make in makers.items()}
    for name, each in pair.items():
        if name != "dram":
            fill(each)
    seconds = take_turns(pair, rounds, stretch, warmup=2 * stretch + 10)
    rows = [
        _row_of(name, each, median(seconds[name]), median(seconds["dram"])) for name, each in pair.items()
    ]
    for row in rows[1:]:
        check_budget(row, float32_bytes(dataset) / int(row["tables"].split("x")[0]))
    for each in pair.values():
        each.close()
        each.model.embeddings.close()  # type: ignore[operator,union-attr]
    return rows


def _row_of(name: str, each: Side, seconds: float, in_dram: float) -> dict[str, Any]:
    model = each.model
    assert isinstance(model, CTRModel)
    hot = each.loader.hot_samples / each.loader.samples if isinstance(each.loader, HotLoader) else None
    moved = sum(tables.traffic.rows_in for tables in model.embeddings.engine.tables)
    return {
        "tables": name,
        "step_ms": 1e3 * seconds,
        "speed": in_dram / seconds,
        "dram_mib": model.embeddings.engine.nbytes / 2**20,
        "hot_inputs": hot,
        "rows_in_a_step": moved / max(model.embeddings.step, 1),
    }


def run(quick: bool, data: Path | None = None, rows: int | None = None) -> dict[str, Any]:
    """Measure hot shares of `data`, or hot shares and speed on the synthetic log.

    Parameters
    ----------
    rows : int
        Limit of the rows of a table, for machines with little memory; batches are smaller, too.
    """
    if data is not None:
        dataset = Dataset.open(data)
        hot_shares, intervals = shares(dataset), interval_coverage(dataset, CURVE[1], 10 if quick else 100)
        return {
            "config": {"data": data.name, "width": SHARES_WIDTH},
            "metrics": {"intervals_held": intervals["inside"] / intervals["trials"]},
            "samples": {"rows": hot_shares, "intervals": [intervals]},
        }
    samples, cap = (1_500_000, 400_000) if quick else (6_000_000, 40_000_000)
    batch = QUICK_BATCH if quick else BATCH
    if rows is not None:
        samples, cap, batch = min(samples, 2 * rows), min(cap, rows), min(batch, SMALL_BATCH)
    # The log stays on disk, because generating it takes longer than the measurement.
    dataset = Dataset.open(
        criteo_shape(ROOT / "data" / "benchmarks" / f"criteo-{samples}-{cap}", samples, cap).path
    )
    hot_shares = shares(dataset)
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as folder:
        measured = speeds(dataset, Path(folder), batch, *((4, 8) if quick else (8, 25)))
    tables = dataset.table_rows()
    speed = {row["tables"]: row["speed"] for row in measured}
    return {
        "config": {
            "width": WIDTH,
            "batch": batch,
            "tables": tables,
            "cells": CELLS,
            "samples": samples,
            "most_rows": cap,
            "precision": "int8",
            "targets": {"speed_at_8x_hot": 0.93, "speed_at_37x_hot": 0.80},
        },
        "metrics": {
            "speed_at_8x_hot": max(speed["8x_hot_rows"], speed["8x_hot_batches"]),
            "speed_at_37x_hot": max(speed["37x_hot_rows"], speed["37x_hot_batches"]),
            "speed_at_8x_planned": speed["8x_planned"],
            "speed_at_37x_planned": speed["37x_planned"],
        },
        "samples": {"shares": hot_shares, "rows": measured},
    }
