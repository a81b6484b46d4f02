"""A click log's last day, three seeds: ours, TorchRec, LightGBM, logistic regression and popularity.

All train on the same number of samples of the same days, drawn by the seed, with the features of the recipe ``globo``:
17 numbers that are counted before each click, ids, contexts, and the last 50 articles. Ours are the recipe, and what
was best by validation (`BEST`; `docs/log.md` says what was tried). TorchRec's is its own DLRM by the recipe, with the
better of two rates, from the same first weights, with FBGEMM's exact row-wise Adagrad; it has no batch normalization.
Trees have target encodings and counts of what is categorical (`benchmarks.trees`), of a history those of its last
article, or the numbers alone: by validation. The logistic regression is that of `clicks`, with settings that validation
chose there. The test day chooses nothing.

The prediction over the rate of clicks on the test day is given without a correction, and with those of
``train.calibration``, fitted on the validation day. Then the recipe's best with int8 and int4 rows behind a cache.
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
from stratarec.training.torch_setup import torch_settings
from stratarec.training.trainer import Trainer

SAMPLES, QUICK_SAMPLES, SEEDS = 2_500_000, 20_000, 3
BATCH = 1024
BEST = ("model.batch_norm=true", "train.dense.learning_rate=0.005")
"""What was best by validation, beside the recipe's fields."""
ADAM = (*BEST, "model.dropout=0.1", "train.embedding.kind=adam", "train.embedding.learning_rate=0.001")
"""Low precision is looked at with full Adam on rows and dropout."""
LOGISTIC = (0.01, 0.0)
TORCHREC_RATES = (0.002, 0.005)
"""Of the network: the recipe's, and that of `BEST`."""
# Target encodings of articles that come and go say more about the training days than about later ones.
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
        To train on; 0 for all.
    """

    def __init__(self, samples: int, threads: int, *, quick: bool) -> None:
        self.quick, self.threads = quick, threads
        self.dataset: Dataset = prepared("globo", "auto")
        self.samples = min(samples or self.dataset.samples("train"), self.dataset.samples("train"))
        self.steps = -(-self.samples // BATCH)

    def recipe(self, seed: int, *changes: str) -> Recipe:
        """One pass over the samples, schedules as long as it is."""
        steps = [
            f"train.batch_size={BATCH}", f"train.max_steps={self.steps}", f"train.eval_every={self.steps}",
            f"train.dense.schedule.total_steps={self.steps}", f"train.embedding.schedule.total_steps={self.steps}",
        ]  # fmt: skip
        fixed = [f"train.seed={seed}", f"train.threads={self.threads}", "train.checkpoint.every_minutes=0"]
        return recipe("globo", "auto", *steps, *fixed, *changes)

    def scored(self, model: Logits, split: str) -> ScoredSamples:
        """What anything that scores expanded batches says of a split."""
        loader = Loader(self.dataset, split, LoaderConfig(batch_size=8192, shuffle=False, expand=True))
        with torch.no_grad():
            parts = [
                (batch.label.numpy().copy(), model(batch).numpy().copy())
                for batch in islice(loader.epoch(0), 2 if self.quick else None)
            ]
        label, logit = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ScoredSamples(label, logit, np.empty(0, np.int64), np.empty(0, np.float32))


def judged(found: dict[str, ScoredSamples], seconds: float) -> Row:
    """Figures of the test day, without a correction and with each that validation fits."""
    row: Row = {"seconds": seconds, "auc_valid": _figures(found["valid"])["auc"], **_figures(found["test"])}
    row["calibration_valid"] = _figures(found["valid"])["calibration"]
    for kind in CORRECTIONS:
        corrected = _figures(corrected_by(fit(kind, found["valid"]), found["test"]))  # type: ignore[arg-type]
        row |= {f"{name}_{kind}": corrected[name] for name in FIGURES}
    return row


def _figures(found: ScoredSamples) -> dict[str, float]:
    metrics = evaluate_logits(found.label, found.logit)
    return {name: metrics[name] for name in FIGURES}


def ours(log: Log, seed: int, changes: Sequence[str]) -> Row:
    """A run of the recipe with some changes; its tables are open for what is fitted afterwards."""
    trainer = Trainer(log.recipe(seed, *changes), log.dataset)
    try:
        began = time.perf_counter()
        for batch in islice(trainer.loader.epoch(0), log.steps):
            trainer.loop.step(batch)
        seconds = time.perf_counter() - began
        found = {
            split: score_split(trainer.model, log.dataset, split, precision="float32", progress=SilentProgress())
            for split in ("valid", "test")
        }
    finally:
        trainer.model.embeddings.close()
    return judged(found, seconds)


def torchrec(log: Log, seed: int) -> Row:
    """TorchRec's own DLRM on the batches of the recipe; the first seed's validation chooses its rate."""
    rates = TORCHREC_RATES if seed == 1 else [contend(log, "torchrec", 1)["rate"]]
    found = [{**_torchrec(log, seed, rate), "rate": rate} for rate in rates]
    return max(found, key=lambda row: row["auc_valid"])


def _torchrec(log: Log, seed: int, rate: float) -> Row:
    changes = ("train.deduplicate=false", f"train.dense.learning_rate={rate}")
    trainer = Trainer(log.recipe(seed, *changes), log.dataset)
    side = TorchRecSide(trainer)
    gate(trainer, side)
    return _trained(log, trainer, side)


def logistic(log: Log, seed: int) -> Row:
    """A logistic regression on the same batches."""
    trainer = Trainer(log.recipe(seed, "train.deduplicate=false"), log.dataset)
    return _trained(log, trainer, Logistic(log.dataset, trainer.config.dense.schedule, *LOGISTIC))


def _trained(log: Log, trainer: Trainer, side: TorchRecSide | Logistic) -> Row:
    began = time.perf_counter()
    for batch in islice(trainer.loader.epoch(0), log.steps):
        side.step(batch)
    seconds = time.perf_counter() - began
    return judged({split: log.scored(side, split) for split in ("valid", "test")}, seconds)


def lightgbm(log: Log, seed: int) -> Row:
    """Trees on numbers and target encodings of as many samples; the first seed's validation chooses their settings."""
    grid = TREES if seed == 1 else [contend(log, "lightgbm", 1)["settings"]]
    dataset = log.dataset
    splits = {"train": trees.read(dataset, "train", log.samples, seed)}
    splits |= {split: trees.read(dataset, split) for split in ("valid", "test")}
    rows = [dataset.vocabularies[feature.vocabulary].rows for feature in dataset.schema.sparse]
    grown = trees.grow(splits, rows, seed=seed, threads=log.threads, quick=log.quick, grid=grid)
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    found = {
        split: ScoredSamples(splits[split].label, getattr(grown, split).astype(np.float32), *none)
        for split in ("valid", "test")
    }
    return {**judged(found, grown.seconds), "trees": grown.trees, "settings": grown.settings}


