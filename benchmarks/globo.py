"""Test AUC on the last day of a click log: this library, TorchRec, LightGBM, logistic regression
and popularity.

All contenders train on the same number of samples of the same days, drawn by seed (three seeds),
with the features of the recipe ``globo``: 17 counts of earlier clicks, ids, contexts, and the last
50 articles. StrataRec is measured with the recipe and with the settings that validation preferred
(`BEST`; see `docs/log.md`). TorchRec is its own DLRM with the recipe's settings and the better of
two rates; it starts from the same weights, uses FBGEMM's exact row-wise Adagrad and has no batch
normalization. Trees use target encodings and counts of categorical features (`benchmarks.trees`; of
a history, those of its last article), or only the numbers, as validation chooses. The logistic
regression is that of `clicks`, with the settings that validation chose there. No setting is chosen
on the test day.

Calibration on the test day is reported without a correction, and with each kind of
``train.calibration``, fitted on the validation day. The best settings are also measured with int8
and int4 rows and a cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import trees
from benchmarks.clicks import Logistic, TorchRecSide, gate
from benchmarks.kept import FOLDER, kept
from benchmarks.precision_quality import SHARES
from benchmarks.registry import import_peer
from benchmarks.sessions import prepared, recipe
from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.models.metrics import evaluate_logits
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.evaluate import ScoredSamples, corrected_by, fit, score_split
from stratarec.training.run.build_run import Run
from stratarec.training.torch_setup import torch_settings
from stratarec.training.trainer import Trainer

SAMPLES, QUICK_SAMPLES, SEEDS = 2_500_000, 20_000, 3
BATCH = 1024
BEST = ("model.batch_norm=true", "train.dense.learning_rate=0.005")
"""Changes to the recipe with the best validation AUC."""
ADAM = (*BEST, "model.dropout=0.1", "train.embedding.kind=adam", "train.embedding.learning_rate=0.001")
"""Changes for low precision: full Adam on rows, and dropout."""
LOGISTIC = (0.01, 0.0)
TORCHREC_RATES = (0.002, 0.005)
"""Learning rates of the network: the recipe's, and that of `BEST`."""
# Articles change from day to day, so their target encodings may overfit the training days.
TREES = (trees.GRID[1], {**trees.GRID[1], "encoded": False})
FIGURES = ("auc", "log_loss", "calibration")
CORRECTIONS = ("platt", "isotonic")
TARGETS = {"auc_delta_peers": 0.002, "auc_delta_int8_globo": -0.0005, "auc_delta_int4_globo": -0.001}
Row = dict[str, Any]
Logits = Callable[[Batch], Tensor]


