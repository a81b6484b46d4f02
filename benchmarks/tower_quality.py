"""Compare the test AUC of models with towers and without towers, at several compressions of the
towers' outputs.

DLRM and DCN V2 are trained on a synthetic log whose clicks depend on products inside known blocks
of features, frappe, Trivago's impressions, some days of Globo's clicks, a part of the demo's log,
and a million samples of Criteo's shape. Two towers, one for each of two hosts, are learned by
`make_towers`. A run makes one pass over its log (frappe: `PASSES`). Learning rates fall to a
hundredth, because models with more weights overfit sooner at constant rates: on Trivago, the AUC
after two passes was 0.02 lower than after one. The learning rate of the rows is the rate of `RATES`
with the best validation AUC of the first seed. It is searched once without towers and once with
towers, at the lowest compression. Seeds are paired.

The gate: towers that send their vectors unchanged have the AUC of the model without towers. Nothing
is timed. Real logs are read from the directory of `sessions.LOGS`; missing logs are skipped.

Results of finished runs are stored in ``data/benchmarks/tower_quality``, so the benchmark can be
run in parts::

    python -m benchmarks run tower_quality --logs frappe,trivago --models dlrm --seeds 2 \\
        --out part.json

A later command, with more logs, models or seeds, trains only the runs that are missing.
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
from benchmarks.sessions import prepared, with_run
from benchmarks.sessions import recipe as shipped
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import ConfigError
from stratarec.models.towers import TowerNetwork
from stratarec.recipe import Recipe
from stratarec.training.build import temporary_model
from stratarec.training.tower_partition import TowerRequest, make_towers
from stratarec.training.trainer import Trainer

COMPRESSIONS = (2.0, 4.0, 8.0)
METRIC_COMPRESSION = 4.0
"""Compression of the metrics: with it, SPTT has twice the speed of the flat exchange at 100 Mbit/s
(`towers`).
"""
TOWERS, SEEDS = 2, 5
MODELS = ("dlrm", "dcnv2")
LOGS = ("planted", "frappe", "trivago", "globo", "demo", "criteo")
PLANTED_BLOCKS = 4
BATCH, RATE = 1024, 0.02
MAX_UNCOMPRESSED_DELTA = 0.0005
"""Largest AUC difference that the gate allows for towers without compression."""
RATES = (0.02, 0.06, 0.2)
PASSES = {"frappe": 4}
MODEL = {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [64], "top_mlp": [128, 64]}
TRAINING: dict[str, Any] = {
    "batch_size": BATCH, "dense": {"kind": "adam", "learning_rate": 0.001}, "threads": 1, "report": False,
    # Only the model of the last step is evaluated.
    "eval_every": 10**9, "checkpoint": {"every_minutes": 0},
}  # fmt: skip


def planted(
    folder: Path, samples: int, seed: int = 1, *, blocks: int = PLANTED_BLOCKS, signal: float = 1.8
) -> Recipe:
    """Return the recipe of a synthetic log of 26 features, whose clicks depend on products inside
    blocks only.
    """
    return Recipe.from_dict(
        {
            "name": "planted",
            "data": {
                "path": str(folder / "planted"),
                "source": {
                    "kind": "synthetic",
                    "samples": samples,
                    "scale": 0.0002,
                    "seed": seed,
                    "blocks": blocks,
                    "signal": signal,
                },
                "split": {"by": "fraction", "valid": 0.05, "test": 0.25},
                "vocabulary": {"min_count": 1, "tail_buckets": 16},
            },
            "model": MODEL,
        }
    )


def changed(
    base: Recipe,
    dataset: Dataset,
    kind: str,
    seed: int,
    towers: Sequence[Sequence[str]] | None = None,
    compression: float = 1.0,
    rate: float = RATE,
) -> Recipe:
    """Return a recipe with the data of `base` and another model; a DCN has the layers of the DLRM's
    top.
    """
    model = (
        {"kind": "dcnv2", "deep_mlp": MODEL["top_mlp"], "embedding_dim": 16} if kind == "dcnv2" else MODEL
    )
    model = {**model, "towers": towers and {"plan": towers, "compression": compression}}
    passes = PASSES.get(base.name, 1)
    fall = {
        "kind": "polynomial",
        "total_steps": passes * -(-dataset.samples("train") // BATCH),
        "final_factor": 0.01,
    }
    train = {
        **TRAINING, "seed": seed, "epochs": passes, "dense": {**TRAINING["dense"], "schedule": fall},
        "embedding": {"kind": "rowwise_adagrad", "learning_rate": rate, "schedule": fall},
    }  # fmt: skip
    return Recipe.from_dict(
        {"name": base.name, "data": base.to_dict()["data"], "model": model, "train": train}
    )


def auc(recipe: Recipe, dataset: Dataset, split: str = "test") -> float:
    """Return the AUC on a split after training. The result is stored, so a later call does not
    train again.
    """

    def train() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(with_run(recipe, Path(folder) / "run"), dataset)
            return {"test": trainer.train()["test"]["auc"], "valid": trainer.state.evaluations[-1]["auc"]}

    content = recipe.to_dict()
    about = {"model": content["model"], "train": content["train"], "data": dataset.fingerprint}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    value: float = kept(FOLDER / "tower_quality" / f"{name}.json", about, train)[split]
    return value


def cost(recipe: Recipe, dataset: Dataset) -> dict[str, float]:
    """Return the network's parameters, and the bytes that towers send and the thousands of
    multiplications a sample.
    """
    loader = Loader(dataset, "train", LoaderConfig(batch_size=256, shuffle_row_groups=1, expand=True))
    batches = loader.batches(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    with temporary_model(recipe, dataset, None) as model:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(batch)
        network = model.network
        by_towers = isinstance(network, TowerNetwork)
        columns = (
            sum(tower.columns for tower in network.all_towers) if by_towers else sum(model.embeddings.dims)
        )
        return {
            "parameters": sum(weight.numel() for weight in network.parameters()),
            "bytes_a_sample": 4 * columns,
            "kflop_a_sample": counter.get_total_flops() / batch.size / 1e3,
        }


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def learned_towers(base: Recipe, dataset: Dataset, count: int) -> tuple[tuple[str, ...], ...]:
    """Return the towers that `plan --towers` chooses."""
    return make_towers(changed(base, dataset, "dlrm", 0), dataset, TowerRequest(towers=count)).plan


def compare(
    base: Recipe, dataset: Dataset, plan: Sequence[Sequence[str]], kind: str, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row without towers, and a row for each compression of the towers of `plan`, of a
    model on a log.
    """
    name, make = base.name, partial(changed, base, dataset, kind)
    rate = best_rate(lambda rate: make(seeds[0], rate=rate), dataset)
    flat = {seed: auc(make(seed, rate=rate), dataset) for seed in seeds}
    uncompressed = auc(make(seeds[0], plan, rate=rate), dataset) - flat[seeds[0]]
    say(
        f"{name}, {kind}: AUC {mean(flat.values()):.5f} at rate {rate}, uncompressed "
        f"towers {uncompressed:+.5f}"
    )
    if abs(uncompressed) > MAX_UNCOMPRESSED_DELTA:
        raise AssertionError(f"{name}, {kind}: towers without compression change the AUC by {uncompressed}")
    about = {"data": name, "model": kind, "rate_flat": rate}
    first = {**about, "compression": 1.0, "auc": mean(flat.values()), "delta": uncompressed}
    rows = [first | cost(make(seeds[0]), dataset)]
    rate = best_rate(lambda rate: make(seeds[0], plan, COMPRESSIONS[0], rate), dataset)
    for ratio in COMPRESSIONS:
        deltas = [auc(make(seed, plan, ratio, rate), dataset) - flat[seed] for seed in seeds]
        error = stdev(deltas) / len(deltas) ** 0.5 if len(deltas) > 1 else None
        say(f"{name}, {kind}, 1/{ratio:g} at rate {rate}: {mean(deltas):+.5f} {deltas}")
        rows.append(
            {
                **about,
                "rate": rate,
                "compression": ratio,
                "auc": mean(flat.values()) + mean(deltas),
                "delta": mean(deltas),
                "error": error,
                "deltas": deltas,
                "plan": plan,
                **cost(make(seeds[0], plan, ratio), dataset),
            }
        )
    return rows


