"""Test AUC of models with towers against those without, at equal steps, and of learned towers against random ones.

DLRM and DCN V2 on Globo's clicks, Trivago's impressions, and a made-up log whose clicks depend on products inside known
blocks of features; 2, 4 and 8 towers, or as many as a log's features allow (those that share a table count once). The
towers are learned (coherent, of mixed differences in a probe); random ones keep the same bounds. Seeds are paired.
Nothing is timed. Real logs are read from ``data/`` beside the benchmark's working directory, as `sessions` says.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.sessions import prepared, recipe, with_run
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.models.towers.tower_config import tied
from stratarec.planning.towers.bounds import tightest
from stratarec.planning.towers.clustering import assign
from stratarec.recipe import Recipe
from stratarec.training.run.open_run import temporary_model
from stratarec.training.tower_partition import TowerRequest, bounds_of, items_of, make_towers
from stratarec.training.trainer import Trainer

COMPRESSION, TOWERS, DRAWS, SEEDS = 4.0, (2, 4, 8), 10, (1, 2, 3)
PLANTED_BLOCKS = 4
STEPS = {"globo": 150, "trivago": 0, "planted": 0}
"""0: as long as the recipe says."""


def planted(folder: Path, samples: int) -> Recipe:
    """A made-up log of 26 features whose products count inside blocks alone."""
    return Recipe.from_dict({
        "name": "planted",
        "data": {
            "path": str(folder / "planted"),
            "source": {
                "kind": "synthetic", "samples": samples, "scale": 0.0002, "seed": 1, "blocks": PLANTED_BLOCKS,
            },
            "split": {"by": "fraction", "valid": 0.05, "test": 0.25},
            "vocabulary": {"min_count": 1, "tail_buckets": 16},
        },
        "model": {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [64], "top_mlp": [128, 64]},
        "train": {
            "batch_size": 1024, "dense": {"kind": "adam", "learning_rate": 0.002},
            "embedding": {"kind": "rowwise_adagrad", "learning_rate": 0.1},
        },
    })  # fmt: skip


def changed(base: Recipe, kind: str, towers: Sequence[Sequence[str]] | None, seed: int, steps: int) -> Recipe:
    """The recipe with another model; a DCN has the layers of the DLRM's top."""
    content = base.to_dict()
    model = {key: content["model"][key] for key in ("embedding_dim", "pooling", "history")}
    top, bottom = base.model.top_mlp, base.model.bottom_mlp  # type: ignore[union-attr]
    model |= {"kind": kind, **({"deep_mlp": top} if kind == "dcnv2" else {"top_mlp": top, "bottom_mlp": bottom})}
    model["towers"] = None if towers is None else {"plan": towers, "compression": COMPRESSION}
    # What is tested is the end, which alone is evaluated.
    train = {**content["train"], "seed": seed, "eval_every": 10**9, "threads": 1}
    train["checkpoint"] = {**train["checkpoint"], "every_minutes": 0}
    if steps:
        train["max_steps"] = steps
    return Recipe.from_dict({**content, "model": model, "train": train})


def auc(made: Recipe, dataset: Dataset) -> float:
    """On the test split after training."""
    with tempfile.TemporaryDirectory() as folder:
        found: float = Trainer(with_run(made, Path(folder) / "run"), dataset).train()["test"]["auc"]
    return found