class Log:
    """The prepared log, and recipes of runs on it.

    Parameters
    ----------
    samples : int
        Number of training samples; 0 for all.
    """

    def __init__(self, samples: int, threads: int, *, quick: bool) -> None:
        self.quick = quick
        self.threads = threads
        self.dataset: Dataset = prepared("globo", "auto")
        self.samples = min(samples or self.dataset.samples("train"), self.dataset.samples("train"))
        self.steps = -(-self.samples // BATCH)

    def recipe(self, seed: int, *changes: str) -> Recipe:
        """Return a recipe of one pass over the samples, with schedules of that length."""
        steps = [
            f"train.batch_size={BATCH}",
            f"train.max_steps={self.steps}",
            f"train.eval_every={self.steps}",
            f"train.dense.schedule.total_steps={self.steps}",
            f"train.embedding.schedule.total_steps={self.steps}",
        ]
        fixed = [f"train.seed={seed}", f"train.threads={self.threads}", "train.checkpoint.every_minutes=0"]
        return recipe("globo", "auto", *steps, *fixed, *changes)

    def scored(self, model: Logits, split: str) -> ScoredSamples:
        """Score a split with a model that takes expanded batches."""
        loader = Loader(self.dataset, split, LoaderConfig(batch_size=8192, shuffle=False, expand=True))
        with torch.no_grad():
            parts = [
                (batch.label.numpy().copy(), model(batch).numpy().copy())
                for batch in islice(loader.epoch(0), 2 if self.quick else None)
            ]
        label, logit = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ScoredSamples(label, logit, np.empty(0, np.int64), np.empty(0, np.float32))


def all_metrics(samples_of: dict[str, ScoredSamples], seconds: float) -> Row:
    """Return the metrics of the test day, without a correction and with each correction fitted on
    validation.
    """
    row: Row = {
        "seconds": seconds,
        "auc_valid": _figures(samples_of["valid"])["auc"],
        **_figures(samples_of["test"]),
    }
    row["calibration_valid"] = _figures(samples_of["valid"])["calibration"]
    for kind in CORRECTIONS:
        corrected = _figures(corrected_by(fit(kind, samples_of["valid"]), samples_of["test"]))  # type: ignore[arg-type]
        row |= {f"{name}_{kind}": corrected[name] for name in FIGURES}
    return row


def _figures(samples: ScoredSamples) -> dict[str, float]:
    metrics = evaluate_logits(samples.label, samples.logit)
    return {name: metrics[name] for name in FIGURES}


def ours(log: Log, seed: int, changes: Sequence[str]) -> Row:
    """Train the recipe with some changes and return its metrics."""
    run = Trainer(log.recipe(seed, *changes), log.dataset).build()
    try:
        began = time.perf_counter()
        for step, batch in enumerate(islice(run.loader.epoch(0), log.steps)):
            run.pipeline.train(step, batch)
        seconds = time.perf_counter() - began
        scored = {
            split: score_split(
                run.model, log.dataset, split, precision="float32", progress=SilentProgress()
            )
            for split in ("valid", "test")
        }
    finally:
        run.close()
    return all_metrics(scored, seconds)


def torchrec(log: Log, seed: int) -> Row:
    """Train TorchRec's own DLRM on the batches of the recipe; validation of the first seed chooses
    its rate.
    """
    rates = TORCHREC_RATES if seed == 1 else [measure(log, "torchrec", 1)["rate"]]
    rows = [{**_torchrec(log, seed, rate), "rate": rate} for rate in rates]
    return max(rows, key=lambda row: row["auc_valid"])


def _torchrec(log: Log, seed: int, rate: float) -> Row:
    changes = ("train.deduplicate=false", f"train.dense.learning_rate={rate}")
    recipe = log.recipe(seed, *changes)
    run = Trainer(recipe, log.dataset).build()
    side = TorchRecSide(recipe, run)
    gate(run, side)
    return _trained(log, run, side)


def logistic(log: Log, seed: int) -> Row:
    """Train a logistic regression on the same batches."""
    run = Trainer(log.recipe(seed, "train.deduplicate=false"), log.dataset).build()
    return _trained(log, run, Logistic(log.dataset, run.config.dense.schedule, *LOGISTIC))


def _trained(log: Log, run: Run, side: TorchRecSide | Logistic) -> Row:
    began = time.perf_counter()
    for batch in islice(run.loader.epoch(0), log.steps):
        side.step(batch)
    seconds = time.perf_counter() - began
    return all_metrics({split: log.scored(side, split) for split in ("valid", "test")}, seconds)


def lightgbm(log: Log, seed: int) -> Row:
    """Fit trees to numbers and target encodings of as many samples; the first seed's validation
    chooses settings.
    """
    grid = TREES if seed == 1 else [measure(log, "lightgbm", 1)["settings"]]
    dataset = log.dataset
    splits = {"train": trees.read(dataset, "train", log.samples, seed)}
    splits |= {split: trees.read(dataset, split) for split in ("valid", "test")}
    rows = [dataset.vocabularies[feature.vocabulary].rows for feature in dataset.schema.sparse]
    grown = trees.grow(splits, rows, seed=seed, threads=log.threads, quick=log.quick, grid=grid)
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    scored = {
        split: ScoredSamples(splits[split].label, getattr(grown, split).astype(np.float32), *none)
        for split in ("valid", "test")
    }
    return {**all_metrics(scored, grown.seconds), "trees": grown.trees, "settings": grown.settings}


def popularity(log: Log, seed: int) -> Row:
    """Score by the clicks of the article in the previous hour, which orders samples but is not a
    probability.
    """
    position = [feature.name for feature in log.dataset.schema.dense].index("popularity")
    row = all_metrics(
        {split: log.scored(lambda batch: batch.dense[:, position], split) for split in ("valid", "test")},
        0.0,
    )
    return {"auc": row["auc"], "auc_valid": row["auc_valid"]}


CHANGES: dict[str, Sequence[str]] = {
    "best": BEST,
    "recipe": (),
    "adam": ADAM,
    **{
        kind: (
            *ADAM, f"memory.precision={kind}", f"memory.cache.fraction={share}", "memory.state=bf16",
            "memory.lookahead=0",
        )
        for kind, share in SHARES.items()
    },
}  # fmt: skip
"""Contenders of this library -> their changes to the recipe."""
PEERS = {"torchrec": torchrec, "lightgbm": lightgbm, "logistic": logistic, "popularity": popularity}
DEFAULT = (*PEERS, *CHANGES)


def measure(log: Log, name: str, seed: int) -> Row:
    """Measure a contender, or return the stored result of an earlier measurement."""
    about = {
        "recipe": log.recipe(seed).to_dict(),
        "data": log.dataset.fingerprint,
        "changes": CHANGES.get(name),
    }
    about |= {"grid": TREES, "fixed": trees.FIXED} if name == "lightgbm" else {}
    about |= {"rates": TORCHREC_RATES} if name == "torchrec" else {}

    def make() -> Row:
        with torch_settings(threads=log.threads, seed=seed):
            return PEERS[name](log, seed) if name in PEERS else ours(log, seed, CHANGES[name])

    row = kept(FOLDER / "globo" / f"{name}-{seed}{'-quick' if log.quick else ''}.json", about, make)
    print(f"{name}, seed {seed}: AUC {row['auc']:.5f}", file=sys.stderr, flush=True)
    return {"model": name, "seed": seed, **row}


def run(
    quick: bool,
    models: Sequence[str] = DEFAULT,
    samples: Sequence[int] = (SAMPLES,),
    seeds: int = SEEDS,
    threads: int = 1,
) -> dict[str, Any]:
    """Measure every contender and seed; `quick` uses one seed with few samples and batches."""
    if other := [name for name in models if name not in DEFAULT]:
        raise ConfigError(f"--models: unknown contender {other[0]!r}; choose from {', '.join(DEFAULT)}")
    for peer in ("lightgbm", "torchrec"):
        if peer in models:
            import_peer(peer)
    log = Log(QUICK_SAMPLES if quick else samples[0], threads, quick=quick)
    draws = range(1, (1 if quick else seeds) + 1)
    rows = [measure(log, name, seed) for seed in draws for name in models]
    return {
        "config": {
            "samples": log.samples,
            "batch_size": BATCH,
            "seeds": list(draws),
            "threads": threads,
            "changes": CHANGES,
            "logistic": LOGISTIC,
            "shares": SHARES,
            "targets": TARGETS,
            "trees": {"grid": list(TREES), "fixed": trees.FIXED},
        },
        "metrics": comparison(rows),
        "samples": {"rows": [_shown(row) for row in rows], "found": rows},
    }


def comparison(rows: Sequence[Row]) -> dict[str, float]:
    """Return means over seeds of every contender, and the differences between contenders."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        metrics |= {
            f"{figure}_{name}": mean(row[figure] for row in mine) for figure in FIGURES if figure in mine[0]
        }
        if name in ("best", "recipe"):
            wanted = [f"{figure}_{kind}" for kind in CORRECTIONS for figure in ("calibration", "log_loss")]
            metrics |= {f"{figure}_{name}": mean(row[figure] for row in mine) for figure in wanted}
    peers = [name for name in PEERS if f"auc_{name}" in metrics]
    if "auc_best" in metrics and peers:
        metrics["auc_delta_peers"] = metrics["auc_best"] - max(metrics[f"auc_{name}"] for name in peers)
    for kind in SHARES:
        if "auc_adam" in metrics and f"auc_{kind}" in metrics:
            metrics[f"auc_delta_{kind}_globo"] = metrics[f"auc_{kind}"] - metrics["auc_adam"]
    return metrics


def _shown(row: Row) -> Row:
    """Return the columns that fit into a printed table."""
    return {name: row.get(name) for name in ("model", "seed", "auc", "log_loss", "calibration", "seconds")}