def best_rate(make: Callable[[float], Recipe], dataset: Dataset) -> float:
    """Return the learning rate of the rows with the best AUC on the validation split."""
    return max(RATES, key=lambda rate: auc(make(rate), dataset, "valid"))


def open_logs(
    folder: Path, quick: bool, names: Sequence[str] = LOGS
) -> Iterator[tuple[str, Recipe, Dataset]]:
    """Yield the name, the recipe and the data set of each named log whose files exist; with
    `quick`, of ``planted``.
    """

    def planted_log() -> tuple[Recipe, Dataset]:
        recipe = planted(folder, 60_000 if quick else 200_000)
        return recipe, prepare(recipe.data)

    def frappe_log() -> tuple[Recipe, Dataset]:
        recipe = replace(frappe("dcnv2", 0, Setting()), name="frappe")
        return recipe, prepare(recipe.data, overwrite=True)

    def demo_log() -> tuple[Recipe, Dataset]:
        recipe = Recipe.load(
            RECIPES / "demo.yaml", ["data.source.samples=400000", f"data.path={folder}/demo"]
        )
        return recipe, prepare(recipe.data)

    def opened(recipe: Recipe) -> tuple[Recipe, Dataset]:
        return recipe, Dataset.open(recipe.data.path)

    makers: dict[str, Callable[[], tuple[Recipe, Dataset]]] = {
        "planted": planted_log, "frappe": frappe_log,
        "trivago": lambda: (shipped("trivago", "auto"), prepared("trivago", "auto")),
        "globo": lambda: opened(globo(folder, quick=True)), "demo": demo_log,
        "criteo": lambda: opened(synthetic(folder, quick=False)),
    }  # fmt: skip
    check_names(names, LOGS, "--logs")
    for name in LOGS[:1] if quick else names:
        with suppress(PeerMissing):
            yield name, *makers[name]()


