"""Test AUC of models with towers against those without, by the bytes that towers tell: a curve for each log and model.

DLRM and DCN V2 on a made-up log whose clicks depend on products inside known blocks of features, on frappe, Trivago's
impressions, some days of Globo's clicks, a part of the demo's log and a million samples of Criteo's shape; two towers,
as of two hosts, learned. Every run is one pass (frappe: `PASSES`) with learning rates that fall to a hundredth, so that
no side is tested past its best: with rates that stay, two passes over Trivago end 0.02 behind one, and what has more
weights, sooner. The rate of the rows is the one of `RATES` with the best validation AUC of the first seed, searched for
the model without towers and again with them, at the first compression. Seeds are paired.

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
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hot_quality import globo, synthetic
from benchmarks.kept import FOLDER, kept
from benchmarks.precision_quality import RECIPES
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
RATES = (0.02, 0.06, 0.2)
PASSES = {"frappe": 4}
MODEL = {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [64], "top_mlp": [128, 64]}
TRAINING: dict[str, Any] = {
    "batch_size": BATCH, "dense": {"kind": "adam", "learning_rate": 0.001}, "threads": 1, "report": False,
    # What is tested is the end, which alone is evaluated.
    "eval_every": 10**9, "checkpoint": {"every_minutes": 0},
}  # fmt: skip


def planted(
    folder: Path, samples: int, seed: int = 1, *, blocks: int = PLANTED_BLOCKS, signal: float = 1.8
) -> Recipe:  # fmt: skip
    """A made-up log of 26 features whose products count inside blocks alone."""
    return Recipe.from_dict({
        "name": "planted",
        "data": {
            "path": str(folder / "planted"),
            "source": {
                "kind": "synthetic", "samples": samples, "scale": 0.0002, "seed": seed, "blocks": blocks,
                "signal": signal,
            },
            "split": {"by": "fraction", "valid": 0.05, "test": 0.25},
            "vocabulary": {"min_count": 1, "tail_buckets": 16},
        },
        "model": MODEL,
    })  # fmt: skip


def changed(
    base: Recipe, dataset: Dataset, kind: str, seed: int, towers: Sequence[Sequence[str]] | None = None,
    compression: float = 1.0, rate: float = RATE,
) -> Recipe:  # fmt: skip
    """A model on the data of a recipe; a DCN has the layers of the DLRM's top."""
    model = {"kind": "dcnv2", "deep_mlp": MODEL["top_mlp"], "embedding_dim": 16} if kind == "dcnv2" else MODEL
    model = {**model, "towers": towers and {"plan": towers, "compression": compression}}
    passes = PASSES.get(base.name, 1)
    fall = {"kind": "polynomial", "total_steps": passes * -(-dataset.samples("train") // BATCH), "final_factor": 0.01}
    train = {
        **TRAINING, "seed": seed, "epochs": passes, "dense": {**TRAINING["dense"], "schedule": fall},
        "embedding": {"kind": "rowwise_adagrad", "learning_rate": rate, "schedule": fall},
    }  # fmt: skip
    return Recipe.from_dict({"name": base.name, "data": base.to_dict()["data"], "model": model, "train": train})


def auc(made: Recipe, dataset: Dataset, split: str = "test") -> float:
    """On a split after training; kept, so that what was ended goes on."""

    def trained() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(with_run(made, Path(folder) / "run"), dataset)
            return {"test": trainer.train()["test"]["auc"], "valid": trainer.state.evaluations[-1]["auc"]}

    about = {"model": made.to_dict()["model"], "train": made.to_dict()["train"], "data": dataset.fingerprint}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    found: float = kept(FOLDER / "tower_quality" / f"{name}.json", about, trained)[split]
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
        make = partial(changed, base, dataset, kind)
        rate = best_rate(lambda rate, make=make: make(seeds[0], rate=rate), dataset)  # type: ignore[misc]
        flat = {seed: auc(make(seed, rate=rate), dataset) for seed in seeds}
        same = auc(make(seeds[0], plan, rate=rate), dataset) - flat[seeds[0]]
        say(f"{name}, {kind}: AUC {mean(flat.values()):.5f} at {rate}, towers that tell all {same:+.5f}")
        if abs(same) > SAME:
            raise AssertionError(f"{name}, {kind}: towers that tell their vectors change the AUC by {same}")
        about = {"data": name, "model": kind, "rate_flat": rate}
        rows.append({**about, "compression": 1.0, "auc": mean(flat.values()), "delta": same})
        rows[-1] |= cost(make(seeds[0]), dataset)
        rate = best_rate(lambda rate, make=make: make(seeds[0], plan, COMPRESSIONS[0], rate), dataset)  # type: ignore[misc]
        for ratio in COMPRESSIONS:
            deltas = [auc(make(seed, plan, ratio, rate), dataset) - flat[seed] for seed in seeds]
            error = stdev(deltas) / len(deltas) ** 0.5 if len(deltas) > 1 else None
            say(f"{name}, {kind}, 1/{ratio:g} at {rate}: {mean(deltas):+.5f} {deltas}")
            rows.append({
                **about, "rate": rate, "compression": ratio, "auc": mean(flat.values()) + mean(deltas),
                "delta": mean(deltas), "error": error, "deltas": deltas, "plan": plan,
                **cost(make(seeds[0], plan, ratio), dataset),
            })  # fmt: skip
    return rows


def best_rate(make: Callable[[float], Recipe], dataset: Dataset) -> float:
    """The rate of the rows with the best AUC on the validation split."""
    return max(RATES, key=lambda rate: auc(make(rate), dataset, "valid"))


def logs(folder: Path, quick: bool) -> Iterator[tuple[str, Recipe, Callable[[], Dataset]]]:
    """Logs that are there, the made-up one first."""
    made = planted(folder, 60_000 if quick else 200_000)
    yield "planted", made, lambda: prepare(made.data)
    if quick:
        return
    with suppress(PeerMissing):
        apps = frappe("dcnv2", 0, Setting())
        yield "frappe", replace(apps, name="frappe"), lambda: prepare(apps.data, overwrite=True)
    with suppress(PeerMissing):
        trivago = recipe("trivago", "auto")
        yield "trivago", trivago, lambda: prepared("trivago", "auto")
    with suppress(PeerMissing):
        clicks = globo(folder, quick=True)
        yield "globo", clicks, lambda: Dataset.open(clicks.data.path)
    demo = Recipe.load(RECIPES / "demo.yaml", ["data.source.samples=400000", f"data.path={folder}/demo"])
    yield "demo", demo, lambda: prepare(demo.data)
    shape = synthetic(folder, quick=False)
    yield "criteo", shape, lambda: Dataset.open(shape.data.path)


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
            "planted_blocks": PLANTED_BLOCKS, "model": MODEL, "embedding_rates": RATES, "passes": PASSES,
            "targets": {"auc_delta_towers_min": -0.0005},
        },
        "metrics": {
            "auc_delta_towers_min": min(row["delta"] for row in at),
            "auc_delta_towers_error": max(row["error"] or 0.0 for row in at),
            **{f"auc_delta_{row['data']}_{row['model']}": row["delta"] for row in at},
        },
        "samples": {"rows": rows},
    }  # fmt: skip