def cost(made: Recipe, dataset: Dataset) -> tuple[int, float]:
    """Parameters of the network, and thousands of multiplications and additions a sample of its layers, forward."""
    loader = Loader(dataset, "train", LoaderConfig(batch_size=256, shuffle_row_groups=1, expand=True))
    batches = loader.batches(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    with temporary_model(made, dataset, None) as model:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(batch)
        weights = sum(weight.numel() for weight in model.network.parameters())
    return weights, counter.get_total_flops() / batch.size / 1e3


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def learned_towers(base: Recipe, dataset: Dataset, count: int) -> tuple[tuple[str, ...], ...]:
    """As `plan --towers` makes them."""
    return make_towers(changed(base, "dlrm", None, 0, 0), dataset, TowerRequest(towers=count)).plan


def random_towers(base: Recipe, dataset: Dataset, count: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """Dealt by chance within the same bounds; what these do not allow costs one an item, so that it is seldom."""
    made = changed(base, "dlrm", None, seed, 0)
    items, bounds = items_of(made, dataset), bounds_of(made, TowerRequest(towers=count))
    costs = np.ones((len(items), count))
    costs[np.random.default_rng(seed).permutation(len(items)), np.arange(len(items)) % count] = 0
    labels = tightest(items, bounds, lambda limits: assign(costs, limits))
    order = dict.fromkeys(labels.tolist())  # by the first feature of each
    dealt = list(zip(items, labels, strict=True))
    return tuple(tuple(name for item, mine in dealt if mine == label for name in item.features) for label in order)


def compared(name: str, base: Recipe, dataset: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Every number of towers of both models against no towers."""
    most, rows = len(tied(dataset.schema)), []
    counts = sorted({min(count, most) for count in TOWERS})
    plans = {count: learned_towers(base, dataset, count) for count in counts}
    for kind in ("dlrm", "dcnv2"):
        flat: dict[int, float] = {}
        for count in (0, *counts):
            found = []
            for seed in seeds:
                made = changed(base, kind, plans[count] if count else None, seed, STEPS[name])
                found.append(auc(made, dataset))
                say(f"{name}, {kind}, {count} towers, seed {seed}: AUC {found[-1]:.5f}")
                if not count:
                    flat[seed] = found[-1]
            weights, flops = cost(made, dataset)
            deltas = [value - flat[seed] for value, seed in zip(found, seeds, strict=True)]
            rows.append({
                "data": name, "model": kind, "towers": count, "auc": mean(found), "delta": mean(deltas),
                "low": min(deltas), "high": max(deltas), "parameters": weights, "kflop_a_sample": flops,
            })  # fmt: skip
    return rows


def partitions(name: str, base: Recipe, dataset: Dataset, draws: int) -> dict[str, Any]:
    """A DLRM of four towers (fewer where a log's features allow no more): learned, and random ones."""
    count = min(4, len(tied(dataset.schema)) - 1)
    learned = learned_towers(base, dataset, count)
    found: dict[str, Any] = {"data": name, "towers": count, "learned": [], "random": [], "plan": learned}
    for draw in range(draws):
        random = random_towers(base, dataset, count, draw)
        for key, plan in (("learned", learned), ("random", random)):
            found[key].append(auc(changed(base, "dlrm", plan, draw, STEPS[name]), dataset))
        say(f"{name}, draw {draw}: learned {found['learned'][-1]:.5f}, random {found['random'][-1]:.5f}")
    found["learned_minus_random"] = mean(found["learned"]) - mean(found["random"])
    if name == "planted":
        blocks = base.data.source.feature_blocks()  # type: ignore[union-attr]
        names = {frozenset(f"C{feature + 1}" for feature in block) for block in blocks}
        found["blocks_found"] = names == {frozenset(tower) for tower in learned}
    return found


def run(quick: bool) -> dict[str, Any]:
    """Three seeds and ten draws; `quick` has the made-up log alone, one seed and one draw."""
    seeds, draws = ((1,), 1) if quick else (SEEDS, DRAWS)
    rows, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        base = planted(Path(folder), 60_000 if quick else 200_000)
        sets = [("planted", base, lambda: prepare(base.data))]
        if not quick:
            real = [(name, recipe(name, "auto")) for name in ("trivago", "globo")]
            sets += [(name, made, lambda name=name: prepared(name, "auto")) for name, made in real]  # type: ignore[misc]
        for name, made, make in sets:
            dataset = make()
            found.append(partitions(name, made, dataset, draws))
            rows += compared(name, made, dataset, seeds)
    return {
        "config": {
            "compression": COMPRESSION, "towers": list(TOWERS), "seeds": list(seeds), "draws": draws, "steps": STEPS,
            "planted_blocks": PLANTED_BLOCKS, "partitions": found, "target": 0.0005,
        },
        "metrics": {
            "auc_delta_towers": min(row["delta"] for row in rows if row["towers"]),
            "auc_learned_minus_random": min(each["learned_minus_random"] for each in found),
            **{f"auc_learned_minus_random_{each['data']}": each["learned_minus_random"] for each in found},
            **{
                f"auc_delta_{data}_{kind}": min(
                    row["delta"] for row in rows if row["towers"] and (row["data"], row["model"]) == (data, kind)
                )
                for data, kind in sorted({(row["data"], row["model"]) for row in rows})
            },
            "planted_blocks_found": float(next(e["blocks_found"] for e in found if e["data"] == "planted")),
        },
        "samples": {"rows": rows},
    }  # fmt: skip