def check_names(names: Sequence[str], known: Sequence[str], option: str) -> None:
    """Check that an option contains only known names.

    Raises
    ------
    ConfigError
        Names the unknown value and the known ones.
    """
    if unknown := set(names) - set(known):
        raise ConfigError(f"{option} must be of {', '.join(known)}; got {', '.join(sorted(unknown))}")


def run(
    quick: bool, seeds: int = SEEDS, models: Sequence[str] = MODELS, logs: Sequence[str] = LOGS
) -> dict[str, Any]:
    """Run the benchmark on the named logs and models; `quick` has one seed of a small planted
    log.
    """
    check_names(models, MODELS, "--models")
    numbers, rows = tuple(range(1, 2 if quick else seeds + 1)), []
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe, dataset in open_logs(Path(folder), quick, logs):
            plan, base = learned_towers(recipe, dataset, TOWERS), replace(recipe, name=name)
            for kind in models:
                rows += compare(base, dataset, plan, kind, numbers)
    if not rows:
        raise PeerMissing(
            f"no file of the logs {', '.join(logs)}; set STRATAREC_TEST_DATA to their directory"
        )
    at = [row for row in rows if row["compression"] == METRIC_COMPRESSION]
    return {
        "config": {
            "compressions": COMPRESSIONS,
            "compression_of_metrics": METRIC_COMPRESSION,
            "towers": TOWERS,
            "seeds": numbers,
            "logs": tuple(dict.fromkeys(row["data"] for row in rows)),
            "models": models,
            "planted_blocks": PLANTED_BLOCKS,
            "model": MODEL,
            "embedding_rates": RATES,
            "passes": PASSES,
            "targets": {"auc_delta_towers_min": -0.0005},
        },
        "metrics": {
            "auc_delta_towers_min": min(row["delta"] for row in at),
            "auc_delta_towers_error": max(row["error"] or 0.0 for row in at),
            **{f"auc_delta_{row['data']}_{row['model']}": row["delta"] for row in at},
        },
        "samples": {"rows": rows},
    }
