"""Training with an eighth of the tables' bytes in DRAM: tiers and their alternatives
(`benchmarks.tier_peers`).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kept import FOLDER, kept
from benchmarks.precision_quality import RECIPES, criteo_shape
from benchmarks.registry import import_peer
from benchmarks.sessions import prepared, recipe
from benchmarks.tier_peers import MappedPeer, hashed, hashing_delta, use_rocksdb
from benchmarks.tiers import WIDTH, close, criteo, fill, float32_bytes, planned
from benchmarks.train import take_turns, tiered_sides
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig


def run(quick: bool) -> dict[str, Any]:
    """Measure step times of the alternatives, and the AUC that hashing costs. Finished parts are
    stored.
    """
    import_peer("rocksdict")
    log, dataset, batch = criteo(quick)
    about = {"data": dataset.fingerprint, "width": WIDTH, "batch": batch}
    file = FOLDER / "tiers" / f"peers{'-quick' if quick else ''}.json"
    peers = kept(file, about, lambda: compare_with_peers(log, dataset, batch))
    quality, step = compare_with_hashing(quick), peers["step_ms"]
    return {
        "config": {"width": WIDTH, "batch": batch, "tables": dataset.table_rows(), **peers["config"]},
        "metrics": {
            "ratio_mmap_at_8x": step["mmap"] / step["tiers"],
            "ratio_rocksdb_at_8x": step["rocksdb"] / step["tiers"],
            "ratio_hashing_at_8x": step["hashing"] / step["tiers"],
            "auc_delta_hashing_at_8x": max(each["auc_delta"] for each in quality),
            **{f"auc_delta_hashing_at_8x_{each['data']}": each["auc_delta"] for each in quality},
        },
        "samples": {"rows": quality, "step_ms": step},
    }


def compare_with_peers(log: PrepareConfig, dataset: Dataset, batch: int) -> dict[str, Any]:
    """Time steps with an eighth of the bytes in DRAM, for tiers and each alternative; also return
    settings.
    """
    budget = int(float32_bytes(dataset) / 8)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        contenders = {
            name: partial(planned, dataset=dataset, times=8, lookahead=2, path=root / name, batch=batch)
            for name in ("tiers", "rocksdb")
        }
        sides: dict[str, Any] = tiered_sides(dataset, WIDTH, batch, contenders)
        config: dict[str, Any] = {"rocksdb": use_rocksdb(sides["rocksdb"].model, root)}
        for side in sides.values():
            fill(side)
        small = hashed(log, dataset.table_rows(), 8, FOLDER / "tiers" / f"{Path(log.path).name}-hashed")
        sides |= {
            "hashing": tiered_sides(Dataset.open(small.path), WIDTH, batch, {"hashing": None})["hashing"]
        }
        sides |= {"mmap": MappedPeer(dataset, WIDTH, batch, budget, root)}
        config |= {"mmap": {"limit_bytes": sides["mmap"].limit_bytes, "budget_bytes": budget}}
        seconds = take_turns(sides, rounds=4, stretch=5, warmup=20)
        for side in sides.values():
            close(side)
    return {"step_ms": {name: 1e3 * median(each) for name, each in seconds.items()}, "config": config}


def compare_with_hashing(quick: bool) -> list[dict[str, Any]]:
    """Return the test AUC of hashed tables minus that of int8 rows, on both logs."""
    samples, cap = (200_000, 100_000) if quick else (1_000_000, 400_000)
    log = criteo_shape(FOLDER / "tiers" / f"criteo-{samples}", samples, cap)
    steps = 50 if quick else 1000
    changes = [
        "train.batch_size=1024",
        "memory.lookahead=0",
        f"train.max_steps={steps}",
        f"train.dense.schedule.total_steps={steps}",
        f"train.embedding.schedule.total_steps={steps}",
    ]
    prepared("globo", "auto")
    seeds = (1,) if quick else (1, 2)
    return [
        hashing_delta("criteo_shape", log, RECIPES / "demo.yaml", [], 8, seeds),
        hashing_delta("globo", recipe("globo", "auto").data, RECIPES / "globo.yaml", changes, 8, seeds),
    ]
