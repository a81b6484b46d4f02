"""Test AUC of models with towers against those without, by the bytes that towers tell: a curve for each log and model.

DLRM and DCN V2 on a made-up log whose clicks depend on products inside known blocks of features, on frappe, Trivago's
impressions and some days of Globo's clicks; two towers, as of two hosts, learned. Every run is one pass with learning
rates that fall to a hundredth, so that no side is tested past its best: with rates that stay, two passes over Trivago
end 0.02 behind one, and what has more weights, sooner. Seeds are paired.

The gate: towers that tell their vectors are the model without towers. Nothing is timed. Real logs are read from
``data/`` beside the benchmark's working directory, as `sessions` says; those that are not there are left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hot_quality import globo
from benchmarks.kept import FOLDER, kept
from benchmarks.quality import Setting
from benchmarks.quality import recipe as frappe
from benchmarks.registry import PeerMissing
from benchmarks.sessions import prepared, recipe, with_run
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.models.towers import TowerNetwork
from stratarec.recipe import Recipe
from stratarec.training.build import temporary_model
from stratarec.training.tower_partition import TowerRequest, make_towers
from stratarec.training.trainer import Trainer

COMPRESSIONS, OF_RATIOS = (2.0, 4.0, 8.0), 4.0
"""The second is that of the metrics: at 100 Mbit/s `towers` has it at twice the speed of the flat exchange."""
TOWERS, SEEDS = 2, 5
PLANTED_BLOCKS = 4
BATCH, RATE, SAME = 1024, 0.02, 0.0005
MODEL = {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [64], "top_mlp": [128, 64]}
TRAINING: dict[str, Any] = {
    "batch_size": BATCH, "dense": {"kind": "adam", "learning_rate": 0.001}, "threads": 1, "report": False,
    # What is tested is the end, which alone is evaluated.
    "eval_every": 10**9, "checkpoint": {"every_minutes": 0},
}  # fmt: skip


def planted(folder: Path, samples: int, seed: int = 1) -> Recipe:
    """A made-up log of 26 features whose products count inside blocks alone."""
    return Recipe.from_dict({
        "name": "planted",
        "data": {
            "path": str(folder / "planted"),
            "source": {
                "kind": "synthetic", "samples": samples, "scale": 0.0002, "seed": seed, "blocks": PLANTED_BLOCKS,
            },
            "split": {"by": "fraction", "valid": 0.05, "test": 0.25},
            "vocabulary": {"min_count": 1, "tail_buckets": 16},
        },
        "model": MODEL,
    })  # fmt: skip


def changed(
    base: Recipe, dataset: Dataset, kind: str, seed: int, towers: Sequence[Sequence[str]] | None = None,
    compression: float = 1.0,
) -> Recipe:  # fmt: skip
    """A model on the data of a recipe; a DCN has the layers of the DLRM's top."""
    model = {"kind": "dcnv2", "deep_mlp": MODEL["top_mlp"], "embedding_dim": 16} if kind == "dcnv2" else MODEL
    model = {**model, "towers": towers and {"plan": towers, "compression": compression}}
    fall = {"kind": "polynomial", "total_steps": -(-dataset.samples("train") // BATCH), "final_factor": 0.01}
    train = {
        **TRAINING, "seed": seed, "dense": {**TRAINING["dense"], "schedule": fall},
        "embedding": {"kind": "rowwise_adagrad", "learning_rate": RATE, "schedule": fall},
    }  # fmt: skip
    return Recipe.from_dict({"name": base.name, "data": base.to_dict()["data"], "model": model, "train": train})


def auc(made: Recipe, dataset: Dataset) -> float:
    """On the test split after training; kept, so that what was ended goes on."""

    def trained() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return {"auc": Trainer(with_run(made, Path(folder) / "run"), dataset).train()["test"]["auc"]}

    about = {"model": made.to_dict()["model"], "train": made.to_dict()["train"], "data": dataset.fingerprint}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    found: float = kept(FOLDER / "tower_quality" / f"{name}.json", about, trained)["auc"]
    return found


def cost(made: Recipe, dataset: Dataset) -> dict[str, float]:
    """Parameters of the network, bytes that towers tell of a sample, and thousands of multiplications of it."""
    loader = Loader(dataset, "train", LoaderConfig(batch_size=256, shuffle_row_groups=1, expand=True))
    batches = loader.batches(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    with temporary_model(made, dataset, None) as model:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(batch)
        network = model.network
        by_towers = isinstance(network, TowerNetwork)
        told = sum(tower.columns for tower in network.all_towers) if by_towers else sum(model.embeddings.dims)
        return {
            "parameters": sum(weight.numel() for weight in network.parameters()), "bytes_a_sample": 4 * told,
            "kflop_a_sample": counter.get_total_flops() / batch.size / 1e3,
        }  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def learned_towers(base: Recipe, dataset: Dataset, count: int) -> tuple[tuple[str, ...], ...]:
    """As `plan --towers` makes them."""
    return make_towers(changed(base, dataset, "dlrm", 0), dataset, TowerRequest(towers=count)).plan


def compared(name: str, base: Recipe, dataset: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Every compression of both models against no towers."""
    plan, rows = learned_towers(base, dataset, TOWERS), []
    for kind in ("dlrm", "dcnv2"):
        flat = {seed: auc(changed(base, dataset, kind, seed), dataset) for seed in seeds}
        same = auc(changed(base, dataset, kind, seeds[0], plan), dataset) - flat[seeds[0]]
        say(f"{name}, {kind}: AUC {mean(flat.values()):.5f}, towers that tell all {same:+.5f}")
        if abs(same) > SAME:
            raise AssertionError(f"{name}, {kind}: towers that tell their vectors change the AUC by {same}")
        rows.append({"data": name, "model": kind, "compression": 1.0, "auc": mean(flat.values()), "delta": same})
        rows[-1] |= cost(changed(base, dataset, kind, seeds[0]), dataset)
        for ratio in COMPRESSIONS:
            deltas = [auc(changed(base, dataset, kind, seed, plan, ratio), dataset) - flat[seed] for seed in seeds]
            error = stdev(deltas) / len(deltas) ** 0.5 if len(deltas) > 1 else None
            say(f"{name}, {kind}, 1/{ratio:g}: {mean(deltas):+.5f} {deltas}")
            rows.append({
                "data": name, "model": kind, "compression": ratio, "auc": mean(flat.values()) + mean(deltas),
                "delta": mean(deltas), "error": error, "deltas": deltas, "plan": plan,
                **cost(changed(base, dataset, kind, seeds[0], plan, ratio), dataset),
            })  # fmt: skip
    return rows


def logs(folder: Path, quick: bool) -> Iterator[tuple[str, Recipe, Callable[[], Dataset]]]:
    """Logs that are there, the made-up one first."""
    made = planted(folder, 60_000 if quick else 200_000)
    yield "planted", made, lambda: prepare(made.data)
    if quick:
        return
    with suppress(PeerMissing):
        trivago = recipe("trivago", "auto")
        yield "trivago", trivago, lambda: prepared("trivago", "auto")
    with suppress(PeerMissing):
        apps = frappe("dcnv2", 0, Setting())
        yield "frappe", replace(apps, name="frappe"), lambda: prepare(apps.data, overwrite=True)
    with suppress(PeerMissing):
        clicks = globo(folder, quick=True)
        yield "globo", clicks, lambda: Dataset.open(clicks.data.path)


def run(quick: bool, seeds: int = SEEDS) -> dict[str, Any]:
    """Five seeds; `quick` has the made-up log alone and one seed."""
    numbers, rows = tuple(range(1, 2 if quick else seeds + 1)), []
    with tempfile.TemporaryDirectory() as folder:
        for name, made, make in logs(Path(folder), quick):
            dataset = make()
            rows += compared(name, made, dataset, numbers)
    at = [row for row in rows if row["compression"] == OF_RATIOS]
    return {
        "config": {
            "compressions": COMPRESSIONS, "compression_of_metrics": OF_RATIOS, "towers": TOWERS, "seeds": numbers,
            "planted_blocks": PLANTED_BLOCKS, "model": MODEL, "embedding_rate": RATE,
            "targets": {"auc_delta_towers_min": -0.0005},
        },
        "metrics": {
            "auc_delta_towers_min": min(row["delta"] for row in at),
            "auc_delta_towers_error": max(row["error"] or 0.0 for row in at),
            **{f"auc_delta_{row['data']}_{row['model']}": row["delta"] for row in at},
        },
        "samples": {"rows": rows},
    }  # fmt: skip