def popularity(log: Log, seed: int) -> Row:
    """Clicks of the article in the hour before: it orders samples and is no probability."""
    place = [feature.name for feature in log.dataset.schema.dense].index("popularity")
    row = judged({split: log.scored(lambda batch: batch.dense[:, place], split) for split in ("valid", "test")}, 0.0)
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
"""Contenders that are ours -> what they change in the recipe."""
PEERS = {"torchrec": torchrec, "lightgbm": lightgbm, "logistic": logistic, "popularity": popularity}
DEFAULT = (*PEERS, *CHANGES)


def contend(log: Log, name: str, seed: int) -> Row:
    """What a contender found, or had found before."""
    about = {"recipe": log.recipe(seed).to_dict(), "data": log.dataset.fingerprint, "changes": CHANGES.get(name)}
    about |= {"grid": TREES, "fixed": trees.FIXED} if name == "lightgbm" else {}
    about |= {"rates": TORCHREC_RATES} if name == "torchrec" else {}

    def make() -> Row:
        with torch_settings(threads=log.threads, seed=seed):
            return PEERS[name](log, seed) if name in PEERS else ours(log, seed, CHANGES[name])

    found = kept(FOLDER / "globo" / f"{name}-{seed}{'-quick' if log.quick else ''}.json", about, make)
    print(f"{name}, seed {seed}: AUC {found['auc']:.5f}", file=sys.stderr, flush=True)
    return {"model": name, "seed": seed, **found}


def run(
    quick: bool, models: Sequence[str] = DEFAULT, samples: Sequence[int] = (SAMPLES,), seeds: int = SEEDS,
    threads: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Every contender and seed; `quick` has one seed of few samples and batches."""
    if other := [name for name in models if name not in DEFAULT]:
        raise ConfigError(f"globo has no {other[0]!r}; there are {', '.join(DEFAULT)}")
    for peer in ("lightgbm", "torchrec"):
        if peer in models:
            import_peer(peer)
    log = Log(QUICK_SAMPLES if quick else samples[0], threads, quick=quick)
    draws = range(1, (1 if quick else seeds) + 1)
    rows = [contend(log, name, seed) for seed in draws for name in models]
    return {
        "config": {
            "samples": log.samples, "batch_size": BATCH, "seeds": list(draws), "threads": threads,
            "changes": CHANGES, "logistic": LOGISTIC, "shares": SHARES, "targets": TARGETS,
            "trees": {"grid": list(TREES), "fixed": trees.FIXED},
        },
        "metrics": compared(rows),
        "samples": {"rows": [_shown(row) for row in rows], "found": rows},
    }  # fmt: skip


def compared(rows: Sequence[Row]) -> dict[str, float]:
    """Means over seeds of every contender, and differences of those that are there."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        found |= {f"{figure}_{name}": mean(row[figure] for row in mine) for figure in FIGURES if figure in mine[0]}
        if name in ("best", "recipe"):
            wanted = [f"{figure}_{kind}" for kind in CORRECTIONS for figure in ("calibration", "log_loss")]
            found |= {f"{figure}_{name}": mean(row[figure] for row in mine) for figure in wanted}
    peers = [name for name in PEERS if f"auc_{name}" in found]
    if "auc_best" in found and peers:
        found["auc_delta_peers"] = found["auc_best"] - max(found[f"auc_{name}"] for name in peers)
    for kind in SHARES:
        if "auc_adam" in found and f"auc_{kind}" in found:
            found[f"auc_delta_{kind}_globo"] = found[f"auc_{kind}"] - found["auc_adam"]
    return found


def _shown(row: Row) -> Row:
    """What a table has room for."""
    return {name: row.get(name) for name in ("model", "seed", "auc", "log_loss", "calibration", "seconds")}
